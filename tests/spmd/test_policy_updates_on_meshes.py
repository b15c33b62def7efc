# SPDX-License-Identifier: Apache-2.0
"""Policy updates, scores and critics on meshes of all axes over gloo: those of one rank. (The fast group has a tensor
and a context axis of two ranks, and some of the losses.)"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.engines import one_rank, relative_l2
from helpers.meshes import LORA
from helpers.on_policy import CASES, UpdateResult, UpdateTask, make_episodes, update_on, update_on_meshes
from helpers.ranks import RankCall
from helpers.tiny import save_tiny_model, tiny_config
from podium.algorithms.statistics import PolicyStatistics
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import launch

SAME = 1e-5
TENSOR = MeshSizes(tensor=2)
CONTEXT = MeshSizes(context=2)
FAST = (TENSOR, CONTEXT)
OF_2 = (MeshSizes(replicate=2),)
OF_4 = (
    MeshSizes(shard=2, tensor=2), MeshSizes(replicate=2, tensor=2), MeshSizes(replicate=2, shard=2),
    MeshSizes(tensor=4), MeshSizes(shard=2, context=2), MeshSizes(context=2, tensor=2), MeshSizes(context=4),
)  # fmt: skip
FEW = (
    "clipped", "gspo", "kl", "mask, kl, entropy", "reinforce++, kl", "teachers", "imitation", "proximal",
)  # fmt: skip
SLOW = pytest.mark.slow
SHAPES = [*FAST, *(pytest.param(sizes, marks=SLOW) for sizes in (*OF_2, *OF_4))]
ADAPTED = ("clipped", "kl", "sequence mask", "imitation")


def make_folder(folder: Path) -> None:
    save_tiny_model("qwen3", folder / "policy", num_key_value_heads=4)
    torch.manual_seed(3)
    config = tiny_config("qwen3", num_labels=1, num_key_value_heads=4)
    critic = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    critic.save_pretrained(folder / "critic")


@cache
def tasks(folder: Path, names: tuple[str, ...]) -> dict[str, UpdateTask]:
    episodes = make_episodes(folder / "policy", temperature=0.8)

    def task(chosen: tuple[str, ...], **model: Any) -> UpdateTask:
        cases = {name: CASES[name] for name in chosen}
        return UpdateTask(
            policy=folder / "policy", critic=folder / "critic", episodes=episodes, cases=cases, model=model
        )

    return {"full": task(names), "adapter": task(tuple(name for name in ADAPTED if name in names), lora=LORA)}


def on_two_ranks(folder: Path) -> RankCall:
    return update_on_meshes, (FAST, tasks(folder, FEW))


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, UpdateResult]:
    """One rank, in this process."""
    return {name: update_on(one_rank(), task) for name, task in tasks(folder, tuple(CASES)).items()}


@pytest.fixture(scope="module")
def of_2(folder: Path) -> dict[str, dict[str, UpdateResult]]:
    return launched(folder, 2, (*FAST, *OF_2))


@pytest.fixture(scope="module")
def of_4(folder: Path) -> dict[str, dict[str, UpdateResult]]:
    return launched(folder, 4, OF_4)


def launched(folder: Path, ranks: int, shapes: tuple[MeshSizes, ...]) -> dict[str, dict[str, UpdateResult]]:
    arguments = shapes, tasks(folder, tuple(CASES))
    return launch(update_on_meshes, arguments, ranks=ranks, restarts=0, stop_file=folder / "stop")


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def several(request: pytest.FixtureRequest) -> dict[str, UpdateResult]:
    """What ranks of one shape computed."""
    if request.param in FAST:
        found: dict[str, dict[str, UpdateResult]] = request.getfixturevalue("two_ranks")
    else:
        found = request.getfixturevalue("of_2" if request.param.devices == 2 else "of_4")
    return found[str(request.param)]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["full", "adapter"])
def test_ranks_together_have_the_gradients_and_losses_of_one(
    alone: dict[str, UpdateResult], several: dict[str, UpdateResult], model: str
) -> None:
    assert several[model].by_case
    for name, found in several[model].by_case.items():
        wanted = alone[model].by_case[name]
        assert relative_l2(found.flat, wanted.flat) < SAME, name
        assert found.note.losses == pytest.approx(wanted.note.losses, rel=SAME, abs=1e-7), name
        assert found.note.grad_norms == pytest.approx(wanted.note.grad_norms, rel=SAME), name


@pytest.mark.slow
@pytest.mark.parametrize("sizes", FAST, ids=str)
def test_all_losses_have_the_gradients_of_one_rank_on_two_that_compute_together(
    alone: dict[str, UpdateResult], of_2: dict[str, dict[str, UpdateResult]], sizes: MeshSizes
) -> None:
    found = of_2[str(sizes)]["full"].by_case
    assert found.keys() == CASES.keys()
    for name, updated in found.items():
        assert relative_l2(updated.flat, alone["full"].by_case[name].flat) < SAME, name


@pytest.mark.parametrize("model", ["full", "adapter"])
def test_four_optimizer_steps_leave_the_weights_of_one_rank(
    alone: dict[str, UpdateResult], several: dict[str, UpdateResult], model: str
) -> None:
    assert relative_l2(several[model].four_steps, alone[model].four_steps) < SAME


@pytest.mark.parametrize("model", ["full", "adapter"])
def test_micro_batches_that_some_ranks_do_not_have_change_nothing(
    alone: dict[str, UpdateResult], several: dict[str, UpdateResult], model: str
) -> None:
    assert relative_l2(several[model].lopsided.flat, alone[model].by_case["clipped"].flat) < SAME


@pytest.mark.parametrize("model", ["full", "adapter"])
def test_scores_are_those_of_one_rank(
    alone: dict[str, UpdateResult], several: dict[str, UpdateResult], model: str
) -> None:
    assert np.abs(alone[model].scored_T).max() > 1
    np.testing.assert_allclose(several[model].scored_T, alone[model].scored_T, rtol=SAME, atol=1e-5)


def test_a_critic_estimates_and_learns_as_on_one_rank(
    alone: dict[str, UpdateResult], several: dict[str, UpdateResult]
) -> None:
    found, wanted = several["full"].estimated, alone["full"].estimated
    assert found.columns.ids.same_as(wanted.columns.ids)
    for name in ("values_T", "advantages_T", "returns_T"):
        np.testing.assert_allclose(getattr(found.columns, name), getattr(wanted.columns, name), rtol=SAME, atol=1e-6)
    assert found.moments == pytest.approx(wanted.moments, rel=SAME)
    assert found.loss == pytest.approx(wanted.loss, rel=SAME)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=SAME)


@pytest.mark.parametrize("sizes", FAST, ids=str)
@pytest.mark.parametrize("name", FEW)
def test_a_group_on_the_same_rows_notes_what_one_rank_does(
    alone: dict[str, UpdateResult], two_ranks: dict[str, dict[str, UpdateResult]], name: str, sizes: MeshSizes
) -> None:
    """All its ranks have all rows: nothing counts twice."""
    found, wanted = two_ranks[str(sizes)]["full"].by_case[name].note, alone["full"].by_case[name].note
    assert (found.num_tokens, found.num_sequences) == (wanted.num_tokens, wanted.num_sequences)
    for each in fields(PolicyStatistics):
        assert getattr(found.statistics, each.name) == pytest.approx(
            getattr(wanted.statistics, each.name), rel=1e-4, abs=1e-6
        ), each.name
    assert found.entropy == pytest.approx(wanted.entropy, rel=SAME)
    assert found.kl_reference == pytest.approx(wanted.kl_reference, rel=1e-4)
    assert (found.advantages.count, found.advantages.sum) == pytest.approx(
        (wanted.advantages.count, wanted.advantages.sum), rel=SAME, abs=1e-5
    )
    assert (found.gap.count, found.gap.sum_abs) == pytest.approx((wanted.gap.count, wanted.gap.sum_abs), rel=1e-4)
