# SPDX-License-Identifier: Apache-2.0
"""Runs of a mixture of experts as a user starts them: router replay, its record, statistics, the auxiliary loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.on_policy import numbers, rl_recipe
from helpers.tiny import save_tiny_folder
from helpers.workspace import Workspace
from podium.runs.step_files import NO_DIGEST, read_step

MODEL = {"path": "mixture"}
ROUTER = {"router/max_load", "router/dead_experts", "router/entropy", "router/aux_loss"}


@pytest.fixture
def workspace(workspace: Workspace) -> Workspace:
    save_tiny_folder(workspace.path / "mixture", "qwen3_moe")
    return workspace


def router_names(run: Path) -> set[str]:
    return {name for values in numbers(run).values() for name in values if name.startswith("router/")}


def test_replay_is_on_in_grpo_and_podium_replay_repeats_it(workspace: Workspace) -> None:
    recipe = rl_recipe(workspace, model=MODEL, rollout={"record": True}, checkpoint={"every": 3})
    outcome = workspace.podium("train", recipe)
    assert outcome.code == 0, outcome
    run = workspace.path / "runs" / "sums"
    assert router_names(run) == {*ROUTER, "router/mismatch"}
    for values in numbers(run).values():
        assert values["router/mismatch"] == 0.0  # one module samples and learns, in float32
        assert values["gap/max"] < 1e-4
    outcome = workspace.podium("replay", "runs/sums")
    assert outcome.code == 0, outcome
    assert "identical" in outcome.out


@pytest.mark.slow
def test_off_leaves_it_out_and_a_dense_model_refuses_on(workspace: Workspace) -> None:
    outcome = workspace.podium("train", rl_recipe(workspace, model=MODEL, steps=1, rollout={"router_replay": "off"}))
    assert outcome.code == 0, outcome
    assert router_names(workspace.path / "runs" / "sums") == ROUTER
    outcome = workspace.podium("train", rl_recipe(workspace, "dense", steps=1, rollout={"router_replay": "on"}))
    assert outcome.code != 0
    assert "rollout.router_replay" in outcome.err


def test_sft_with_the_auxiliary_loss(workspace: Workspace) -> None:
    values: dict[str, Any] = {"model": {**MODEL, "router_aux_loss_coef": 0.01}, "steps": 2}
    outcome = workspace.podium("train", str(workspace.recipe("sft", **values)))
    assert outcome.code == 0, outcome
    assert router_names(workspace.path / "runs" / "sft") == ROUTER
    dense = workspace.podium("train", str(workspace.recipe("dense", model={"router_aux_loss_coef": 0.01}, steps=2)))
    assert dense.code != 0
    assert "model.router_aux_loss_coef" in dense.err


DIALOGUE = """
from podium.environments.protocol import Observation, Outcome

class Dialogue:
    async def reset(self, task):
        return Observation()

    async def step(self, turn):
        digits = sum(letter.isdigit() for letter in turn.text)
        return Outcome(messages=f"{digits} digits more?", reward=digits / 10)
"""


@pytest.mark.slow
def test_episodes_of_several_turns_are_replayed_whole(workspace: Workspace) -> None:
    """Of every position that goes through the model, as many choices are compared as the routers make."""
    (workspace.path / "dialogue.py").write_text(DIALOGUE)
    turns = {"environment": "dialogue.py:Dialogue", "max_turns": 3}
    recipe = rl_recipe(workspace, model=MODEL, steps=2, reward=[], environment=turns, rollout={"record": True})
    outcome = workspace.podium("train", recipe)
    assert outcome.code == 0, outcome
    run = workspace.path / "runs" / "sums"
    values = numbers(run)[1]
    assert values["turns/mean"] > 1
    assert values["router/mismatch"] == 0.0
    step, _ = read_step(run / "steps", 1, NO_DIGEST)
    experts, offsets = step.arrays["sampled.experts_TLK"], step.arrays["sampled.offsets"]
    is_last_T = np.zeros(len(experts), np.bool_)
    is_last_T[offsets[1:] - 1] = True
    assert np.array_equal(experts[:, 0, 0] == np.iinfo(experts.dtype).max, is_last_T)
