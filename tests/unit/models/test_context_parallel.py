# SPDX-License-Identifier: Apache-2.0
"""Tokens of a micro-batch over ranks that are threads: attention, losses and gradients of one device."""

# N ranks · T packed tokens · H query heads · K key-value heads

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.engines import random_documents, relative_l2
from helpers.thread_axis import ThreadContext, on_threads
from helpers.tiny import save_tiny_model
from podium.data.documents import PackedBatch, pack
from podium.errors import UnsupportedModelError
from podium.models.attention import packed_attention
from podium.models.causal_lm import build, load_config
from podium.models.context_parallel import ContextPart
from podium.models.context_plan import MODEL_TYPES, require_context_type
from podium.models.head import EntropyObjective, TokenObjective
from podium.models.packing import TokenBatch, to_device
from podium.recipe import ModelSection

CPU = torch.device("cpu")
# One document is longer than the others together, and no border of 2, 3 or 4 parts is a border of documents.
LENGTHS = (3, 9, 37, 2, 6)


class Place:
    """A rank without others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def parts_of(batch: TokenBatch, size: int) -> list[ContextPart]:
    return [ContextPart.of(batch, Place(rank, size)) for rank in range(size)]  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 12), min_size=0, max_size=6), st.integers(2, 5), st.integers(0, 3))
def test_parts_together_are_the_micro_batch(lengths: list[int], size: int, seed: int) -> None:
    batch = to_device(pack(random_documents(lengths, seed=seed)), CPU)
    parts = parts_of(batch, size)
    cut = [part.cut_batch(batch) for part in parts]
    for name in ("tokens_T", "positions_T"):
        own = [getattr(each, name) for each in cut]
        assert {len(each) for each in own} == {parts[0].each}
        assert torch.equal(torch.cat(own)[: len(batch.tokens_T)], getattr(batch, name))
    for name in ("targets_S", "weights_S"):
        assert torch.equal(torch.cat([getattr(each, name) for each in cut]), getattr(batch, name))
    placed = torch.cat([each.trained_S + part.start for each, part in zip(cut, parts, strict=True)])
    assert torch.equal(placed, batch.trained_S)
    assert sum(part.num_own for part in parts) == len(batch.tokens_T)


def test_numbers_of_trained_tokens_are_those_of_the_micro_batch() -> None:
    batch = to_device(pack(random_documents(LENGTHS)), CPU)
    numbers = torch.arange(len(batch.trained_S))
    found = []
    for part in parts_of(batch, 4):
        count = part.trained.stop - part.trained.start
        for start in range(0, count, 5):  # the head's last chunk is longer than what is left
            found += numbers[part.in_all(slice(start, start + 5))].tolist()
    assert found == numbers.tolist()


def test_a_micro_batch_of_one_token_leaves_padding_to_the_other_ranks() -> None:
    batch = to_device(pack([]), CPU)
    parts = parts_of(batch, 3)
    assert [part.num_own for part in parts] == [1, 0, 0]
    assert [part.cut(batch.tokens_T).tolist() for part in parts] == [[0], [0], [0]]


def test_joined_values_have_the_gradient_of_every_rank_that_reads_them() -> None:
    batch = to_device(pack(random_documents((2, 5))), CPU)
    values_S = torch.arange(float(len(batch.trained_S)))

    def work(axis: Any) -> tuple[Tensor, Tensor]:
        part = ContextPart.of(batch, axis)
        own = values_S[part.trained].clone().requires_grad_()
        joined = part.join(own)
        (joined * (axis.rank + 1)).sum().backward()
        assert own.grad is not None
        return joined.detach(), own.grad

    for joined, grad in on_threads(3, work, ThreadContext):
        assert torch.equal(joined, values_S)
        assert torch.equal(grad, torch.full_like(grad, 1.0 + 2.0 + 3.0))


# --- attention -----------------------------------------------------------------------------------------------------


def attention_of(
    tensors: tuple[Tensor, ...], sinks: Tensor | None, packing: Any, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """The output [tokens, H, E], and the gradients of a sum with different weights for each number."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    sink = None if sinks is None else sinks.clone().requires_grad_()
    out, _ = packed_attention(nn.Identity(), *leaves, None, packing=packing, s_aux=sink, **options)
    weights = options["weights"]
    (out[0, : len(weights)] * weights).sum().backward()
    grads = [each.grad for each in (*leaves, *([] if sink is None else [sink]))]
    assert all(grad is not None for grad in grads)
    return out[0].detach(), grads  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"),
    [(4, 4, 2), (4, 2, 4), (8, 2, 4), (6, 3, 2), (4, 1, 4), (2, 2, 4), (5, 5, 3), (6, 2, 4), (1, 1, 3)],
)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"softcap": 2.0}, {"sinks": True, "sliding_window": 9}])
def test_attention_is_that_of_one_device(heads: int, key_heads: int, size: int, options: dict[str, Any]) -> None:
    """Heads that divide, key-value heads that are repeated, and heads that do not divide."""
    batch = to_device(pack(random_documents(LENGTHS)), CPU)
    length, draw = len(batch.tokens_T), torch.Generator().manual_seed(0)
    options = dict(options)
    sinks = torch.randn(heads, generator=draw) if options.pop("sinks", False) else None
    # Values of another width than keys, as in latent attention.
    shapes = ((1, heads, length, 6), (1, key_heads, length, 6), (1, key_heads, length, 4))
    tensors = tuple(torch.randn(shape, generator=draw) for shape in shapes)
    weights = torch.randn(length, heads, 4, generator=draw)
    wanted, wanted_grads = attention_of(tensors, sinks, batch.packing, weights=weights, **options)

    def work(axis: Any) -> tuple[Tensor, list[Tensor]]:
        part = ContextPart.of(batch, axis)
        packing = part.cut_batch(batch).packing
        own = tuple(part.cut(each[0].transpose(0, 1)).transpose(0, 1).unsqueeze(0) for each in tensors)
        mine = weights[part.start : part.start + part.num_own]
        return attention_of(own, sinks, packing, weights=mine, **options)

    found = on_threads(size, work, ThreadContext)
    assert relative_l2(torch.cat([out for out, _ in found])[:length], wanted) < 1e-5
    for at in range(3):
        joined = torch.cat([grads[at] for _, grads in found], dim=2)
        assert relative_l2(joined[:, :, :length], wanted_grads[at]) < 1e-5
        assert not joined[:, :, length:].any()
    if sinks is not None:
        assert relative_l2(torch.stack([grads[3] for _, grads in found]).sum(0), wanted_grads[3]) < 1e-5


