# SPDX-License-Identifier: Apache-2.0
"""Policy updates and critics on one, two and four ranks over gloo: the same gradients, advantages and weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from helpers.engines import one_rank, relative_l2
from helpers.on_policy import CASES, UpdateResult, UpdateTask, make_episodes, update_on, update_rank
from helpers.ranks import RankCall
from helpers.tiny import save_tiny_model, tiny_config
from podium.spmd.launch import launch

SAME = 1e-5
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]


def make_folder(folder: Path) -> None:
    save_tiny_model("qwen3", folder / "policy", intermediate_size=50)  # rows that do not divide by 4 ranks
    torch.manual_seed(3)
    critic = transformers.AutoModelForSequenceClassification.from_config(tiny_config("qwen3", num_labels=1))
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    critic.save_pretrained(folder / "critic")


@cache
def update_task(folder: Path) -> UpdateTask:
    episodes = make_episodes(folder / "policy", temperature=0.8)
    return UpdateTask(policy=folder / "policy", critic=folder / "critic", episodes=episodes, cases=CASES)


def on_two_ranks(folder: Path) -> RankCall:
    return update_rank, (update_task(folder),)


@pytest.fixture(scope="module")
def task(folder: Path) -> UpdateTask:
    return update_task(folder)


@pytest.fixture(scope="module")
def alone(task: UpdateTask) -> UpdateResult:
    """One rank, in this process."""
    return update_on(one_rank(), task)


@pytest.fixture(scope="module", params=WORLDS)
def several(request: pytest.FixtureRequest, folder: Path, task: UpdateTask) -> UpdateResult:
    if request.param == 2:
        result: UpdateResult = request.getfixturevalue("two_ranks")
        return result
    return launch(update_rank, (task,), ranks=request.param, restarts=0, stop_file=folder / "stop")


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_have_the_gradient_of_one(alone: UpdateResult, several: UpdateResult, name: str) -> None:
    found, wanted = several.by_case[name], alone.by_case[name]
    assert relative_l2(found.flat, wanted.flat) < SAME
    assert found.note.losses == pytest.approx(wanted.note.losses, rel=1e-5, abs=1e-7)
    assert found.note.grad_norms == pytest.approx(wanted.note.grad_norms, rel=1e-5)


def test_ranks_that_have_nothing_in_some_micro_steps_change_nothing(alone: UpdateResult, several: UpdateResult) -> None:
    assert relative_l2(several.lopsided.flat, alone.by_case["clipped"].flat) < SAME
    assert relative_l2(alone.lopsided.flat, alone.by_case["clipped"].flat) < SAME


def test_four_optimizer_steps_leave_the_weights_of_one_rank(alone: UpdateResult, several: UpdateResult) -> None:
    assert relative_l2(several.four_steps, alone.four_steps) < SAME


def test_returns_are_whitened_over_all_ranks_and_not_over_each(alone: UpdateResult, several: UpdateResult) -> None:
    """A rank's own moments are those of its share of values that have mean 0 and variance 1 all together."""
    found, wanted = several.by_case["reinforce++"].note.advantages, alone.by_case["reinforce++"].note.advantages
    assert wanted.mean == pytest.approx(0.0, abs=1e-6)
    assert wanted.variance == pytest.approx(1.0, rel=1e-5)
    assert 0 < found.count < wanted.count
    assert abs(found.mean) > 1e-3


def test_a_critic_estimates_the_same_on_any_number_of_ranks(alone: UpdateResult, several: UpdateResult) -> None:
    found, wanted = several.estimated, alone.estimated
    assert found.columns.ids.same_as(wanted.columns.ids)
    for name in ("values_T", "advantages_T", "returns_T"):
        np.testing.assert_allclose(getattr(found.columns, name), getattr(wanted.columns, name), rtol=1e-5, atol=1e-6)
    assert found.moments == pytest.approx(wanted.moments, rel=1e-5)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
