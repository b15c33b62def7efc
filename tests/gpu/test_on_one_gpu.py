# SPDX-License-Identifier: Apache-2.0
"""One CUDA device: variable-length kernels, bfloat16 compute with float32 masters, compiled kernels, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from podium import api
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, PackedBatch, pack
from podium.engine import state_streams
from podium.engine.checkpoint import CheckpointReader, CheckpointWriter, newest_usable
from podium.engine.checkpoint_files import Extras
from podium.engine.mesh import Mesh, join
from podium.engine.optimizer import AdamW
from podium.engine.parameters import TrainedParameter
from podium.engine.resuming import checkpoint_shards, restore_optimizer
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.models.attention import packed_attention
from podium.models.head import HeadSpec, fused_token_loss
from podium.models.packing import Packing
from podium.models.tensor_shards import Box
from podium.models.verify import self_check
from podium.recipe import ModelSection, OptimizerSection, PlacementSection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

DEVICE = "cuda"
LENGTHS = (1, 33, 33, 130, 7, 257)
# H query heads · K key-value heads · E head width · T packed tokens
H, K, E = 8, 2, 64


def this_device() -> Mesh:
    return join(PlacementSection.model_validate({"device": DEVICE}), rank=0, world=1, local_rank=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config alone; the weights are drawn from the seed."""
    path = tmp_path_factory.mktemp("model")
    transformers.Qwen3Config(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
    ).save_pretrained(path)  # fmt: skip
    return path


def make_engine(
    folder: Path, *, checkpoint: CheckpointReader | None = None, offload_optimizer: bool = False, **model: Any
) -> TrainEngine:
    section, mesh = OptimizerSection(lr=1e-3, offload=offload_optimizer), this_device()
    values = {"path": str(folder), "init": "random", "compile": "off", **model}
    placed, trained = place(ModelSection.model_validate(values), folder, mesh, seed=0, checkpoint=checkpoint)
    return TrainEngine(placed, trained, AdamW(trained, section), mesh, section.clip_norm)


def step_batches(seed: int) -> tuple[list[PackedBatch], int]:
    """Two micro-batches of unequal size, and how many tokens they train."""
    draw = np.random.default_rng(seed)
    documents = []
    for length in LENGTHS:
        trained = np.ones(length + 1, np.bool_)
        trained[0] = False
        documents.append(Document(tokens=draw.integers(0, 1000, length + 1).astype(np.int32), trained=trained))
    return [pack(documents[:4]), pack(documents[4:])], sum(LENGTHS)


