# SPDX-License-Identifier: Apache-2.0
"""A group of many long episodes has an answer of bounded size, and the rest can be asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.run_folders import episode, write_rollouts
from podium.ui import rollout_groups
from podium.ui.rollout_groups import fair_share


def long_episode(sample: int, tokens: int) -> dict[str, Any]:
    numbers = list(range(tokens))
    return episode(
        7, 0, sample, tokens=numbers, texts=[f"t{at}" for at in numbers], loss_mask=[True] * tokens,
        log_probs=[-1.0] * tokens, versions=[1] * tokens, advantages=[None] * tokens,
        messages=json.dumps([{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "x" * tokens}]),
    )  # fmt: skip


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_groups, "_MOST_TOKENS", 100)
    monkeypatch.setattr(rollout_groups, "_MOST_OF_EPISODE", 60)
    monkeypatch.setattr(rollout_groups, "_MOST_EPISODES", 4)
    monkeypatch.setattr(rollout_groups, "_MOST_CHARACTERS", 1200)


def test_long_episodes_share_what_an_answer_may_have(browser: Any, runs: Path, limits: None) -> None:
    write_rollouts(runs / "one", 7, [long_episode(sample, 10 if sample == 1 else 500) for sample in (3, 1, 0, 2)])
    found = browser.get("/api/runs/one/rollouts/7/0")

    assert [each["sample"] for each in found["episodes"]] == [0, 1, 2, 3]
    # The short one has its 10 tokens, and each of the others a third of 90.
    assert [len(each["tokens"]) for each in found["episodes"]] == [30, 10, 30, 30]
    assert [each["num_tokens"] for each in found["episodes"]] == [500, 10, 500, 500]
    assert [each.get("tokens_left_out") for each in found["episodes"]] == [470, None, 470, 470]
    for name in ("tokens", "texts", "loss_mask", "log_probs", "versions", "advantages"):
        assert {len(each[name]) for each in found["episodes"]} == {30, 10}
    assert all(each["characters_left_out"] > 0 for each in found["episodes"] if each["sample"] != 1)
    assert found["episodes"][0]["messages"][0] == {"role": "user", "content": "Go on"}
    assert len(json.dumps([each["messages"] for each in found["episodes"]])) < 2000
    assert found["left_out"] == 0


def test_one_answer_can_be_read_to_its_end(browser: Any, runs: Path, limits: None) -> None:
    write_rollouts(runs / "one", 7, [long_episode(sample, 150) for sample in range(3)])
    tokens: list[int] = []
    while True:
        (part,) = browser.get(f"/api/runs/one/rollouts/7/0?sample=2&token={len(tokens)}")["episodes"]
        assert part["sample"] == 2
        assert part.get("first_token", 0) == len(tokens)
        assert len(part["texts"]) == len(part["tokens"]) <= 60
        tokens += part["tokens"]
        if "tokens_left_out" not in part:
            break
        assert part["tokens_left_out"] == 150 - len(tokens)
    assert tokens == list(range(150))


def test_many_answers_come_in_parts(browser: Any, runs: Path, limits: None) -> None:
    write_rollouts(runs / "one", 7, [long_episode(sample, 5) for sample in range(10)])
    samples: list[int] = []
    while True:
        found = browser.get(f"/api/runs/one/rollouts/7/0?episode={len(samples)}")
        assert found["first_episode"] == len(samples)
        samples += [each["sample"] for each in found["episodes"]]
        assert found["left_out"] == 10 - len(samples)
        if not found["left_out"]:
            break
    assert samples == list(range(10))


def test_a_group_of_gigabytes_is_an_answer_of_megabytes(browser: Any, runs: Path) -> None:
    """As many tokens as a test has time for: the whole of it would be 20 MB."""
    row = long_episode(0, 12_000)
    write_rollouts(runs / "one", 7, [row | {"sample": sample} for sample in range(25)])
    answer = browser.ask("/api/runs/one/rollouts/7/0")

    assert answer.status == 200
    assert len(answer.body) < 16_000_000
    assert sum(len(each["tokens"]) for each in answer.json["episodes"]) == 200_000


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [("sample=99", 404, "has no sample 99"), ("sample=x", 400, "not a whole number"), ("token=-1", 200, "")],
)
def test_parts_that_are_not_there(browser: Any, query: str, status: int, text: str) -> None:
    answer = browser.ask(f"/api/runs/one/rollouts/3/1?{query}")
    assert answer.status == status
    assert text in answer.json.get("error", "")


def test_a_part_after_the_end_is_empty(browser: Any) -> None:
    (found,) = browser.get("/api/runs/one/rollouts/3/1?sample=0&token=1000")["episodes"]
    assert (found["tokens"], found["first_token"], found["num_tokens"]) == ([], 8, 8)
    assert browser.get("/api/runs/one/rollouts/3/1?episode=1000") == {
        "episodes": [], "first_episode": 1000, "left_out": 0,
    }  # fmt: skip


def test_a_file_of_several_row_groups(browser: Any, runs: Path) -> None:
    import pyarrow.parquet as pq

    path = write_rollouts(runs / "one", 7, [long_episode(sample, 5) for sample in range(9)])
    pq.write_table(pq.read_table(path), path, row_group_size=2)
    found = browser.get("/api/runs/one/rollouts/7/0")["episodes"]
    assert [(each["sample"], each["tokens"]) for each in found] == [(at, [0, 1, 2, 3, 4]) for at in range(9)]


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 200))
def test_fair_shares(sizes: list[int], budget: int) -> None:
    share = fair_share(sizes, budget)
    assert sum(min(size, share) for size in sizes) <= budget
    if any(size > share for size in sizes):  # then one more for each would be too much
        assert sum(min(size, share + 1) for size in sizes) > budget
