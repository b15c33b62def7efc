# SPDX-License-Identifier: Apache-2.0
"""Attention over a tree of segments, against dense attention within each document."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from podium.data.prefixes import prefix_tree
from podium.models import attention
from podium.models.attention import packed_attention
from podium.models.packing import Packing, runs_of, segments_of

# H query heads · K key-value heads · E head width
H, K, E = 4, 2, 8
# Two trees of several levels, a document that another continues, one alone.
TEXTS = (
    [1, 1, 1, 2, 2, 5], [1, 1, 1, 2, 2, 6, 6], [1, 1, 1, 2, 3], [1, 1, 1], [1, 1, 1, 4, 4, 4, 4, 4], [1, 1, 1, 7, 7],
    [8, 8, 8, 8, 8, 8, 8, 8, 8, 1], [8, 8, 8, 8, 8, 8, 8, 8, 8, 2], [8, 8, 8, 8, 8, 8, 8, 8, 8, 3, 3], [9, 9],
)  # fmt: skip


def both_ways(
    dtype: torch.dtype = torch.float32, key_heads: int = K, width: int = E, **kind: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs at all packed positions, and gradients of queries, keys and values of the tree's tokens: of the tree, and
    of whole documents whose numbers are those of the tree's tokens."""
    tokens_T = np.concatenate(TEXTS).astype(np.int32)
    offsets = np.cumsum([0, *map(len, TEXTS)]).astype(np.int32)
    tree = prefix_tree(tokens_T, offsets)
    assert len(tree.inner) >= 4
    draw = torch.Generator().manual_seed(0)
    shapes = ((H, E), (key_heads, E), (key_heads, width))
    tensors = [torch.randn(1, tree.num_tokens, *shape, generator=draw).to(dtype).transpose(1, 2) for shape in shapes]
    weights = torch.randn(1, len(tokens_T), H, width, generator=draw)
    place_T = torch.from_numpy(tree.place_T)
    shared = Packing(
        boundaries=torch.from_numpy(tree.offsets_G.astype(np.int32)), longest=1, runs=(), segments=segments_of(tree)
    )
    apart = Packing(boundaries=torch.from_numpy(offsets), longest=11, runs=runs_of(offsets))
    found = []
    for packing in (shared, apart):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        seen = leaves if packing is shared else [leaf.index_select(2, place_T) for leaf in leaves]
        out, _ = packed_attention(nn.Module(), *seen, None, packing=packing, **kind)
        out = out.index_select(1, place_T) if packing is shared else out
        (out.float() * weights).sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    return found[0], found[1]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 3, 64])
@pytest.mark.parametrize("key_heads", [K, H])
def test_outputs_and_gradients_are_those_of_whole_documents(
    key_heads: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    sink = torch.randn(H, generator=torch.Generator().manual_seed(1)) if sinks else None
    kind = {"scaling": 0.3, "sliding_window": window, "softcap": softcap, "s_aux": sink}
    for found, wanted in zip(*both_ways(key_heads=key_heads, **kind), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


def test_values_of_another_width() -> None:
    for found, wanted in zip(*both_ways(width=12, scaling=None), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


def test_bfloat16_differs_by_its_rounding() -> None:
    for found, wanted in zip(*both_ways(torch.bfloat16), strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.float() - wanted.float()).norm() < 0.02 * wanted.float().norm()


@pytest.mark.parametrize("kind", [{}, {"sliding_window": 3}, {"softcap": 1.5}])
def test_long_segments_are_computed_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]) -> None:
    monkeypatch.setattr(attention, "LEAST_ROWS", 2)
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", 1)
    monkeypatch.setattr(attention, "_MASK_ELEMENTS", 1)
    monkeypatch.setattr(attention, "merges_parts", lambda *_: False)
    for found, wanted in zip(*both_ways(**kind), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


def test_equally_long_segments_of_one_parent_share_a_call() -> None:
    texts = [[1, 1, 2, 2], [1, 1, 3, 3], [1, 1, 4, 4], [1, 1, 5, 5, 5]]
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    segments = segments_of(prefix_tree(np.concatenate(texts).astype(np.int32), offsets))
    assert [(run.num_documents, run.length, run.parent, run.before) for run in segments.runs] == [
        (1, 2, -1, 0), (3, 2, 0, 2), (1, 3, 0, 2),
    ]  # fmt: skip
    assert list(segments.continued()) == [(slice(0, 2), slice(2, 11))]
    assert segments.longest == 5
