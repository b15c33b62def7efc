# SPDX-License-Identifier: Apache-2.0
"""Where the time of real runs went: nothing is lost, almost nothing is unknown, and an injected problem is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.on_policy import rl_recipe
from helpers.times import largest_wait, times_of
from helpers.workspace import Workspace
from podium.observe.timeline import engine_steps, read_slowest, read_timeline

SLOW_REWARD = """
import time

def slow(answer):
    time.sleep(0.05)
    return sum(letter.isdigit() for letter in answer) / max(1, len(answer))
"""
SLOW_TOOL = """
import asyncio
from podium.environments.protocol import Outcome

class Patient:
    async def reset(self, task):
        return None

    async def step(self, turn):
        await asyncio.sleep(0.8)
        return Outcome(messages=[{"role": "user", "content": "again"}], reward=float(len(turn.text) % 3))
"""
TURNS = """
from podium.environments.protocol import Outcome

class Turns:
    async def reset(self, task):
        self.is_long = "long" in task.messages[0]["content"]

    async def step(self, turn):
        done = not self.is_long
        return Outcome(messages=[] if done else [{"role": "user", "content": "on"}], reward=1.0, done=done)
"""


def trained(workspace: Workspace, **changes: Any) -> Path:
    outcome = workspace.podium("train", rl_recipe(workspace, **changes))
    assert outcome.code == 0, outcome
    return workspace.path / "runs" / "sums"


@pytest.mark.slow
def test_a_small_run_is_accounted_and_its_engine_is_summed_up(workspace: Workspace) -> None:
    heldout = [json.loads(line) for line in (workspace.path / "train.jsonl").read_text().splitlines()[:4]]
    workspace.rows("heldout.jsonl", heldout)
    data = {"train": [{"path": "train.jsonl"}], "heldout": [{"path": "heldout.jsonl"}]}
    run = trained(workspace, steps=3, data=data, evaluation={"every": 2}, checkpoint={"every": 2})
    by_kind = times_of(run)
    assert by_kind["train"].seconds.keys() >= {"generation", "update", "waiting for start-up", "evaluation", "save"}
    assert by_kind["graders"].seconds.keys() >= {
        "grading", "waiting for the other role", "waiting for evaluation", "waiting for save",
    }  # fmt: skip
    summaries = list(engine_steps(read_timeline(run)))
    assert len(summaries) >= 3
    assert all(0 < each.lanes <= 16 and each.steps > 0 for each in summaries)
    assert max(each.generated_tokens for each in summaries) <= 16 * 6
    slowest = list(read_slowest(run))
    assert [each.step for each in slowest] == [1] * 3 + [2] * 3 + [3] * 3
    assert all(each.seconds > 0 and each.worker.startswith("train[0]") and each.tokens <= 6 for each in slowest)


@pytest.mark.slow
def test_a_slow_reward_is_named(workspace: Workspace) -> None:
    (workspace.path / "slow.py").write_text(SLOW_REWARD)
    by_kind = times_of(trained(workspace, steps=2, reward=[{"function": "slow.py:slow"}]))
    assert largest_wait(by_kind["train"]) == "waiting for grading"
    assert by_kind["train"].seconds["waiting for grading"] > 0.5


@pytest.mark.slow
def test_a_slow_tool_is_named(workspace: Workspace) -> None:
    (workspace.path / "patient.py").write_text(SLOW_TOOL)
    by_kind = times_of(
        trained(workspace, steps=2, reward=[], environment={"environment": "patient.py:Patient", "max_turns": 2})
    )
    assert largest_wait(by_kind["train"]) == "waiting for tools"
    assert by_kind["runners"].seconds["waiting for tools"] > 2.5  # four turns of 0.8 s, all episodes at once


@pytest.mark.slow
def test_one_long_episode_is_named(workspace: Workspace) -> None:
    """In every step one prompt needs many turns, and the others one."""
    rows = [
        {"messages": [{"role": "user", "content": f"{'long' if at % 4 == 2 else 'short'} {at}"}]} for at in range(8)
    ]
    workspace.rows("train.jsonl", rows)
    (workspace.path / "turns.py").write_text(TURNS)
    run = trained(
        workspace, steps=2, reward=[], environment={"environment": "turns.py:Turns", "max_turns": 20},
        data={"train": [{"path": "train.jsonl"}], "shuffle": False}, rollout={"samples_per_prompt": 2},
    )  # fmt: skip
    by_kind = times_of(run)
    assert largest_wait(by_kind["runners"]) == "waiting for the tail of generation"
    slowest = {each.step: each for each in reversed(list(read_slowest(run)))}
    assert {step: each.group for step, each in slowest.items()} == {1: 2, 2: 6}
    assert slowest[2].tokens > 20


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_of_an_spmd_program_are_accounted(workspace: Workspace, ranks: int) -> None:
    assert workspace.podium("train", workspace.recipe(steps=6, placement={"devices": ranks})).code == 0
    by_kind = times_of(workspace.path / "runs" / "sums")
    assert by_kind.keys() == {"ranks"}
    assert by_kind["ranks"].seconds.keys() >= {"start-up", "update", "waiting for data", "save"}
