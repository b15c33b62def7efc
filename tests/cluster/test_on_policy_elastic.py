# SPDX-License-Identifier: Apache-2.0
"""GRPO with layout elastic on real Ray: the learner's devices generate while it waits, and what runs there moves."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from helpers.on_policy import numbers, rl_recipe
from helpers.workspace import Workspace
from podium import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = (1, 2, 3, 4, 5)


def elastic(devices: int, rollout_devices: int) -> dict[str, object]:
    return {"launcher": "ray", "layout": "elastic", "devices": devices, "rollout_devices": rollout_devices}


def ages(run: Path) -> list[tuple[int, int]]:
    """Prompt index, and versions between its oldest token and its update, of every trained group."""
    ledger = sqlite3.connect(run / "episodes.sqlite")
    rows = ledger.execute("SELECT prompt_index, trained_version - oldest_version FROM groups ORDER BY 1").fetchall()
    ledger.close()
    return rows


def test_at_staleness_0_it_is_the_synchronous_program(workspace: Workspace, local_ray: None) -> None:
    for name, placement in (("inline", {"launcher": "inline"}), ("elastic", elastic(2, 1))):
        # Long answers: devices that are lent for shorter ones come too late to generate anything.
        api.train(workspace.path / rl_recipe(workspace, name, placement=placement, rollout={"max_new_tokens": 96}))
        api.export(workspace.path / "runs" / name, workspace.path / f"{name}-model")

    inline, lent = (numbers(workspace.path / "runs" / name) for name in ("inline", "elastic"))
    assert lent.keys() == inline.keys()
    assert any(lent[step]["lending/tokens"] > 0 for step in lent if step > 0)  # a slow switch is not worth it
    assert max(lent[step]["staleness/max"] for step in lent if step > 0) == 0
    expected, found = (
        load_file(workspace.path / f"{name}-model" / "model.safetensors") for name in ("inline", "elastic")
    )
    assert expected.keys() == found.keys()
    assert all((expected[key] == found[key]).all() for key in expected)


# Two learners each; generators of two devices.
IN_PAIRS: Mapping[str, Mapping[str, Any]] = {
    "elastic": {**elastic(4, 2), "generator": {"tensor": 2}},
    "colocated": {"launcher": "ray", "devices": 2, "generator": {"tensor": 2}},
    "split": {**elastic(4, 2), "layout": "split", "generator": {"tensor": 2}},
}


def test_a_group_of_devices_that_is_lent_gives_the_weights_of_the_other_layouts(
    workspace: Workspace, local_ray: None
) -> None:
    for name, placement in IN_PAIRS.items():
        recipe = rl_recipe(workspace, name, steps=2, placement=placement, rollout={"max_new_tokens": 32})
        api.train(workspace.path / recipe)
        api.export(workspace.path / "runs" / name, workspace.path / f"{name}-model")

    values = {name: numbers(workspace.path / "runs" / name) for name in IN_PAIRS}
    lent = [line["lending/tokens"] for step, line in values["elastic"].items() if step > 0]
    assert any(tokens > 0 for tokens in lent)  # the first time always, because nobody knows yet what a switch takes
    models = {name: load_file(workspace.path / f"{name}-model" / "model.safetensors") for name in IN_PAIRS}
    for name in ("split", "elastic"):
        assert all(values[name][step]["loss"] == line["loss"] for step, line in values["colocated"].items() if step)
        assert models[name].keys() == models["colocated"].keys()
        assert all((tensor == models["colocated"][key]).all() for key, tensor in models[name].items())


@pytest.mark.parametrize(("devices", "rollout_devices"), [(2, 1), (4, 2)])
def test_devices_are_lent_within_the_bound_of_staleness(
    workspace: Workspace, local_ray: None, devices: int, rollout_devices: int
) -> None:
    rollout = {"staleness": 1, "max_new_tokens": 96}
    recipe = rl_recipe(workspace, "stale", steps=5, rollout=rollout, placement=elastic(devices, rollout_devices))
    api.train(workspace.path / recipe)

    run = workspace.path / "runs" / "stale"
    values = numbers(run)
    assert [step for step in values if step > 0] == list(STEPS)
    assert max(values[step]["staleness/max"] for step in STEPS) == 1
    assert sum(values[step]["lending/tokens"] for step in STEPS) > 0
    rows = ages(run)
    assert [index for index, _ in rows] == list(range(len(rows)))
    assert all(0 <= age <= 1 for _, age in rows)


GAME = """
import asyncio

from podium.environments.protocol import Observation, Outcome


class Game:
    async def reset(self, task):
        return Observation(messages=task.messages)

    async def step(self, turn):
        await asyncio.sleep(0.05)
        return Outcome(messages="go on", reward=float(len(set(turn.text))), done=turn.number == 2)
"""


@pytest.mark.parametrize("staleness", [0, 1])
def test_engines_on_lent_devices_answer_episode_runners(workspace: Workspace, local_ray: None, staleness: int) -> None:
    (workspace.path / "game.py").write_text(GAME)
    environment = {"environment": "game.py:Game", "max_turns": 3, "concurrency": 8, "runners": 2}
    settings = {"environment": environment, "steps": 4, "rollout": {"max_new_tokens": 24, "staleness": staleness}}
    for name, layout in (("split", "split"), ("elastic", "elastic")):
        placement = {**elastic(2, 1), "layout": layout}
        api.train(workspace.path / rl_recipe(workspace, name, placement=placement, **settings))

    run = workspace.path / "runs" / "elastic"
    values = numbers(run)
    steps = [step for step in values if step > 0]
    assert steps == [1, 2, 3, 4]
    assert sum(values[step]["lending/tokens"] for step in steps) > 0
    assert max(values[step]["staleness/max"] for step in steps) <= staleness
    assert all(0 <= age <= staleness for _, age in ages(run))
    if staleness == 0:
        split = numbers(workspace.path / "runs" / "split")
        for step in steps:
            for name in ("reward/mean", "response/mean", "loss", "grad_norm", "trained_tokens"):
                assert values[step][name] == split[step][name], (step, name)
