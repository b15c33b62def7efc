# SPDX-License-Identifier: Apache-2.0
"""What axes of ranks have in common: a place among the ranks of a group, and values that pass between them forward and
as gradients back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13, which warns of the old names.
gather_whole = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankAxis:
    """This rank's place among the ranks of a group."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """Adds up the values of all ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def stacked(self, part_X: Tensor) -> Tensor:
        """The values of all ranks, of one shape on all of them -> [ranks, X]."""
        part_X = part_X.contiguous()
        parts_NX = part_X.new_empty((self.size, *part_X.shape))
        gather_whole(parts_NX.view(-1), part_X.view(-1), group=self.group)
        return parts_NX


def passed(values: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """`there(values)`, whose gradients go through `back`, the transpose of `there`."""
    return _Passed.apply(values, there, back)  # type: ignore[no-any-return, no-untyped-call]


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0]), None, None
