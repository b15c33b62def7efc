# SPDX-License-Identifier: Apache-2.0
"""Runs with one injected problem each, and a healthy one: what the overview of the page says of them. It must name the
problem, and none of the others."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers import problem_runs
from helpers.on_policy import rl_recipe
from helpers.workspace import Workspace
from podium.planning.run_costs import estimate_costs
from podium.planning.run_records import read_records
from podium.planning.suggestion import ALARM, SUGGESTION, suggest, suggestion_lines
from podium.ui.server import PageServer

pytestmark = pytest.mark.slow

# What a reader finds on the page, by the problem that it names.
SIGNS = {
    "slow grader": ("wait for grading", "graders are busy"),
    "slow generator": ("is slow: it generates",),
    "length explosion": ("answers have grown", "of the answers are cut off"),
    "wrong reward": ("the reward may pay for something else", "may game"),
    "stale weights": ("versions old on average",),
}
SLOW_REWARD = """
import time

def slow(answer):
    time.sleep(0.05)
    return sum(letter.isdigit() for letter in answer) / max(1, len(answer))
"""


@contextmanager
def served(runs: Path) -> Iterator[str]:
    server = PageServer(runs)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server.url
    finally:
        server.stop()


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.load(answer)


def findings(run: Path) -> list[dict[str, str]]:
    """As the overview asks for them: again and again until nothing is pending. A reader has a minute; a machine that
    runs other tests beside this one may take longer."""
    with served(run.parent) as address:
        assert run.name in {row["id"] for row in get(f"{address}api/runs")["runs"]}
        assert get(f"{address}api/runs/{run.name}")["broken"] is None
        until_s = time.monotonic() + 240
        while (found := get(f"{address}api/runs/{run.name}/findings"))["pending"]:
            assert time.monotonic() < until_s, "the page says nothing"
            time.sleep(0.2)
    assert found["findings"] is not None, "the records cannot be read"
    return list(found["findings"])


def named(found: list[dict[str, str]]) -> set[str]:
    texts = [each["text"] for each in found if each["kind"] != "suggestion"]
    return {problem for problem, signs in SIGNS.items() if any(sign in text for sign in signs for text in texts)}


@pytest.mark.parametrize(
    ("problem", "make", "details"),
    [
        ("slow grader", problem_runs.slow_grader, ("grading.workers",)),
        ("slow generator", problem_runs.slow_generator, ("rollout[1]", "the others")),
        ("length explosion", problem_runs.length_explosion, ("response/mean", "tokens")),
        ("wrong reward", problem_runs.wrong_reward, ("4% are at step 24", "held-out")),
        ("stale weights", problem_runs.stale_weights, ("rollout.staleness is 4", "algorithm.correction: none")),
    ],
)  # fmt: skip
def test_an_injected_problem_is_named_and_no_other(
    tmp_path: Path, problem: str, make: Callable[[Path], Path], details: tuple[str, ...]
) -> None:
    found = findings(make(tmp_path))
    assert named(found) == {problem}, found
    texts = " ".join(each["text"] for each in found)
    assert all(detail in texts for detail in details), found


@pytest.mark.parametrize(
    ("make", "begins", "has"),
    [
        (problem_runs.slow_grader, SUGGESTION, "grading.workers 2 → "),
        (problem_runs.slow_generator, ALARM, "rollout[1] is slow"),
        (problem_runs.length_explosion, ALARM, "answers have grown"),
        (problem_runs.wrong_reward, ALARM, "the reward may pay for something else"),
    ],
    ids=["slow grader", "slow generator", "length explosion", "wrong reward"],
)
def test_the_end_of_a_run_says_the_same(tmp_path: Path, make: Callable[[Path], Path], begins: str, has: str) -> None:
    (line,) = suggestion_lines(make(tmp_path))

    assert line.startswith(begins)
    assert has in line


def test_no_more_staleness_is_suggested_to_a_run_with_stale_weights(tmp_path: Path) -> None:
    assert not any("rollout.staleness" in line for line in suggestion_lines(problem_runs.stale_weights(tmp_path)))


def test_nothing_is_wrong_with_a_healthy_run(tmp_path: Path) -> None:
    found = findings(problem_runs.healthy(tmp_path))
    assert named(found) == set(), found
    assert [each for each in found if each["kind"] == "alarm"] == []


def test_a_slow_reward_of_a_real_run_is_named(workspace: Workspace) -> None:
    (workspace.path / "slow.py").write_text(SLOW_REWARD)
    recipe = rl_recipe(workspace, steps=4, reward=[{"function": "slow.py:slow"}])
    outcome = workspace.podium("train", recipe)
    assert outcome.code == 0, outcome
    found = findings(workspace.path / "runs" / "sums")
    assert named(found) == {"slow grader"}, found


def test_more_graders_save_in_a_real_run_what_was_predicted(workspace: Workspace) -> None:
    """16 calls of 0.25 s a step, by one grader and by two: 4 s and 2 s, beside a generation that takes far less. What
    is saved is within a quarter of the prediction, on a machine that does other things too."""
    (workspace.path / "slow.py").write_text(SLOW_REWARD.replace("0.05", "0.25"))
    means: list[float] = []
    for graders in (1, 2):
        recipe = rl_recipe(
            workspace, steps=6, reward=[{"function": "slow.py:slow"}], grading={"workers": graders},
            run={"name": f"graders-{graders}"},
        )  # fmt: skip
        outcome = workspace.podium("train", recipe)
        assert outcome.code == 0, outcome
        if graders == 1:
            assert "grading.workers 1 → 2 saves about" in outcome.out + outcome.err
        means.append(read_records(workspace.path / "runs" / f"graders-{graders}").step_s)
    found = suggest(estimate_costs(read_records(workspace.path / "runs" / "graders-1")), budget_s=60.0)

    assert found is not None
    assert found.base.changes_to(found.change) == {"grading.workers": ("1", "2")}
    assert found.saved_s == pytest.approx(means[0] - means[1], rel=0.25)


def test_a_wrong_reward_of_a_real_run_is_named_first(workspace: Workspace) -> None:
    """It pays for digits, which no held-out answer is right by. The policy has learned that before the first
    evaluation, and its entropy has fallen too."""
    rows = (workspace.path / "train.jsonl").read_text().splitlines()
    (workspace.path / "heldout.jsonl").write_text("".join(f"{row}\n" for row in rows[:32]))
    recipe = rl_recipe(
        workspace, steps=30, optimizer={"lr": 1e-2}, rollout={"max_new_tokens": 12},
        data={"train": [{"path": "train.jsonl"}], "heldout": [{"path": "heldout.jsonl"}]},
        evaluation={"every": 15, "generation": {"prompts": 32, "score": "exact_match"}},
    )  # fmt: skip
    outcome = workspace.podium("train", recipe)
    assert outcome.code == 0, outcome
    found = findings(workspace.path / "runs" / "sums")
    assert "wrong reward" in named(found), found
    assert "the reward may pay for something else" in found[0]["text"]


def test_nothing_is_alarming_in_a_real_run(workspace: Workspace) -> None:
    outcome = workspace.podium("train", rl_recipe(workspace, steps=8, optimizer={"lr": 1e-4}))
    assert outcome.code == 0, outcome
    found = findings(workspace.path / "runs" / "sums")
    assert named(found) == set(), found
    assert [each for each in found if each["kind"] == "alarm"] == []
