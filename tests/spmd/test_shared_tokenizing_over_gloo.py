# SPDX-License-Identifier: Apache-2.0
"""Loaders of several processes over gloo: the same steps, a share of the work each, and no rank left waiting."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.loading_ranks import (
    LoadTask,
    failing_rank,
    late_rank,
    leaving_rank,
    loaded,
    loading_rank,
    raising_loader_rank,
    sending_rank,
)
from helpers.ranks import ranks_in_turn
from helpers.tiny import save_tiny_folder, write_chats
from podium.spmd.launch import launch

pytestmark = pytest.mark.slow

RANKS = 4
BAD_LINE = 150


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> LoadTask:
    folder = tmp_path_factory.mktemp("shared")
    save_tiny_folder(folder / "model")
    return LoadTask(model=folder / "model", data=write_chats(folder / "train.jsonl"))


@pytest.fixture(scope="module")
def bad(task: LoadTask) -> LoadTask:
    """The same data with a row that cannot be used."""
    lines = (task.data.read_text().splitlines() * 10)[: 2 * BAD_LINE]
    lines[BAD_LINE - 1] = json.dumps({"body": "oops"})
    data = task.data.with_name("bad.jsonl")
    data.write_text("\n".join(lines) + "\n")
    return LoadTask(model=task.model, data=data)


@pytest.fixture(scope="module")
def results(task: LoadTask, bad: LoadTask) -> dict[str, Any]:
    """What rank 0 of four ranks returned, by function. One start of processes for all."""
    state = loaded(task, None).state
    calls: dict[str, Any] = {
        "loading": (loading_rank, (task,)),
        "resumed": (loading_rank, (LoadTask(model=task.model, data=task.data, steps=8, state=state),)),
        "failing": (failing_rank, (bad,)),
        "leaving": (leaving_rank, ()),
        "late": (late_rank, ()),
        "sending": (sending_rank, ()),
        "raising": (raising_loader_rank, ()),
    }
    values = launch(ranks_in_turn, (list(calls.values()),), ranks=RANKS, restarts=0, stop_file=None)
    return dict(zip(calls, values, strict=True))


def test_four_ranks_load_the_steps_of_one(task: LoadTask, results: dict[str, Any]) -> None:
    alone = loaded(task, None)
    assert [each.digests for each in results["loading"]] == [alone.digests] * RANKS


def test_each_rank_tokenizes_its_share(task: LoadTask, results: dict[str, Any]) -> None:
    shares = [each.num_tokenized for each in results["loading"]]
    num_rows = len(task.data.read_text().splitlines())
    assert sum(shares) <= num_rows + 4 * RANKS  # rows of the next epoch that were drawn before they were known
    assert max(shares) - min(shares) <= 4, "chunks of four rows"


def test_a_state_of_one_rank_goes_on_with_four(task: LoadTask, results: dict[str, Any]) -> None:
    alone = loaded(task, None)
    assert [each.digests for each in results["resumed"]] == [alone.digests[4:]] * RANKS


def test_a_bad_row_is_the_error_of_all_ranks_after_the_same_step(results: dict[str, Any]) -> None:
    num_steps, text = results["failing"][0]
    assert num_steps > 0
    assert f"bad.jsonl, line {BAD_LINE}: " in text
    assert results["failing"] == [(num_steps, text)] * RANKS


def test_a_rank_that_ends_is_not_waited_for(results: dict[str, Any]) -> None:
    texts = [text for text, _ in results["leaving"]]
    assert texts[1] == ""
    assert all("rank 1 has ended" in text for text in (texts[0], *texts[2:]))
    assert max(seconds for _, seconds in results["leaving"]) < 12


def test_a_rank_that_does_not_come_is_named_after_the_deadline(results: dict[str, Any]) -> None:
    text, _ = results["late"][0]
    assert "waited 2 s" in text
    assert "ranks [1" in text
    assert "placement.timeout_s" in text
    assert results["late"][2] == ("", True), "one that is stopped does not wait"


def test_payloads_of_any_length_come_in_rank_order(results: dict[str, Any]) -> None:
    assert results["sending"] == [True] * RANKS


def test_the_error_of_one_loader_is_that_of_all(results: dict[str, Any]) -> None:
    assert results["raising"] == ["rank 2 cannot read nodes.jsonl"] * RANKS
