# SPDX-License-Identifier: Apache-2.0
"""Two ranks: parameters that are kept in float32, frozen ones, and ones that no token reaches, against one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from helpers.engines import LENGTHS, full_gradient, make_engine, num_trained, random_documents, relative_l2
from helpers.ranks import OPTIMIZER, all_on_rank_0, assembled, dealt, mesh_of, two_steps, whole_gradient, whole_state
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.engine import sharding
from podium.engine.checkpoint import CheckpointWriter, newest_usable
from podium.engine.checkpoint_files import Extras
from podium.engine.mesh import Mesh
from podium.engine.resuming import checkpoint_shards, restore_optimizer
from podium.engine.sharding import PackedModel
from podium.engine.train_step import TrainEngine
from podium.errors import UnsupportedModelError
from podium.models.causal_lm import load_config
from podium.recipe import ModelSection
from podium.spmd.launch import RankPlace, launch
from podium.weights.published import PublishedWeights
from podium.weights.receiving import verify_in_place
from podium.weights.whole_copy import WholeCopy

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
BIAS = "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"
ROUTER = "model.layers.1.mlp.gate.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """What two ranks saw together."""

    dtypes: dict[str, str]  # published, in bfloat16
    is_sharded: dict[str, bool]
    low_gradient: Tensor  # of the router, in bfloat16
    low_losses: tuple[float, ...]
    scorer: dict[str, torch.dtype]
    replicated: Tensor  # whole gradient in float32, where routers and norms are not sharded
    lopsided: Tensor
    replicated_losses: tuple[float, ...]
    grad_norm: float
    saved: dict[str, Tensor]
    vision_moved: bool
    text_moved: bool
    missed: dict[str, int]
    disagreement: str


def rank(place: RankPlace, folder: Path) -> Seen:
    with mesh_of(place) as mesh:
        ernie = folder / "ernie4_5_moe"
        low = make_engine(ernie, mesh, optimizer=OPTIMIZER, dtype="bfloat16")
        weights = PublishedWeights(low.language_model, low.optimizer.trained, mesh, torch.bfloat16)
        copy = WholeCopy(
            weights, ModelSection(path=str(ernie)), load_config(ernie, trust_remote_code=False), device=CPU,
            dtype=torch.bfloat16,
        )  # fmt: skip
        copy.refill()
        verify_in_place(copy.tensors, weights.describe(1))
        scorer, _ = sharding.place(ModelSection(path=str(ernie), dtype="bfloat16"), ernie, mesh, seed=0, masters=False)
        held = replicating(low.mesh, ernie)
        replicated = whole_gradient(held, dealt(random_documents(LENGTHS), mesh))
        lopsided = whole_gradient(held, all_on_rank_0(random_documents(LENGTHS), mesh))
        norm = norm_of(held)
        losses = two_steps(held)
        writer = CheckpointWriter(folder / "saved", mesh, keep=1, keep_best=False, background=False, timeout_s=60)
        writer.save(2, checkpoint_shards(held), Extras(values={"updates": 3}, arrays={}))
        mesh.barrier()
        vision = make_engine(folder / "gemma3_multimodal", mesh, optimizer=OPTIMIZER)
        before = whole_state(vision)
        two_steps(vision)
        moved = {name for name, tensor in whole_state(vision).items() if not torch.equal(tensor, before[name])}
        return Seen(
            dtypes={spec.name: spec.dtype for spec in weights.manifest},
            is_sharded={name: isinstance(each, DTensor) for name, each in low.model.hf.named_parameters()},
            low_gradient=router_gradient(low), low_losses=short_steps(low),
            scorer={name: each.dtype for name, each in scorer.hf.named_parameters()},
            replicated=replicated, lopsided=lopsided, replicated_losses=losses, grad_norm=norm, saved=whole_state(held),
            vision_moved=any("vision_tower" in name for name in moved),
            text_moved=any("language_model" in name and name.startswith("weight/") for name in moved),
            missed=vision.optimizer.missed_updates(), disagreement=disagreeing(vision),
        )  # fmt: skip


def replicating(mesh: Mesh, folder: Path) -> TrainEngine:
    """In float32 nothing is kept whole; here routers and norms are, as if the model computed in another dtype."""
    shard = sharding._shard

    def keeping(
        model: PackedModel, at: Mesh, dtype: torch.dtype, kept: set[nn.Parameter], experts: list[nn.Module]
    ) -> None:
        assert not kept
        named = model.hf.named_parameters()
        shard(model, at, dtype, {each for name, each in named if "norm" in name or "gate.weight" in name}, experts)

    sharding._shard = keeping
    try:
        return make_engine(folder, mesh, optimizer=OPTIMIZER)
    finally:
        sharding._shard = shard


def norm_of(engine: TrainEngine) -> float:
    documents = random_documents(LENGTHS)
    batches = dealt(documents, engine.mesh)
    return (
        engine.train_step(batches, token_cross_entropy, normalizer=num_trained(documents), lr=0.0).resolve().grad_norm
    )


def router_gradient(engine: TrainEngine) -> Tensor:
    documents = random_documents((3, 5))
    batches = dealt(documents, engine.mesh)
    _, gradients = engine.gradients(batches, token_cross_entropy, normalizer=float(num_trained(documents)))
    router = {each.name: gradients[id(each)].float() for each in engine.optimizer.trained if each.name == ROUTER}
    return assembled(engine, router)[ROUTER]


def short_steps(engine: TrainEngine) -> tuple[float, ...]:
    documents = random_documents((3, 5))
    reports = [
        engine.train_step(
            dealt(documents, engine.mesh), token_cross_entropy, normalizer=num_trained(documents), lr=1e-2
        )
        for _ in range(2)
    ]
    return tuple(report.resolve().loss for report in reports)


def disagreeing(engine: TrainEngine) -> str:
    """Rank 1 claims that a parameter got no gradient."""
    total, gradients = engine.gradients(
        dealt(random_documents(LENGTHS), engine.mesh), token_cross_entropy, normalizer=1.0
    )
    if engine.mesh.rank == 1:
        gradients.popitem()
    report = engine._apply(total, gradients, normalizer=1.0, lr=0.0, stop_requested=False, tally=None, routed=None)
    try:
        report.resolve()
    except UnsupportedModelError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensors")
    for name in ("ernie4_5_moe", "gemma3_multimodal"):
        save_tiny_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> Seen:
    return launch(rank, (folder,), ranks=2, restarts=0, stop_file=folder / "stop")


def test_what_transformers_keeps_in_float32_is_neither_cast_nor_sharded(seen: Seen) -> None:
    kept = {name for name, dtype in seen.dtypes.items() if dtype == "float32"}
    assert kept == {BIAS, ROUTER} == {name for name, sharded in seen.is_sharded.items() if not sharded}
    assert {dtype for name, dtype in seen.dtypes.items() if name not in kept} == {"bfloat16"}
    assert {name for name, dtype in seen.scorer.items() if dtype == torch.float32} == kept


def test_its_gradient_and_training_are_those_of_one_rank_in_bfloat16(folder: Path, seen: Seen) -> None:
    alone = make_engine(folder / "ernie4_5_moe", optimizer=OPTIMIZER, dtype="bfloat16")
    assert relative_l2(seen.low_gradient, router_gradient(alone)) < 0.1
    assert seen.low_losses == pytest.approx(short_steps(alone), rel=0.02)


def test_parameters_that_all_ranks_hold_whole_have_the_gradient_and_norm_of_one(folder: Path, seen: Seen) -> None:
    alone = make_engine(folder / "ernie4_5_moe", optimizer=OPTIMIZER)
    wanted = full_gradient(alone, random_documents())
    assert relative_l2(seen.replicated, wanted) < 1e-5
    assert relative_l2(seen.lopsided, wanted) < 1e-5
    assert seen.grad_norm == pytest.approx(norm_of(alone), rel=1e-5)
    assert seen.replicated_losses == pytest.approx(two_steps(alone), rel=1e-5)


def test_a_checkpoint_of_two_ranks_has_the_frozen_bias_and_one_rank_continues(folder: Path, seen: Seen) -> None:
    reader = newest_usable(folder / "saved")
    assert f"weight/{BIAS}" in reader.shapes()
    engine = make_engine(folder / "ernie4_5_moe", optimizer=OPTIMIZER, checkpoint=reader)
    restore_optimizer(engine, reader)
    found = whole_state(engine)
    assert found.keys() == seen.saved.keys()
    assert all(torch.equal(found[name], seen.saved[name]) for name in found)
    base = make_engine(folder / "ernie4_5_moe")
    assert torch.equal(engine.frozen[0].master, base.frozen[0].master)


def test_a_tower_that_no_token_reaches_stays_as_it_is(seen: Seen) -> None:
    assert not seen.vision_moved
    assert seen.text_moved
    assert set(seen.missed.values()) == {2}
    assert all("vision_tower" in name or "multi_modal_projector" in name for name in seen.missed)


def test_ranks_that_disagree_on_who_got_a_gradient_are_found_out(seen: Seen) -> None:
    assert "gradient" in seen.disagreement
