# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute one model together, each a part of every layer, and the four ways in which values pass between
them: each is the transpose of another, so that gradients are those of one device."""

# X any dimensions · E the divided one, which is the last

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13, which warns of the old name.
_gather_whole = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorAxis:
    """This rank's place among the ranks that compute on the same data."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def part(self, length: int) -> slice:
        """This rank's part of a dimension that the ranks divide evenly."""
        assert length % self.size == 0
        each = length // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def sum(self, values: Tensor) -> Tensor:
        """Adds up the values of all ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """The element-wise maximum over all ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def broadcast(self, values: Tensor) -> Tensor:
        """Fills `values` on all ranks with those of rank 0, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([values], options).wait()
        return values

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, joined in dimension `dim`."""
        part = part.contiguous()
        parts = part.new_empty((self.size, *part.shape))
        _gather_whole(parts.view(-1), part.view(-1), group=self.group)
        return torch.cat(parts.unbind(0), dim=dim)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def copy_to_axis(values: Tensor, axis: TensorAxis) -> Tensor:
    """Values that all ranks have, into layers of which each rank has a part. Backward: each rank has a part of their
    gradient, and these are added up."""
    return _Copy.apply(values, axis)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def reduce_from_axis(values: Tensor, axis: TensorAxis) -> Tensor:
    """Values of which each rank has a summand. Backward: each summand has the gradient of the sum."""
    return _Reduce.apply(values, axis)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_from_axis(values_XE: Tensor, axis: TensorAxis) -> Tensor:
    """Values of which each rank has a part of the last dimension. Backward: each rank takes the gradient of its part,
    which all ranks have."""
    return _Gather.apply(values_XE, axis)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def scatter_to_axis(values_XE: Tensor, axis: TensorAxis) -> Tensor:
    """This rank's part of the last dimension of values that all ranks have. Backward: the gradients of all parts."""
    return _Scatter.apply(values_XE, axis)  # type: ignore[no-any-return, no-untyped-call]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.sum(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: TensorAxis) -> Tensor:
        return axis.sum(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_XE: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.gather(values_XE, values_XE.dim() - 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][..., ctx.axis.part(grads[0].shape[-1])].contiguous(), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_XE: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return values_XE[..., axis.part(values_XE.shape[-1])].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.gather(grads[0], grads[0].dim() - 1), None
