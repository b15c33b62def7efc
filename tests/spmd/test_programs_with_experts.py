# SPDX-License-Identifier: Apache-2.0
"""One step of preferences, reward models and distillation of a mixture whose experts are on two ranks, or that a tensor
axis divides: that of one rank."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from helpers.dense_steps import Case, DenseTask, Stepped, dense_on, dense_on_meshes, random_rows
from helpers.engines import one_rank, relative_l2
from helpers.ranks import RankCall
from helpers.tiny import save_tiny_model, tiny_config
from podium.recipe.dense import DistillSection, KtoPreference, RewardModelSection, SigmoidPreference
from podium.recipe.policy_mesh import MeshSizes

pytestmark = pytest.mark.slow
SHAPES = {"experts": MeshSizes(shard=2, experts=2), "tensor": MeshSizes(tensor=2)}
CASES = {
    "sigmoid": Case(section=SigmoidPreference(beta=0.3), source="live"),
    "kto": Case(section=KtoPreference(beta=0.2), source="live"),
    "ranked": Case(section=RewardModelSection(center=0.05)),
    "jsd": Case(section=DistillSection(divergence="jsd", jsd_beta=0.3), teachers=(3.0, 1.0)),
    "one pair": Case(section=SigmoidPreference(beta=0.3), source="live", rows=(4,)),
}


def make_folder(folder: Path) -> None:
    save_tiny_model("qwen3_moe", folder / "policy")
    save_tiny_model("mixtral", folder / "mixture", seed=1)
    save_tiny_model("qwen3", folder / "dense", seed=2)
    torch.manual_seed(3)
    scalar = transformers.AutoModelForSequenceClassification.from_config(tiny_config("qwen3_moe", num_labels=1))
    with torch.no_grad():
        for parameter in scalar.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    scalar.save_pretrained(folder / "scalar")


@cache
def task(folder: Path) -> DenseTask:
    return DenseTask(
        policy=folder / "policy", scalar=folder / "scalar", others=(folder / "mixture", folder / "dense"),
        adapter=folder / "none", stores=folder / "none", pairs=random_rows("pairs"), labels=random_rows("labels"),
        scores=random_rows("scores"), cases=CASES,
    )  # fmt: skip


def on_two_ranks(folder: Path) -> RankCall:
    return dense_on_meshes, (task(folder), SHAPES)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Stepped]:
    return dense_on(one_rank(), task(folder))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_a_step_with_divided_experts_is_that_of_one_rank(
    alone: dict[str, Stepped], two_ranks: dict[str, dict[str, Stepped]], name: str, shape: str
) -> None:
    found = two_ranks[shape][name]
    wanted = alone[name]
    assert relative_l2(found.flat, wanted.flat) < 1e-5
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert found.averages == pytest.approx(wanted.averages, rel=1e-4, abs=1e-5)
    assert found.measured == pytest.approx(wanted.measured, rel=1e-4, abs=1e-5)
