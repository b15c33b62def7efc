# SPDX-License-Identifier: Apache-2.0
"""One, two and four ranks over gloo: the same gradient, the same losses, and checkpoints that fit any of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.engines import full_gradient, make_engine, random_documents, relative_l2
from helpers.ranks import OPTIMIZER, GroupResult, GroupTask, RankCall, group_rank, two_steps, whole_state
from helpers.tiny import save_tiny_model
from podium import api
from podium.engine.checkpoint import CheckpointWriter, newest_usable
from podium.engine.checkpoint_files import Extras
from podium.engine.resuming import checkpoint_shards, restore_optimizer
from podium.engine.train_step import TrainEngine
from podium.spmd.launch import launch

# The last one is trained and saved; its layers have rows that do not divide by 4 ranks.
MODELS = ("qwen3_moe", "gemma3", "qwen3")
SAME = 1e-5


def make_folder(folder: Path) -> None:
    for name in MODELS:
        save_tiny_model(name, folder / name, intermediate_size=50)


def on_two_ranks(folder: Path) -> RankCall:
    """Trains two steps and saves."""
    return group_call(folder, load=None, save="by-two")


def group_call(folder: Path, *, load: str | None, save: str) -> RankCall:
    (folder / save).mkdir()
    loaded_from = None if load is None else folder / load
    models = tuple(folder / name for name in MODELS)
    return group_rank, (GroupTask(models=models, load=loaded_from, save=folder / save),)


@pytest.fixture(scope="module")
def two(two_ranks: GroupResult) -> GroupResult:
    return two_ranks


@pytest.fixture(scope="module")
def one(folder: Path, two: GroupResult) -> dict[str, Tensor]:
    """One rank loads what two saved, and saves it again."""
    engine = loaded(folder, "by-two")
    (folder / "by-one").mkdir()
    writer = CheckpointWriter(folder / "by-one", engine.mesh, keep=1, keep_best=False, background=False, timeout_s=60)
    writer.save(2, checkpoint_shards(engine), Extras(values={"updates": 2}, arrays={}), heldout_loss=None)
    return whole_state(engine)


@pytest.fixture(scope="module")
def four(folder: Path, one: dict[str, Tensor]) -> GroupResult:
    """Four ranks load what one saved, and save it again."""
    function, arguments = group_call(folder, load="by-one", save="by-four")
    return launch(function, arguments, ranks=4, restarts=0, stop_file=folder / "stop")


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.slow)])
def group(request: pytest.FixtureRequest) -> GroupResult:
    result: GroupResult = request.getfixturevalue(request.param)
    return result


def loaded(folder: Path, saved: str) -> TrainEngine:
    reader = newest_usable(folder / saved)
    engine = make_engine(folder / MODELS[-1], optimizer=OPTIMIZER, checkpoint=reader)
    restore_optimizer(engine, reader)
    return engine


@pytest.mark.parametrize("index", range(len(MODELS)), ids=MODELS)
def test_several_ranks_have_the_gradient_of_one(folder: Path, group: GroupResult, index: int) -> None:
    wanted = full_gradient(make_engine(folder / MODELS[index]), random_documents())
    assert relative_l2(group.gradients[index], wanted) < SAME


@pytest.mark.parametrize("index", range(len(MODELS)), ids=MODELS)
def test_ranks_without_any_document_change_nothing(folder: Path, group: GroupResult, index: int) -> None:
    wanted = full_gradient(make_engine(folder / MODELS[index]), random_documents())
    assert relative_l2(group.lopsided[index], wanted) < SAME


def test_the_sharded_forward_agrees_with_transformers(group: GroupResult) -> None:
    assert max(group.largest_gaps) < 1e-4


def test_training_on_two_ranks_has_the_losses_of_one(folder: Path, two: GroupResult) -> None:
    alone = two_steps(make_engine(folder / MODELS[-1], optimizer=OPTIMIZER))
    assert two.losses == pytest.approx(alone, rel=1e-6)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_two_ranks_to_one_keep_weights_and_moments_bit_for_bit(two: GroupResult, one: dict[str, Tensor]) -> None:
    assert any(name.startswith("second_moment/") and tensor.any() for name, tensor in two.saved.items())
    assert same(one, two.saved)


@pytest.mark.slow
def test_one_rank_to_four_keeps_weights_and_moments_bit_for_bit(
    folder: Path, two: GroupResult, four: GroupResult
) -> None:
    assert same(four.loaded, two.saved)
    assert same(whole_state(loaded(folder, "by-four")), two.saved)
    assert len(list((folder / "by-four" / "step-00000002").glob("rank-*.safetensors"))) == 4


@pytest.mark.slow  # the fast group has the same comparison in test_the_sharded_forward_agrees_with_transformers
@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3"])
def test_verify_compares_a_sharded_model_with_what_transformers_loads(folder: Path, name: str) -> None:
    found = api.verify(folder / name, devices=2)
    assert found.agrees, str(found)
    assert found.largest < 1e-4
