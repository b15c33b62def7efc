# SPDX-License-Identifier: Apache-2.0
"""Adapters over two and three ranks of gloo: the gradient, the copies and the checkpoints of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.adapters import save_peft_adapter
from helpers.engines import LENGTHS, full_gradient, make_engine, num_trained, random_documents, relative_l2
from helpers.ranks import (
    EMPTY,
    OPTIMIZER,
    RankCall,
    all_on_rank_0,
    dealt,
    mesh_of,
    two_steps,
    whole_gradient,
    whole_state,
)
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import pack
from podium.engine.checkpoint import CheckpointWriter, newest_usable
from podium.engine.resuming import checkpoint_shards, restore_optimizer
from podium.engine.train_step import TrainEngine
from podium.models.causal_lm import load_config
from podium.models.packing import to_device
from podium.models.verify import self_check
from podium.recipe import ModelSection
from podium.spmd.launch import RankPlace, launch
from podium.weights.published import PublishedWeights
from podium.weights.receiving import verify_in_place
from podium.weights.whole_copy import WholeCopy

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """What all ranks saw together."""

    checkpoints: Path
    gradient: Tensor
    lopsided: Tensor
    base_scores: Tensor  # with the adapter off
    gap: float  # against plain transformers
    losses: tuple[float, ...]
    copy_scores: Tensor  # of the whole copy, after training
    copied: tuple[tuple[int, ...], ...]  # tensors that the first and the second filling took
    saved: dict[str, Tensor]
    dtypes: tuple[set[torch.dtype], set[torch.dtype]]  # base and adapter, in bfloat16
    low_loss: float  # of one step in bfloat16


def rank(place: RankPlace, base: Path, adapter: Path, out: Path) -> Seen:
    lora = {"adapter": str(adapter)}
    with mesh_of(place) as mesh:
        engine = make_engine(base, mesh, optimizer=OPTIMIZER, lora=lora)
        model = engine.language_model
        gap = self_check(model, mesh.device, torch.float32).largest
        with model.without_adapter():
            base_scores = scores(model.eval())
        # After a forward alone, which leaves some of the base gathered.
        weights = PublishedWeights(model, engine.optimizer.trained, mesh, torch.float32, bucket_bytes=5000)
        gradient = whole_gradient(engine, dealt(random_documents(LENGTHS), mesh))
        lopsided = whole_gradient(engine, all_on_rank_0(random_documents(LENGTHS), mesh))
        config = load_config(base, trust_remote_code=False)
        copy = WholeCopy(weights, ModelSection(path=str(base), lora=lora), config, device=CPU, dtype=torch.float32)
        copy.refill()
        losses = two_steps(engine)
        copied = (len(weights.frozen.manifest), len(weights.manifest))
        poisoned = dict(copy.model.hf.named_parameters())["model.layers.0.self_attn.q_proj.base_layer.weight"]
        kept = poisoned.detach().clone()
        poisoned.data.add_(1.0)  # a second filling does not touch the base
        copy.refill()
        untouched = torch.equal(poisoned, kept + 1.0)
        poisoned.data.copy_(kept)
        verify_in_place(copy.tensors, weights.describe(2))
        writer = CheckpointWriter(out, mesh, keep=1, keep_best=False, background=False, timeout_s=60)
        writer.save(2, checkpoint_shards(engine), EMPTY, heldout_loss=None)
        low = make_engine(base, mesh, optimizer=OPTIMIZER, lora=lora, dtype="bfloat16")
        named = list(low.model.hf.named_parameters())
        dtypes = tuple({each.dtype for name, each in named if ("lora" in name) == want} for want in (False, True))
        return Seen(
            checkpoints=out, gradient=gradient, lopsided=lopsided, base_scores=base_scores, gap=gap, losses=losses,
            copy_scores=scores(copy.model), copied=(copied, (int(untouched),)), saved=whole_state(engine),
            dtypes=(dtypes[0], dtypes[1]), low_loss=short_step(low),
        )  # fmt: skip


def short_step(engine: TrainEngine) -> float:
    """A few tokens: bfloat16 is slow on a CPU."""
    documents = random_documents((3, 5))
    mine = [pack(documents[engine.mesh.rank :: engine.mesh.world])]
    report = engine.train_step(mine, token_cross_entropy, normalizer=num_trained(documents), lr=1e-2)
    return report.resolve().loss


@torch.no_grad()
def scores(model: torch.nn.Module) -> Tensor:
    found: Tensor = model(to_device(pack(random_documents(LENGTHS)), CPU), None, "scores")
    return found


def make_folder(folder: Path) -> None:
    save_tiny_model("qwen3", folder / "base", intermediate_size=50)
    save_peft_adapter(folder / "base", folder / "adapter")


def on_two_ranks(folder: Path) -> RankCall:
    return adapter_call(folder, folder / "saved-2")


def adapter_call(folder: Path, out: Path) -> RankCall:
    out.mkdir()
    return rank, (folder / "base", folder / "adapter", out)


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def by_ranks(request: pytest.FixtureRequest, folder: Path) -> Seen:
    if request.param == 2:
        seen: Seen = request.getfixturevalue("two_ranks")
        return seen
    function, arguments = adapter_call(folder, folder / "saved-3")
    return launch(function, arguments, ranks=3, restarts=0, stop_file=folder / "stop")


def alone(folder: Path) -> TrainEngine:
    return make_engine(folder / "base", optimizer=OPTIMIZER, lora={"adapter": str(folder / "adapter")})


def test_ranks_have_the_gradient_of_one_also_where_only_one_has_documents(folder: Path, by_ranks: Seen) -> None:
    engine = alone(folder)
    wanted = full_gradient(engine, random_documents(LENGTHS))
    assert len(wanted) == sum(each.master.numel() for each in engine.optimizer.trained)
    assert relative_l2(by_ranks.gradient, wanted) < 1e-5
    assert relative_l2(by_ranks.lopsided, wanted) < 1e-5


def test_the_sharded_model_agrees_with_transformers_and_without_its_adapter_with_the_base(
    folder: Path, by_ranks: Seen
) -> None:
    assert by_ranks.gap < 1e-4
    plain = make_engine(folder / "base").model.eval()
    assert torch.allclose(by_ranks.base_scores, scores(plain), atol=1e-5)


def test_training_has_the_losses_of_one_and_the_whole_copy_follows_by_the_adapter_alone(
    folder: Path, by_ranks: Seen
) -> None:
    engine = alone(folder)
    assert by_ranks.losses == pytest.approx(two_steps(engine), rel=1e-6)
    assert torch.allclose(by_ranks.copy_scores, scores(engine.model.eval()), atol=1e-4)
    # Three targets in two layers, A and B of each; the rest of a tied Qwen3 of two layers once only.
    assert by_ranks.copied == ((1 + 2 * 11 + 1, 12), (1,))


def test_a_checkpoint_holds_the_adapter_alone_and_one_rank_continues_from_it(folder: Path, by_ranks: Seen) -> None:
    reader = newest_usable(by_ranks.checkpoints)
    assert len(reader.shapes()) == 3 * 12
    assert all(".lora_" in name for name in reader.shapes())
    lora = {"adapter": str(folder / "adapter")}
    engine = make_engine(folder / "base", optimizer=OPTIMIZER, checkpoint=reader, lora=lora)
    restore_optimizer(engine, reader)
    found = whole_state(engine)
    assert found.keys() == by_ranks.saved.keys()
    assert all(torch.equal(found[name], by_ranks.saved[name]) for name in found)
    assert torch.allclose(scores(engine.model.eval()), by_ranks.copy_scores, atol=1e-4)


def test_a_sharded_base_is_held_in_the_compute_dtype_beside_a_float32_adapter(folder: Path, by_ranks: Seen) -> None:
    assert by_ranks.dtypes == ({torch.bfloat16}, {torch.float32})
    assert by_ranks.low_loss == pytest.approx(short_step(alone(folder)), rel=0.02)