# --- whole models --------------------------------------------------------------------------------------------------


def gradient_of(folder: Path, packed: PackedBatch, axis: Any, objective: Any, kind: str) -> tuple[float, Tensor, Any]:
    """Loss and gradient of this rank, and what it says of all tokens."""
    section = ModelSection(path=str(folder))
    config = load_config(folder, trust_remote_code=False)
    model = build(section, config, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        draw = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    model.context = axis
    batch = to_device(packed, CPU)
    total, *seen = model(batch, objective, kind)
    total.backward()
    with torch.no_grad():
        scores = model(batch, None, "scores")
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return total.item(), torch.cat([grad.flatten() for grad in grads]), [*seen, scores]


def squared_document_sums(packed: PackedBatch) -> EntropyObjective:
    """A loss that ties the tokens of each document together: every token has the square of their mean log-prob."""
    of_token = np.repeat(np.arange(len(packed.offsets) - 1), np.diff(packed.offsets))
    document_S = torch.from_numpy(of_token[np.flatnonzero(packed.weights_T)])

    def loss(logprobs_S: Tensor, entropy_S: Tensor, tokens: slice) -> Tensor:
        assert len(logprobs_S), "losses of documents are not called without any"
        own = document_S[tokens]
        sums = logprobs_S.new_zeros(len(packed.offsets)).index_add(0, own, logprobs_S)
        return sums[own].square() * 0.01 + entropy_S * logprobs_S

    return EntropyObjective(loss=loss, watches_entropy=True, ties_tokens=True)


def factors(tokens: slice, count: int) -> Tensor:
    return 2 + torch.arange(float(tokens.start), tokens.start + count).cos()


def numbered(logprobs_C: Tensor, entropy_C: Tensor, tokens: slice) -> Tensor:
    """A loss that depends on which tokens they are."""
    return -logprobs_C * factors(tokens, len(logprobs_C))


class Logits:
    """A loss of whole distributions that depends on which tokens they are."""

    def __call__(self, logits_CV: Tensor, tokens: slice) -> Tensor:
        return torch.log_softmax(logits_CV, -1).square().mean(-1) * factors(tokens, len(logits_CV))


def require_same(folder: Path, packed: PackedBatch, size: int, objective: Any, kind: str = "objective") -> None:
    wanted, wanted_grad, wanted_seen = gradient_of(folder, packed, None, objective, kind)
    found = on_threads(size, lambda axis: gradient_of(folder, packed, axis, objective, kind), ThreadContext)
    assert sum(total for total, _, _ in found) == pytest.approx(wanted, rel=1e-5)
    assert relative_l2(torch.stack([grad for _, grad, _ in found]).sum(0), wanted_grad) < 1e-5
    for _, _, seen in found:
        for one, other in zip(seen, wanted_seen, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


SPAN = EntropyObjective(loss=numbered, watches_entropy=False, ties_tokens=False)


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("qwen3", 4), ("gemma3", 3), ("qwen3_moe", 2)])
def test_a_model_has_the_loss_and_gradient_of_one_device(tmp_path: Path, name: str, size: int) -> None:
    folder = save_tiny_model(name, tmp_path / name)
    require_same(folder, pack(random_documents(LENGTHS)), size, SPAN)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["objective", "divergence", "tied"])
