# SPDX-License-Identifier: Apache-2.0
"""Two ranks that replicate a model, or divide its layers or its tokens: the gradients, losses and weights of one rank.
(The slow group has more meshes and architectures.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.engines import make_engine, one_rank, relative_l2
from helpers.meshes import LORA, MeshTask, OnMesh, mesh_rank, name_of, of_model
from helpers.ranks import OPTIMIZER, RankCall, whole_state
from helpers.tiny import save_tiny_model
from podium.engine.checkpoint import newest_usable
from podium.engine.resuming import restore_optimizer
from podium.recipe.policy_mesh import MeshSizes

SAME = 1e-5
SHAPES = (MeshSizes(replicate=2), MeshSizes(tensor=2), MeshSizes(context=2))


def make_folder(folder: Path) -> None:
    save_tiny_model("qwen3", folder / "qwen3")


def on_two_ranks(folder: Path) -> RankCall:
    models = (folder / "qwen3",)
    return mesh_rank, (MeshTask(shapes=SHAPES, models=models, adapted=models, saves=folder / "saved"),)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name_of(sizes) for sizes in SHAPES])
def test_two_ranks_have_the_gradients_losses_and_weights_of_one(
    folder: Path, two_ranks: dict[str, OnMesh], name: str
) -> None:
    found = two_ranks[name]
    pairs = (
        (found.models["qwen3"], of_model(folder / "qwen3", one_rank())),
        (found.adapted["qwen3"], of_model(folder / "qwen3", one_rank(), lora=LORA)),
    )
    for mine, wanted in pairs:
        assert relative_l2(mine.gradient, wanted.gradient) < SAME
        assert relative_l2(mine.lopsided, wanted.gradient) < SAME
        assert mine.grad_norm == pytest.approx(wanted.grad_norm, rel=SAME)
        assert mine.losses == pytest.approx(wanted.losses, rel=SAME)
        assert mine.version == wanted.version
        assert mine.gap < 1e-4


def test_their_checkpoints_are_read_by_each_other_and_by_one_rank_bit_for_bit(
    folder: Path, two_ranks: dict[str, OnMesh]
) -> None:
    for at, sizes in enumerate(SHAPES):
        for before in map(name_of, SHAPES[:at]):
            for name, tensor in two_ranks[name_of(sizes)].loaded[before].items():
                assert torch.equal(tensor, two_ranks[before].saved[name]), name
    for sizes in SHAPES:
        reader = newest_usable(folder / "saved" / name_of(sizes))
        engine = make_engine(folder / "qwen3", optimizer=OPTIMIZER, checkpoint=reader)
        restore_optimizer(engine, reader)
        for name, tensor in whole_state(engine).items():
            assert torch.equal(tensor, two_ranks[name_of(sizes)].saved[name]), name
