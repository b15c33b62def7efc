# SPDX-License-Identifier: Apache-2.0
"""Divides the tokens of a packed micro-batch over the ranks of a context axis.

Every rank is given the whole micro-batch and computes its own stretch of the tokens. Attention is the one place where
tokens meet. There the ranks exchange: each has all tokens for its own part of the heads, and attends to them as one
device would (Ulysses). Where the heads do not divide, keys and values pass by each rank's queries
(ring_attention.py)."""

# T packed tokens · t those of a rank · S trained tokens · N ranks · H query heads · K key-value heads · E head width

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from podium.models.context_axis import ContextAxis, gather_over_context, swap_over_context
from podium.models.packing import TokenBatch, round_tokens
from podium.models.routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextPart:
    """Which tokens of one micro-batch each rank has. All ranks have as many; those after the last are padding, which
    nothing attends to."""

    axis: ContextAxis
    num_tokens: int  # T
    each: int  # t
    bounds: tuple[int, ...]  # [N + 1] of the ranks' trained tokens, in S
    borders: tuple[tuple[int, int], ...]  # [N] start and end, in T, of the document with each rank's first token

    @classmethod
    def of(cls, batch: TokenBatch, axis: ContextAxis) -> ContextPart:
        """Equal stretches of the batch, in the order of the ranks."""
        num_tokens = len(batch.tokens_T)
        multiple = axis.size * round_tokens(batch.tokens_T.device)
        each = -(-num_tokens // multiple) * multiple // axis.size
        starts = np.arange(axis.size + 1) * each
        bounds = np.searchsorted(batch.trained, starts)
        at = np.searchsorted(batch.offsets, starts[:-1], side="right")
        borders = tuple(
            (int(batch.offsets[end - 1]), int(batch.offsets[end])) if end < len(batch.offsets) else (start, start)
            for start, end in zip(starts.tolist(), at.tolist(), strict=False)
        )
        return cls(axis=axis, num_tokens=num_tokens, each=each, bounds=tuple(bounds.tolist()), borders=borders)

    @property
    def is_first(self) -> bool:
        """Whether this rank computes what needs the trained tokens of all ranks; the others add nothing to it."""
        return self.axis.rank == 0

    @property
    def start(self) -> int:
        """Of this rank's tokens, in T."""
        return self.axis.rank * self.each

    @property
    def num_own(self) -> int:
        """Number of this rank's tokens that are no padding."""
        return min(max(self.num_tokens - self.start, 0), self.each)

    @property
    def num_spanned(self) -> int:
        """Number of this rank's tokens whose document began on an earlier rank: its first ones."""
        first, end = self.borders[self.axis.rank]
        return min(end - self.start, self.each) if first < self.start else 0

    @property
    def trained(self) -> slice:
        """This rank's trained tokens, in S."""
        return slice(self.bounds[self.axis.rank], self.bounds[self.axis.rank + 1])

    def in_all(self, tokens: slice) -> slice:
        """Some of this rank's trained tokens, in S."""
        own = self.trained
        return slice(own.start + tokens.start, min(own.start + tokens.stop, own.stop))

    def cut(self, values: Tensor, padding: float = 0) -> Tensor:
        """This rank's stretch of values of all tokens [T, ...]."""
        own = values[self.start : self.start + self.num_own]
        if self.num_own == self.each:
            return own
        return torch.cat([own, own.new_full((self.each - self.num_own, *own.shape[1:]), padding)])

    def cut_batch(self, batch: TokenBatch) -> TokenBatch:
        """This rank's part of the batch, whose attention knows of the others. Positions stay those of the
        documents."""
        own, routing = self.trained, batch.packing.routing
        return TokenBatch(
            tokens_T=self.cut(batch.tokens_T),
            positions_T=self.cut(batch.positions_T),
            trained_S=batch.trained_S[own] - self.start,
            targets_S=batch.targets_S[own],
            weights_S=batch.weights_S[own],
            trained=batch.trained[own] - self.start,
            offsets=batch.offsets,
            packing=replace(
                batch.packing, context=self, routing=None if routing is None else self._cut_routing(routing)
            ),
        )

    def _cut_routing(self, routing: Routing) -> Routing:
        """What routers do beside routing, for this rank's tokens. Sums are of these."""
        assert routing.recorded_LTK is None, "only engines record experts, and they have no context axis"
        replayed, sums = routing.replayed_TLK, routing.sums
        if replayed is not None:
            replayed = self.cut(replayed, padding=torch.iinfo(replayed.dtype).max)
        if sums is not None:
            sums = replace(sums, is_real_T=self.cut(sums.is_real_T))
        return replace(routing, replayed_TLK=replayed, sums=sums)

    def join(self, own: Tensor) -> Tensor:
        """Values of the trained tokens of all ranks [S, ...], from those of this one. Differentiable. Collective."""
        counts = [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]
        padding = [0, 0] * (own.dim() - 1) + [0, max(1, *counts) - len(own)]
        parts = gather_over_context(F.pad(own, padding), self.axis)
        return torch.cat([part[:count] for part, count in zip(parts.unbind(0), counts, strict=True)])


def divides_heads(num_heads: int, axis: ContextAxis) -> bool:
    """Whether each rank attends for its own part of the query heads."""
    return num_heads % axis.size == 0


def own_heads(num_heads: int, axis: ContextAxis) -> slice:
    """The query heads that this rank attends for."""
    each = num_heads // axis.size
    return slice(axis.rank * each, (axis.rank + 1) * each)


def to_own_heads(query: Tensor, key: Tensor, value: Tensor, part: ContextPart) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, heads, t, E] of this rank's tokens and all heads -> [1, heads / N, T, E] of all
    tokens and its heads. Key-value heads that N does not divide are repeated first. In one exchange."""
    axis = part.axis
    times = axis.size // math.gcd(key.shape[1], axis.size)
    if times > 1:
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    parts = [each[0].unflatten(0, (axis.size, -1)) for each in (query, key, value)]  # [N, heads / N, t, E]
    flat = torch.cat([each.flatten(1) for each in parts], dim=1)
    received = swap_over_context(flat, axis).split([each[0].numel() for each in parts], dim=1)
    query, key, value = (
        now.view(before.shape).transpose(0, 1).flatten(1, 2)[:, : part.num_tokens].unsqueeze(0)
        for now, before in zip(received, parts, strict=True)
    )
    return query, key, value


def to_own_tokens(out: Tensor, part: ContextPart) -> Tensor:
    """Attention [1, T, H / N, E] of all tokens and this rank's heads -> [1, t, H, E] of its tokens and all heads."""
    axis = part.axis
    padded = F.pad(out[0], (0, 0, 0, 0, 0, axis.size * part.each - part.num_tokens))
    received = swap_over_context(padded.unflatten(0, (axis.size, part.each)), axis)  # [N, t, H / N, E]
    return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def gather_tokens(key: Tensor, value: Tensor, part: ContextPart) -> tuple[Tensor, Tensor]:
    """Keys and values [1, K, t, E] of this rank's tokens -> [1, K, T, E] of all tokens. In one exchange."""
    both = (key[0], value[0])
    flat = torch.cat([each.flatten() for each in both])
    received = gather_over_context(flat, part.axis).split([each.numel() for each in both], dim=1)
    key, value = (
        now.view(-1, *before.shape).transpose(0, 1).flatten(1, 2)[:, : part.num_tokens].unsqueeze(0)
        for now, before in zip(received, both, strict=True)
    )
    return key, value