@pytest.mark.parametrize("lengths", [LENGTHS, (2,), ()])
def test_losses_of_tokens_distributions_and_documents(tmp_path: Path, kind: str, lengths: tuple[int, ...]) -> None:
    """Also of a micro-batch that is smaller than the number of ranks, and of none."""
    folder = save_tiny_model("qwen3", tmp_path / "qwen3")
    packed = pack(random_documents(lengths))
    objectives: dict[str, Any] = {"objective": SPAN, "divergence": Logits(), "tied": squared_document_sums(packed)}
    if lengths:
        require_same(folder, packed, 3, objectives[kind], "divergence" if kind == "divergence" else "objective")
    else:
        found = on_threads(
            3, lambda axis: gradient_of(folder, packed, axis, objectives[kind], kind.replace("tied", "objective")),
            ThreadContext,
        )  # fmt: skip
        assert all(total == 0 and not gradient.any() for total, gradient, _ in found)


def kept_bytes(folder: Path, packed: PackedBatch, axis: Any) -> int:
    """Bytes that autograd keeps of a forward on this rank, each storage once, without parameters."""
    model = build(
        ModelSection(path=str(folder)), load_config(folder, trust_remote_code=False), device=CPU, dtype=torch.float32
    )
    model.context = axis
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(to_device(packed, CPU), SPAN, "objective")
    return sum(each.untyped_storage().nbytes() for where, each in kept.items() if where not in own)


def test_activations_are_divided(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "llama", num_key_value_heads=4, vocab_size=60)
    packed = pack(random_documents((200, 40), vocabulary=60))
    whole = kept_bytes(folder, packed, None)
    for mine in on_threads(4, lambda axis: kept_bytes(folder, packed, axis), ThreadContext):
        assert mine < 0.3 * whole


@pytest.mark.slow
@pytest.mark.parametrize("name", [{"gemma3_text": "gemma3"}.get(each, each) for each in MODEL_TYPES])
def test_every_architecture_of_the_list_has_the_gradient_of_one_device(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(name, tmp_path / name)
    for size in (2, 3):
        require_same(folder, pack(random_documents(LENGTHS)), size, TokenObjective(lambda logprobs: -logprobs))


def test_an_architecture_whose_tokens_meet_elsewhere_is_refused_by_name() -> None:
    require_context_type("llama")
    with pytest.raises(UnsupportedModelError, match=r"placement\.policy\.context: qwen3_next is not among"):
        require_context_type("qwen3_next")
