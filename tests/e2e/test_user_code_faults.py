# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose environments and rewards block, crash or print without end: they finish, and say what failed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from pathlib import Path

import pytest

from helpers.messages import facts
from helpers.on_policy import numbers, rl_recipe, said_by
from helpers.workspace import Workspace

# The first episode of every step misbehaves.
ENVIRONMENT = """
import os
import time

from podium.environments.protocol import Observation, Outcome


class Game:
    def __init__(self, how):
        self._how = how

    async def reset(self, task):
        self._is_bad = task.row["messages"][0]["content"] == {first!r}
        return Observation()

    async def step(self, turn):
        if self._is_bad and self._how == "block":
            time.sleep(1e6)
        if self._is_bad and self._how == "exit":
            os._exit(3)
        if self._is_bad and self._how == "eat":
            blocks = []
            while True:
                blocks.append(b"x" * 2**24)
        return Outcome(messages="again", reward=float(len(set(turn.text))), done=turn.number == 1)
"""
REWARD = """
import os
import subprocess


def eats(answer, row):
    if row["messages"][0]["content"] == {first!r}:
        subprocess.Popen(["sleep", "{seconds}"], start_new_session=True)
        blocks = []
        while True:
            blocks.append(b"x" * 2**24)
    return float(len(set(answer)))


def leaves(answer, row):
    if row["messages"][0]["content"] == {first!r}:
        os._exit(3)
    return float(len(set(answer)))


def prints(answer, row):
    print("x" * 1_000_000)
    return float(len(set(answer)))
"""
IN_ORDER = {"train": [{"path": "train.jsonl"}], "shuffle": False}


def _first_prompt(workspace: Workspace) -> str:
    row = json.loads((workspace.path / "train.jsonl").read_text().splitlines()[0])
    return str(row["messages"][0]["content"])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "why"), [("exit", ["step: ", "exit code"]), ("block", ["step: blocked ", "2 s"])])
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_an_environment_that_blocks_or_ends_its_process_costs_its_group(
    workspace: Workspace, how: str, why: list[str], launcher: str
) -> None:
    (workspace.path / "game.py").write_text(ENVIRONMENT.format(first=_first_prompt(workspace)))
    environment = {"environment": "game.py:Game", "options": {"how": how}, "max_turns": 2, "timeout_s": 2.0}
    recipe = rl_recipe(workspace, environment=environment, data=IN_ORDER, steps=2, placement={"launcher": launcher})

    said = said_by("train", recipe, output=workspace.path / "said.txt")

    assert re.search(facts("4 of 16 ", "step 1 ", *why), said)
    assert sorted(numbers(workspace.path / "runs" / "sums")) == [1, 2]


@pytest.mark.slow
def test_a_reward_that_ends_its_process_costs_its_group(workspace: Workspace) -> None:
    (workspace.path / "faults.py").write_text(REWARD.format(first=_first_prompt(workspace), seconds=1))
    recipe = rl_recipe(workspace, reward=[{"function": "faults.py:leaves"}], data=IN_ORDER, steps=2)

    said = said_by("train", recipe, output=workspace.path / "said.txt")

    assert re.search(facts("4 of 16 ", "step 1 ", "leaves ", "exit code 3"), said)
    assert sorted(numbers(workspace.path / "runs" / "sums")) == [1, 2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_a_reward_that_takes_too_much_memory_costs_its_group_and_leaves_no_process(
    workspace: Workspace, launcher: str
) -> None:
    seconds = 10**7 + os.getpid()  # of a command that no other test has
    (workspace.path / "faults.py").write_text(REWARD.format(first=_first_prompt(workspace), seconds=seconds))
    recipe = rl_recipe(
        workspace, reward=[{"function": "faults.py:eats"}], data=IN_ORDER, steps=2,
        grading={"memory_gib": 0.5}, placement={"launcher": launcher},
    )  # fmt: skip

    said = said_by("train", recipe, output=workspace.path / "said.txt")

    assert re.search(facts("4 of 16 ", "step 1 ", "eats ", "grading.memory_gib ", "0.5 GiB"), said)
    found = numbers(workspace.path / "runs" / "sums")
    shares = ("episodes", "episodes/failed", "episodes/dropped", "episodes/learned_from")
    assert [found[step][name] for step in (1, 2) for name in shares] == [16, 4, 4, 12, 16, 0, 0, 16]
    assert [name for name in _commands() if name == f"sleep {seconds}"] == []


def _commands() -> list[str]:
    """Command lines of all processes."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_an_environment_that_takes_too_much_memory_costs_its_group(workspace: Workspace) -> None:
    (workspace.path / "game.py").write_text(ENVIRONMENT.format(first=_first_prompt(workspace)))
    environment = {"environment": "game.py:Game", "options": {"how": "eat"}, "max_turns": 2, "memory_gib": 0.5}
    recipe = rl_recipe(workspace, environment=environment, data=IN_ORDER, steps=2)

    said = said_by("train", recipe, output=workspace.path / "said.txt")

    assert re.search(facts("4 of 16 ", "step 1 ", "step: ", "environment.memory_gib ", "0.5 GiB"), said)
    assert sorted(numbers(workspace.path / "runs" / "sums")) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_a_reward_that_prints_without_end_fills_no_disk(workspace: Workspace, launcher: str) -> None:
    (workspace.path / "faults.py").write_text(REWARD.format(first="", seconds=1))
    recipe = rl_recipe(workspace, reward=[{"function": "faults.py:prints"}], steps=3, placement={"launcher": launcher})
    output = workspace.path / "said.txt"

    said = said_by("train", recipe, output=output)

    assert said.count(" 16 MiB") >= 1
    assert output.stat().st_size < 20 * 2**20
    assert sorted(numbers(workspace.path / "runs" / "sums")) == [1, 2, 3]
