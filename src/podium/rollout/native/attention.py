# SPDX-License-Identifier: Apache-2.0
"""Attention over the KV cache in plain torch: for all generation on CPU, and for prefill on CUDA.

One forward holds the newest token of every sequence and chunks of prompts. Each layer first writes the keys and values
of all of them into its blocks and then attends over the blocks.

On CPU a token's result depends only on the tokens that it attends to, to the last bit. It does not depend on its batch,
on its place in memory, or on whether it is prefilled or decoded. Kernels round differently in three cases, and the
shapes used here avoid them. A product of a single row uses another routine, so there are never fewer than two query
rows, nor one row left over behind a block. Elements behind the last whole vector use another exponential, so keys come
in whole vectors, the surplus ones masked. A product over many keys is cut into parts at places that depend on their
number, so there are whole stretches of keys where that happens (`padded_keys`). What rows of a product do to one
another on x86 is the subject of `models.exact_products`."""

# T tokens of this forward · N rows · H query heads · K key-value heads · E head width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from podium.models.attention import plain_attention, varlen_attention
from podium.rollout.native.cache import LayerCache
from podium.rollout.native.sizing import KEY_STRETCH, padded_keys

# Query rows of one call. Torch's fused kernel works on blocks of 32 and more rows, so an even count leaves two or none
# behind the last block. Written-out attention takes a naive product below some 400 multiplications; four rows of 16
# keys are above that for any head of 7 or more.
_FUSED_ROWS = 2
_PLAIN_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRun:
    """Rows whose slots are neighbours: read in one call, each as far as the longest."""

    first: int  # position of the first row's token in the forward
    count: int
    first_slot: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuerySpan:
    """Tokens [first, first + count) of the forward are the last `count` of the first `length` of a sequence."""

    first: int
    count: int
    length: int
    blocks: Tensor  # that hold the sequence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedSpans:
    """All chunks of a forward on CUDA, for one variable-length call."""

    first: int  # where they begin in the forward
    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int
    key_block: Tensor | None  # of every key that is read; None: all are fresh, and the forward's own
    key_offset: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedStep:
    """Passed to the attention of every layer in place of a packing."""

    layers: Mapping[int, LayerCache]  # by the attention module's id
    block_T: Tensor  # where each token's keys and values are written
    offset_T: Tensor
    slot_runs: Sequence[SlotRun] = ()
    lengths_N: Tensor | None = None  # of the rows of the slot runs, this forward's token included
    pieces: Sequence[QuerySpan] = ()
    packed: PackedSpans | None = None
    repeats: Tensor | None = None  # tokens of the forward behind `page_T`: which of the others each one repeats
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)  # shared by the layers
    places: dict[int, Tensor] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Writes keys and values into the cache and attends over each sequence."""
        layer = self.layers[id(module)]
        self._write(layer.keys, key)
        self._write(layer.values, value)
        plain = softcap is not None or sinks is not None
        outs = [self._of_slots(layer, query, run, scaling, window, softcap, sinks) for run in self.slot_runs]
        if self.packed is not None and query.dtype != torch.float32 and not plain:
            outs.append(self._of_packed(layer, query, key, value, self.packed, scaling, window))
        else:
            outs.extend(self._of_piece(layer, query, piece, scaling, window, softcap, sinks) for piece in self.pieces)
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if self.repeats is not None:
            out = torch.cat([out, out.index_select(0, self.repeats)])
        return out.unsqueeze(0)

    def _write(self, store: Tensor, fresh: Tensor) -> None:
        heads = store.shape[1]
        place = self.places.get(heads)
        if place is None:
            # Flat index of (block, head, offset) for every token and head.
            block_and_head = self.block_T[:, None] * heads + torch.arange(heads, device=self.block_T.device)
            place = (block_and_head * store.shape[2] + self.offset_T[:, None]).flatten()
            self.places[heads] = place
        values = fresh[0, :, : len(self.block_T)].transpose(0, 1)
        store.view(-1, store.shape[-1]).index_copy_(0, place, values.reshape(-1, fresh.shape[-1]))

    def _of_slots(
        self,
        layer: LayerCache,
        query: Tensor,
        run: SlotRun,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """One token of each of some rows -> [N, H, E]. Query heads that share keys are read as rows of one product."""
        heads, shared = query.shape[1], layer.keys.shape[1]
        q = query[0, :, run.first : run.first + run.count].transpose(0, 1)
        slots = slice(run.first_slot, run.first_slot + run.count)
        keys = min(padded_keys(run.longest), layer.keys.shape[2])
        k, v = layer.keys[slots, :, :keys], layer.values[slots, :, :keys]
        if softcap is None and sinks is None:
            group = heads // shared
            q = _whole_rows(q.reshape(run.count, shared, group, q.shape[-1]), _FUSED_ROWS)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._slot_mask(run, keys, window), scale=scaling)
            return out[:, :, :group].reshape(run.count, heads, v.shape[-1])
        visible = self._slot_mask(run, keys, window) == 0
        q = _whole_rows(q.unsqueeze(2), _PLAIN_ROWS)
        return plain_attention(
            q, k, v, visible, scaling=scaling, softcap=softcap, sinks=sinks, key_stretch=KEY_STRETCH
        )[:, :, 0]

    def _slot_mask(self, run: SlotRun, keys: int, window: int | None) -> Tensor:
        """[N, 1, 1, keys]: 0 where a row attends, -inf elsewhere."""
        known = self.masks.get((run.first, run.count, window))
        if known is None:
            assert self.lengths_N is not None
            length = self.lengths_N[run.first : run.first + run.count, None]
            at = torch.arange(keys, device=length.device)
            hidden = at >= length
            if window is not None:
                hidden |= at < length - window
            known = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))[:, None, None]
            self.masks[(run.first, run.count, window)] = known
        return known

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self.layers.values())).keys.dtype

    def _of_piece(
        self,
        layer: LayerCache,
        query: Tensor,
        piece: QuerySpan,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Some tokens of one sequence -> [T, H, E]."""
        q = query[:, :, piece.first : piece.first + piece.count]
        plain = softcap is not None or sinks is not None
        if q.is_cuda:  # fused kernels there apply the mask themselves
            return self._of_piece_on_cuda(layer, q, piece, scaling, window, softcap, sinks)
        q = _whole_rows(q, _PLAIN_ROWS if plain else _FUSED_ROWS)
        keys = padded_keys(piece.length)
        k, v = (_sequence(store, piece, keys) for store in (layer.keys, layer.values))
        mask = self._piece_mask(piece, q.shape[2], keys, window)
        if plain:
            out = plain_attention(
                q, k, v, mask == 0, scaling=scaling, softcap=softcap, sinks=sinks, key_stretch=KEY_STRETCH
            )
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out[0, :, : piece.count].transpose(0, 1)

    def _piece_mask(self, piece: QuerySpan, rows: int, keys: int, window: int | None) -> Tensor:
        """[rows, keys] for the last tokens of a sequence: 0 where a token attends, -inf elsewhere. Surplus rows have
        the mask of the last one."""
        known = self.masks.get((piece.first, rows, window))
        if known is None:
            at = torch.arange(piece.length - piece.count, piece.length - piece.count + rows).clamp_(
                max=piece.length - 1
            )
            distance = at[:, None] - torch.arange(keys)[None, :]
            hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
            known = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
            self.masks[(piece.first, rows, window)] = known
        return known

    def _of_piece_on_cuda(
        self,
        layer: LayerCache,
        q: Tensor,
        piece: QuerySpan,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        k, v = (_sequence(store, piece, piece.length) for store in (layer.keys, layer.values))
        whole = piece.count == piece.length and (window is None or piece.length <= window)
        if softcap is None and sinks is None:
            mask = None if whole or _sees_all(piece, window) else _trailing_mask(piece, window, q.device)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=whole, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            visible = _trailing_mask(piece, window, q.device)
            out = plain_attention(q, k, v, visible, scaling=scaling, softcap=softcap, sinks=sinks)
        return out[0].transpose(0, 1)

    def _of_packed(
        self,
        layer: LayerCache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedSpans,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        q = query[0, :, packed.first :].transpose(0, 1)
        if packed.key_block is None:
            k, v = (fresh[0, :, packed.first :].transpose(0, 1) for fresh in (key, value))
        else:
            k, v = (store[packed.key_block, :, packed.key_offset] for store in (layer.keys, layer.values))
        return varlen_attention(
            q,
            k,
            v,
            (packed.query_bounds, packed.key_bounds),
            (packed.longest_query, packed.longest_key),
            scaling=scaling,
            window=window,
        )


def _whole_rows(query: Tensor, multiple: int) -> Tensor:
    """[..., rows, E] with the last row repeated until the rows are a multiple."""
    missing = -query.shape[-2] % multiple
    if not missing:
        return query
    last = query[..., -1:, :]
    return torch.cat([query, last.expand(*last.shape[:-2], missing, last.shape[-1])], dim=-2)


def _sequence(store: Tensor, piece: QuerySpan, keys: int) -> Tensor:
    """[1, K, keys, E] of one sequence: a view of its slot, or its blocks concatenated."""
    if len(piece.blocks) == 1 and keys <= store.shape[2]:
        block = int(piece.blocks[0])
        return store[block : block + 1, :, :keys]
    blocks = store[piece.blocks].transpose(0, 1)
    sequence = blocks.reshape(1, store.shape[1], -1, store.shape[-1])[:, :, :keys]
    return F.pad(sequence, (0, 0, 0, keys - sequence.shape[2])) if sequence.shape[2] < keys else sequence


def _sees_all(piece: QuerySpan, window: int | None) -> bool:
    return piece.count == 1 and (window is None or piece.length <= window)


def _trailing_mask(piece: QuerySpan, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] for the last tokens of a sequence."""
    keys = torch.arange(piece.length, device=device)
    distance = keys[piece.length - piece.count :, None] - keys[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
