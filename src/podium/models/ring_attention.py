# SPDX-License-Identifier: Apache-2.0
"""Attention over a context axis in which keys and values travel and queries stay: for heads that the axis does not
divide.

Stretches are contiguous, so of all documents only the one that a rank's first token belongs to may have begun on
earlier ranks. Its queries see keys of these ranks, and all other queries of the rank keys of its own stretch alone.
Keys and values go from each rank to the next as far as their document does. Each rank attends to what it has, and
merges that with what it had by the log-sum-exp. In backward they travel again, with their gradients, which the last
rank sends home.

A rank holds its own stretch, one that it computes with and one that arrives. All know from the borders of documents who
sends what in which step, so nothing is asked."""

# N ranks · t tokens of a stretch · M queries of the spanning document · H, K query and key-value heads · E head width

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from podium.models.attention_blocks import attend_block, block_gradients
from podium.models.attention_spec import AttentionSpec
from podium.models.context_parallel import ContextPart


def ring_attention(query: Tensor, key: Tensor, value: Tensor, part: ContextPart, spec: AttentionSpec) -> Tensor:
    """Queries [H, M, E] of the document that began on earlier ranks (`part.num_spanned`), and keys and values [K, t, E]
    of this rank's whole stretch, which later ranks may need -> [H, M, E]. Differentiable, also in sinks. Collective."""
    assert query.shape[1] == part.num_spanned
    assert spec.dropout == 0.0
    return _Ring.apply(query, key, value, spec.sinks, part, spec)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Route:
    """Who needs which stretch of keys."""

    part: ContextPart
    window: int | None

    def sees(self, rank: int, stretch: int) -> bool:
        """Whether queries of a rank see keys of an earlier one. If they do, those of the ranks between do too."""
        return 0 <= stretch < rank < self.part.axis.size and self.first_key(rank, stretch) < self.part.each

    def first_key(self, rank: int, stretch: int) -> int:
        """The first key of a stretch that the first query of a rank sees, counted from the stretch's first."""
        begin = rank * self.part.each
        first, _ = self.part.borders[rank]
        if self.window is not None:
            first = max(first, begin - self.window + 1)
        return max(first - stretch * self.part.each, 0)

    def num_queries(self, stretch: int) -> int:
        """Of this rank's queries, how many see keys of an earlier stretch: the first ones."""
        if self.window is None:
            return self.part.num_spanned
        gap = self.part.start - (stretch + 1) * self.part.each
        return min(self.part.num_spanned, self.window - 1 - gap)

    def block(self, stretch: int) -> tuple[int, slice, int]:
        """Number of queries, the keys that they see, and by how many tokens the first query is after the first key."""
        if stretch == self.part.axis.rank:
            return self.part.num_spanned, slice(0, self.part.num_spanned), 0
        first = self.first_key(self.part.axis.rank, stretch)
        ahead = self.part.start - stretch * self.part.each - first
        return self.num_queries(stretch), slice(first, self.part.each), ahead


class _Travel:
    """The stretches of keys and values that pass by this rank, its own first. Every rank goes through all steps."""

    def __init__(self, own_KTE: Tensor, route: _Route) -> None:
        self._held: Tensor | None = own_KTE
        self._route, self._axis = route, route.part.axis

    def __iter__(self) -> Any:
        """Yields step, stretch and its keys and values, or None where this rank has none of it. What comes next travels
        meanwhile."""
        axis, route = self._axis, self._route
        for step in range(axis.size):
            stretch = axis.rank - step
            sends, receives, arriving = {}, {}, None
            if route.sees(axis.rank + 1, stretch):
                assert self._held is not None
                sends[axis.rank + 1] = self._held
            if route.sees(axis.rank, stretch - 1):
                assert self._held is not None
                arriving = receives[axis.rank - 1] = torch.empty_like(self._held)
            wait = axis.exchange(sends, receives)
            yield step, stretch, self._held
            wait()
            self._held = arriving


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        part: ContextPart,
        spec: AttentionSpec,
    ) -> Tensor:
        route, width = _Route(part=part, window=spec.window), key.shape[-1]
        both = torch.cat([key, value], dim=-1)
        out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float32, device=query.device)
        lse = torch.full(query.shape[:2], float("-inf"), dtype=torch.float32, device=query.device)
        for _, stretch, held in _Travel(both, route):
            if held is None or not part.num_spanned:
                continue
            count, keys, ahead = route.block(stretch)
            k, v = held[:, keys].split([width, held.shape[-1] - width], dim=-1)
            found, found_lse = attend_block(query[:, :count], k, v, ahead, spec)
            before = lse[:, :count]
            merged = torch.logaddexp(before, found_lse)
            out[:, :count] *= (before - merged).exp().unsqueeze(-1)
            out[:, :count] += found * (found_lse - merged).exp().unsqueeze(-1)
            lse[:, :count] = merged
        if sinks is not None:
            merged = torch.logaddexp(lse, sinks.float().unsqueeze(-1))
            out *= (lse - merged).exp().unsqueeze(-1)
            lse = merged
        out = out.to(query.dtype)
        ctx.save_for_backward(query, both, out, lse, sinks)
        ctx.route, ctx.spec, ctx.width = route, spec, width
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, both, out, lse, sinks = ctx.saved_tensors
        route, spec, width, grad = ctx.route, ctx.spec, ctx.width, grads[0]
        part, axis = route.part, route.part.axis
        grad_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        grad_own = torch.zeros(both.shape, dtype=torch.float32, device=both.device)
        carried: Tensor | None = None  # gradients of the stretch that comes next, of the ranks before this one
        for step, stretch, held in _Travel(both, route):
            sends, receives, arriving, home = {}, {}, None, None
            if held is not None and part.num_spanned:
                total = grad_own if step == 0 else torch.zeros_like(grad_own) if carried is None else carried
                count, keys, ahead = route.block(stretch)
                k, v = held[:, keys].split([width, held.shape[-1] - width], dim=-1)
                dq, dk, dv = block_gradients(
                    query[:, :count], k, v, out[:, :count], lse[:, :count], grad[:, :count], ahead, spec
                )
                grad_query[:, :count] += dq
                total[:, keys, :width] += dk
                total[:, keys, width:] += dv
                if step > 0:
                    sends[axis.rank + 1 if route.sees(axis.rank + 1, stretch) else stretch] = total
            if step > 0 and route.sees(axis.rank, stretch - 1):
                arriving = receives[axis.rank - 1] = torch.empty_like(grad_own)
            last = axis.rank + step
            if step > 0 and route.sees(last, axis.rank) and not route.sees(last + 1, axis.rank):
                home = receives[last] = torch.empty_like(grad_own)
            axis.exchange(sends, receives)()
            carried = arriving
            if home is not None:
                grad_own += home
        grad_key, grad_value = grad_own.to(both.dtype).split([width, both.shape[-1] - width], dim=-1)
        grad_sinks = None
        if sinks is not None:
            weight = (sinks.float().unsqueeze(-1) - lse).exp()
            grad_sinks = -(weight * (grad.float() * out.float()).sum(-1)).sum(-1).to(sinks.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, grad_sinks, None, None
