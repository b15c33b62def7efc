# SPDX-License-Identifier: Apache-2.0
"""How often keys are sent around ranks, by hand and as the ring itself decides it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.model_shapes import QWEN3_235B, TINY_QWEN3
from podium.data.documents import Document, pack
from podium.models.context_axis import ContextAxis
from podium.models.context_parallel import ContextPart
from podium.models.packing import to_device
from podium.models.ring_attention import _Route
from podium.planning.collectives import step_collectives
from podium.planning.model_shape import shape_from_config
from podium.planning.rings import Ring, counted_rank
from podium.recipe.policy_mesh import MeshSizes


def test_stretches_of_one_document_pass_by_all_later_ranks() -> None:
    ring = Ring(context=4, tokens=64, length=64)
    assert [ring.sent_keys(rank, None) for rank in range(4)] == [1, 2, 3, 0]
    assert [ring.sent_gradients(rank, None) for rank in range(4)] == [0, 1, 2, 3]
    assert counted_rank(4) == 2  # 3 forward, 3 backward, and 2 with gradients


def test_a_window_and_the_end_of_a_document_end_the_journey() -> None:
    whole, halves = Ring(context=4, tokens=64, length=64), Ring(context=4, tokens=64, length=32)
    assert [whole.sent_keys(rank, 16) for rank in range(4)] == [1, 1, 1, 0]  # 15 tokens before the first query
    assert [whole.sent_keys(rank, 1) for rank in range(4)] == [0, 0, 0, 0]
    assert [halves.sent_keys(rank, None) for rank in range(4)] == [1, 0, 1, 0]
    assert [halves.sent_gradients(rank, None) for rank in range(4)] == [0, 1, 0, 1]


@given(
    st.integers(2, 5), st.integers(1, 60), st.integers(1, 60), st.one_of(st.none(), st.integers(1, 40))
)  # fmt: skip
def test_it_counts_what_the_ring_decides(context: int, count: int, length: int, window: int | None) -> None:
    tokens = np.zeros(length + 1, np.int32)
    count = max(1, count // length)
    batch = pack([Document(tokens=tokens, trained=np.arange(length + 1) > 0)] * count)
    ring = Ring(context=context, tokens=count * length, length=length)
    group: Any = None
    for rank in range(context):
        axis = ContextAxis(group=group, rank=rank, size=context)
        route = _Route(part=ContextPart.of(to_device(batch, torch.device("cpu")), axis), window=window)
        assert ring.stretch == route.part.each
        sent = sum(route.sees(rank + 1, rank - step) for step in range(context))
        assert ring.sent_keys(rank, window) == sent
        assert ring.sent_gradients(rank, window) == sum(route.sees(rank, rank - step) for step in range(1, context))


def test_exchanges_of_a_micro_batch_by_hand() -> None:
    """64 tokens over 4 ranks in bfloat16, two layers, 4 heads of width 16 and 2 key-value heads, which are copied."""
    shape = shape_from_config(TINY_QWEN3, where="tiny")
    found = step_collectives(shape, MeshSizes(context=4), passes=1, tokens=64, itemsize=2)
    exchanged = {each.kind: (each.calls, each.num_bytes) for each in found if each.axis == "context"}
    heads = 4 + 2 * 4 + 4  # queries, keys and values, outputs
    assert exchanged == {
        "all-to-all": (2 * 2 * 2, 2 * 2 * 16 * heads * 16 * 2),  # both, forward and backward, of each layer
        "all-gather": (2, 2 * 64 * 4),  # log-probs and entropies
    }


def test_keys_that_travel_by_hand() -> None:
    config = {**TINY_QWEN3, "num_attention_heads": 3, "num_key_value_heads": 1}
    shape = shape_from_config(config, where="tiny")
    found = step_collectives(shape, MeshSizes(context=4), passes=1, tokens=64, itemsize=2, checkpointed=True)
    sends = next(each for each in found if each.kind == "send")
    keys, gradients = 2 * 3 * 3, 2 * 2  # of both layers: forward, again, and backward; with gradients
    assert sends.calls == keys + gradients
    assert sends.num_bytes == 2 * 16 * 16 * (keys * 2 + gradients * 4)  # keys and values, of 16 tokens, 16 wide


@pytest.mark.parametrize(("experts", "gathered"), [(1, True), (64, False)])
def test_divided_experts_exchange_tokens_in_place_of_weights(experts: int, gathered: bool) -> None:
    shape = shape_from_config(QWEN3_235B, where="235B")
    sizes = MeshSizes(replicate=16, shard=64, experts=experts)
    found = {
        f"{each.kind} {each.axis}": each
        for each in step_collectives(shape, sizes, passes=1, tokens=4096, itemsize=2, checkpointed=True)
    }
    assert ("all-to-all experts" in found) != gathered
    assert (found["all-gather shard"].num_bytes > 800 * 2**30) == gathered
    if not gathered:
        states = 4096 * 8 * 4096 * 2  # of a token for each of its experts
        calls = found["all-to-all experts"]
        assert calls.calls == 94 * (3 + 3 + 2)  # forward, again, backward
        assert calls.num_bytes == 94 * (3 * 2 * states + 2 * 128 * 8)
        assert calls.span == 64
