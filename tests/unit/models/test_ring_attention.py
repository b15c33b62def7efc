# SPDX-License-Identifier: Apache-2.0
"""Keys and values that travel around ranks that are threads: what arrives where, and blocks of attention."""

# H query heads · K key-value heads · M queries · N keys · E head width

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.engines import random_documents
from helpers.thread_axis import ThreadContext, on_threads
from podium.data.documents import pack
from podium.models import attention_blocks
from podium.models.attention import packed_attention
from podium.models.attention_blocks import attend_block, block_gradients
from podium.models.attention_spec import AttentionSpec
from podium.models.context_parallel import ContextPart
from podium.models.packing import to_device

CPU = torch.device("cpu")
SPECS = {
    "plain": AttentionSpec(),
    "window": AttentionSpec(window=4),
    "softcap": AttentionSpec(softcap=1.5, scaling=0.7),
}


def tensors(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (4, queries, 6), (2, keys, 6), (2, keys, 3)
    q, k, v = (torch.randn(shape, generator=draw).requires_grad_() for shape in shapes)
    return q, k, v


def by_hand(q: Tensor, k: Tensor, v: Tensor, ahead: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """One query and head at a time."""
    outs, sums = [], []
    for head in range(4):
        for at in range(q.shape[1]):
            keys = [n for n in range(k.shape[1]) if 0 <= ahead + at - n < (spec.window or 1000)]
            scores = k[head // 2, keys] @ q[head, at] * (spec.scaling or 6**-0.5)
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            outs.append(torch.softmax(scores, 0) @ v[head // 2, keys])
            sums.append(scores.logsumexp(0))
    return torch.stack(outs).view(4, q.shape[1], -1), torch.stack(sums).view(4, -1)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("queries", "keys", "ahead"), [(5, 5, 0), (3, 7, 7), (2, 3, 4), (1, 1, 1)])
@pytest.mark.parametrize("rows", [2, 64])
def test_a_block_is_a_softmax_over_its_keys(
    name: str, queries: int, keys: int, ahead: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries that come after their keys, or with them; in one piece, and two queries at a time."""
    monkeypatch.setattr(attention_blocks, "SCORE_ELEMENTS", 1)
    monkeypatch.setattr(attention_blocks, "LEAST_ROWS", rows)
    spec = SPECS[name]
    if spec.window is not None:  # each query of a block sees a key
        queries = min(queries, spec.window - 1 + keys - ahead)
    q, k, v = tensors(queries, keys)
    wanted, wanted_lse = by_hand(q, k, v, ahead, spec)
    out, lse = attend_block(q.detach(), k.detach(), v.detach(), ahead, spec)
    assert torch.allclose(out, wanted, atol=1e-6)
    assert torch.allclose(lse, wanted_lse, atol=1e-6)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    wanted_grads = torch.autograd.grad(wanted, (q, k, v), grad)
    found = block_gradients(q.detach(), k.detach(), v.detach(), out, lse, grad, ahead, spec)
    for mine, other in zip(found, wanted_grads, strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


def ranks(
    lengths: tuple[int, ...], size: int, window: int | None, sinks: Tensor | None = None
) -> tuple[list[tuple[Tensor, list[Tensor], list[int]]], Tensor, list[Tensor]]:
    """Output, gradients and what arrived of each rank, and output and gradients of one device. One head: no number of
    ranks divides it."""
    batch = to_device(pack(random_documents(lengths)), CPU)
    length, draw = len(batch.tokens_T), torch.Generator().manual_seed(0)
    shapes = (1, 1, length, 4), (1, 1, length, 4), (1, 1, length, 4)
    whole = tuple(torch.randn(shape, generator=draw) for shape in shapes)
    weights = torch.randn(length, 1, 4, generator=draw)

    def work(given: tuple[Tensor, ...], packing: Any, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
        leaves = [each.clone().requires_grad_() for each in given]
        out, _ = packed_attention(
            nn.Identity(), *leaves, None, packing=packing, sliding_window=window, s_aux=sinks
        )  # fmt: skip
        (out[0, : len(weights)] * weights).sum().backward()
        return out[0].detach(), [each.grad for each in leaves if each.grad is not None]

    def rank(axis: Any) -> tuple[Tensor, list[Tensor], list[int]]:
        part = ContextPart.of(batch, axis)
        own = tuple(part.cut(each[0].transpose(0, 1)).transpose(0, 1).unsqueeze(0) for each in whole)
        found = work(own, part.cut_batch(batch).packing, weights[part.start : part.start + part.num_own])
        return *found, axis.received

    return on_threads(size, rank, ThreadContext), *work(whole, batch.packing, weights)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 14), min_size=1, max_size=5), st.integers(2, 5), st.sampled_from([None, 2, 3, 8]),
    st.booleans(),
)  # fmt: skip
def test_any_documents_over_any_ranks_are_attended_to_as_on_one_device(
    lengths: list[int], size: int, window: int | None, has_sinks: bool
) -> None:
    sinks = torch.tensor([0.3]) if has_sinks else None
    found, wanted, wanted_grads = ranks(tuple(lengths), size, window, sinks)
    length = len(wanted)
    assert torch.allclose(torch.cat([out for out, _, _ in found])[:length], wanted, atol=1e-5)
    for at, other in enumerate(wanted_grads):
        joined = torch.cat([grads[at] for _, grads, _ in found], dim=2)
        assert torch.allclose(joined[:, :, :length], other, atol=1e-5)
        assert not joined[:, :, length:].any()


def arrived(lengths: tuple[int, ...], size: int, window: int | None = None) -> list[list[float]]:
    """Stretches of keys and values that came to each rank, by step; forward, then backward with those of gradients."""
    found, _, _ = ranks(lengths, size, window)
    stretch = 2 * 4 * -(-sum(lengths) // size)
    return [[numbers / stretch for numbers in received] for _, _, received in found]


def test_keys_travel_as_far_as_their_document() -> None:
    """A forward has a step for each rank; a backward has two exchanges in each, of keys and of gradients."""
    whole = arrived((40,), 4)
    assert [received[:4] for received in whole] == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    # Each holds what arrives, what it computes with and its own: never two that arrive at a time. Gradients of a
    # stretch come from the rank before, and home from the last one.
    assert max(max(received[4::2]) for received in whole) == 1
    assert [sum(received[5::2]) for received in whole] == [1, 1, 2, 2]

    assert not any(sum(received) for received in arrived((10, 10, 10, 10), 4)), "each rank has a whole document"
    border = arrived((10, 15, 5, 10), 4)  # the second document is on the second and the third rank
    assert [sum(received[:4]) for received in border] == [0, 0, 1, 0]


def test_a_window_ends_the_journey() -> None:
    near = arrived((40,), 4, window=5)
    assert [received[:4] for received in near] == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    far = arrived((40,), 4, window=12)  # ten tokens a rank: the first query of a rank sees two ranks back
    assert [sum(received[:4]) for received in far] == [0, 1, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sliding_window": 3}, {"softcap": 2.0, "s_aux": torch.tensor([0.1, 0.2])}])
def test_compiled_attention_is_given_the_same_spec(options: dict[str, Any]) -> None:
    """A compiled layer leaves its graph for attention, and hands the spec over."""
    batch = to_device(pack(random_documents((4, 9))), CPU)
    q, k, v = (torch.randn(1, 2, len(batch.tokens_T), 4, generator=torch.Generator().manual_seed(2)) for _ in range(3))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(nn.Identity(), q * 2, k, v, None, packing=batch.packing, **options)[0] + 1

    assert torch.equal(torch.compile(layer, backend="aot_eager")(q, k, v), layer(q, k, v))