def train(engine: TrainEngine, seeds: Sequence[int]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a few steps."""
    reports = []
    for seed in seeds:
        batches, count = step_batches(seed)
        reports.append(engine.train_step(batches, token_cross_entropy, normalizer=count, lr=1e-3).resolve())
    assert not any(report.skipped for report in reports)
    return [report.loss for report in reports], [report.grad_norm for report in reports]


def relative_l2(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("window", [None, 20])
def test_variable_length_kernels_are_attention_document_by_document(window: int | None) -> None:
    boundaries = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32, device=DEVICE)
    packing = Packing(boundaries=boundaries, longest=max(LENGTHS), runs=())
    draw = torch.Generator(DEVICE).manual_seed(0)
    states = [torch.randn(1, heads, sum(LENGTHS), E, generator=draw, device=DEVICE).bfloat16() for heads in (H, K, K)]
    up = torch.randn(1, sum(LENGTHS), H, E, generator=draw, device=DEVICE).bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float32):  # float32 has no such kernel, so it goes one document at a time
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in states]
        out, _ = packed_attention(
            nn.Module(), leaves[0], leaves[1], leaves[2], None, packing=packing, scaling=E**-0.5, sliding_window=window
        )
        out.backward(up.to(dtype))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for found, wanted in zip(*results, strict=True):
        assert found is not None
        assert wanted is not None
        assert relative_l2(found, wanted) < 2e-2


def test_bfloat16_steps_have_the_losses_of_float32(folder: Path) -> None:
    """Compute in bfloat16, masters in float32, token counts padded to round shapes."""
    exact, half = make_engine(folder, dtype="float32"), make_engine(folder, dtype="bfloat16")
    assert all(each.has_own_master and each.master.dtype == torch.float32 for each in half.optimizer.trained)
    (exact_losses, exact_norms), (half_losses, half_norms) = train(exact, (1, 2, 3, 1)), train(half, (1, 2, 3, 1))
    assert half_losses == pytest.approx(exact_losses, abs=2e-2)
    assert half_norms == pytest.approx(exact_norms, rel=5e-2)
    assert exact_losses[3] < exact_losses[0]  # the same documents again
    for each in half.optimizer.trained:
        assert torch.equal(each.parameter, each.master.bfloat16()), each.name


def test_the_packed_forward_agrees_with_transformers(folder: Path) -> None:
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        assert self_check(make_engine(folder, dtype=name).model, this_device().device, dtype).agrees


def test_the_compiled_head_computes_what_the_eager_one_does() -> None:
    draw = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(300, 128, generator=draw, device=DEVICE).bfloat16()
    weight = (torch.randn(1024, 128, generator=draw, device=DEVICE) * 0.1).bfloat16()
    targets = torch.randint(0, 1000, (300,), generator=draw, device=DEVICE)
    weights = torch.rand(300, generator=draw, device=DEVICE)
    results = []
    for compiled in (False, True):
        spec = HeadSpec(vocab_size=1000, chunk_tokens=128, compiled=compiled)
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        value = fused_token_loss(leaves[0], leaves[1], targets, weights, token_cross_entropy, spec)
        value.backward()
        results.append((value.detach(), leaves[0].grad, leaves[1].grad))
    exact = [hidden.float().requires_grad_(), weight.float().requires_grad_()]
    logprobs = torch.log_softmax((exact[0] @ exact[1].T)[:, :1000], -1).gather(1, targets[:, None])[:, 0]
    wanted = -(logprobs * weights).sum()
    wanted.backward()
    for value, grad_hidden, grad_weight in results:
        torch.testing.assert_close(value, wanted.detach(), rtol=1e-3, atol=1e-3)
        assert grad_hidden is not None
        assert grad_weight is not None
        assert relative_l2(grad_hidden, exact[0].grad) < 2e-2  # type: ignore[arg-type]
        assert relative_l2(grad_weight, exact[1].grad) < 2e-2  # type: ignore[arg-type]
        assert not grad_weight[1000:].any()


def test_the_compiled_model_has_the_losses_of_the_eager_one(folder: Path) -> None:
    eager, _ = train(make_engine(folder, dtype="bfloat16"), (1, 2))
    compiled, _ = train(make_engine(folder, dtype="bfloat16", compile="on"), (1, 2))
    assert compiled == pytest.approx(eager, abs=2e-2)
    recomputing = {"compile": "on", "activation_checkpointing": "layers"}
    recomputed, _ = train(make_engine(folder, dtype="bfloat16", **recomputing), (1, 2))
    assert recomputed == pytest.approx(eager, abs=2e-2)


@pytest.mark.parametrize("compiled", ["on", "off"])
@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "all_but_attention"},
        {"activation_checkpointing": "layers", "offload_activations": True},
    ],
    ids=["selective", "all_but_attention", "offloaded"],
)
def test_options_that_save_memory_have_the_losses_of_none(folder: Path, compiled: str, options: dict[str, Any]) -> None:
    wanted, norms = train(make_engine(folder, dtype="bfloat16"), (1, 2))
    found, its_norms = train(make_engine(folder, dtype="bfloat16", compile=compiled, **options), (1, 2))
    assert found == pytest.approx(wanted, abs=2e-2)
    assert its_norms == pytest.approx(norms, rel=5e-2)


@pytest.mark.parametrize("piece", [1000, state_streams.PIECE_ELEMENTS])
def test_optimizer_state_in_host_memory_leads_to_the_same_weights(
    folder: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_streams, "PIECE_ELEMENTS", piece)
    wanted, found = (make_engine(folder, dtype="bfloat16", offload_optimizer=each) for each in (False, True))
    for engine in (wanted, found):
        train(engine, (1, 2, 3))
    assert all(not each.master.is_cuda and each.master.is_pinned() for each in found.optimizer.trained)
    for mine, other in zip(found.optimizer.trained, wanted.optimizer.trained, strict=True):
        assert torch.equal(mine.master, other.master.cpu())
        assert torch.equal(mine.parameter, other.parameter)


def test_verify_agrees_in_bfloat16_and_compiled(folder: Path) -> None:
    found = api.verify(folder, device=DEVICE, dtype="bfloat16", compile=True)
    assert found.agrees, str(found)


def test_a_checkpoint_comes_back_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder, dtype="bfloat16")
    train(engine, (1, 2))
    writer = CheckpointWriter(tmp_path, engine.mesh, keep=1, keep_best=False, background=True, timeout_s=60)
    writer.save(2, checkpoint_shards(engine), Extras(values={"updates": 2}, arrays={}), heldout_loss=None)
    wanted = [piece.local.clone() for piece in checkpoint_shards(engine)]
    (unbroken,), _ = train(engine, (3,))  # training goes on while it is written
    writer.wait()

    reader = newest_usable(tmp_path)
    restored = make_engine(folder, dtype="bfloat16", checkpoint=reader)
    restore_optimizer(restored, reader)
    for piece, tensor in zip(checkpoint_shards(restored), wanted, strict=True):
        assert torch.equal(piece.local, tensor), piece.name
    (again,), _ = train(restored, (3,))
    assert again == pytest.approx(unbroken, rel=1e-5)


def test_the_one_pass_update_leaves_alone_what_gets_no_gradient() -> None:
    """None in some steps, as torch does it: not decayed, and its own count of updates."""
    torch.manual_seed(0)
    weights = [torch.randn(64, 33, device=DEVICE) for _ in range(3)]
    theirs = [nn.Parameter(weight.clone()) for weight in weights]
    ours = [nn.Parameter(weight.bfloat16()) for weight in weights]
    held = [
        TrainedParameter(
            name=str(at), parameter=each, master=weights[at].clone(), box=Box.whole(each.shape), shape=(64, 33)
        )
        for at, each in enumerate(ours)
    ]
    section = OptimizerSection(lr=1e-2, weight_decay=0.1)
    optimizer, reference = AdamW(held, section), torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    one, zero = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    for present in ((1, 2), (2,), (1, 2)):
        gradients = {at: torch.randn_like(weights[at]) for at in present}
        for at, each in enumerate(theirs):
            each.grad = gradients.get(at)
        reference.step()
        optimizer.step({id(held[at]): each for at, each in gradients.items()}, lr=1e-2, clip=one, skip=zero)
    for mine, other in zip(held, theirs, strict=True):
        torch.testing.assert_close(mine.master, other.detach(), rtol=0, atol=1e-6)
    assert torch.equal(held[0].master, weights[0])
    assert optimizer.missed_updates() == {"0": 3, "1": 1}


def test_the_one_pass_update_is_torchs_adamw() -> None:
    """Gradient in bfloat16, with clipping; then a skipped step that changes nothing, not even with a NaN."""
    from podium.engine.fused_adamw import scalars_for, update

    torch.manual_seed(0)
    weight = torch.randn(1000, 33, device=DEVICE)
    ours, copy = weight.clone(), torch.zeros_like(weight, dtype=torch.bfloat16)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    theirs = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    clip, go, skip = (torch.full((), value, device=DEVICE) for value in (0.5, 0.0, 1.0))
    for count in range(1, 5):
        gradient = torch.randn_like(weight).bfloat16()
        scalars = scalars_for(clip, go, torch.full((), float(count), device=DEVICE), (0.9, 0.95))
        update(ours, gradient, first, second, copy, scalars, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        theirs.grad = gradient.float() * 0.5
        optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch.equal(copy, ours.bfloat16())
    before = ours.clone(), first.clone(), second.clone(), copy.clone()
    scalars = scalars_for(clip, skip, torch.full((), 5.0, device=DEVICE), (0.9, 0.95))
    gradient = torch.full_like(weight, float("nan"))
    update(ours, gradient, first, second, copy, scalars, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    assert all(torch.equal(now, then) for now, then in zip((ours, first, second, copy), before, strict=True))
