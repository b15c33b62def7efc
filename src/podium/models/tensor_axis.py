# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute one model together, each a part of every layer, and the four ways in which values pass between
them: each is the transpose of another, so that gradients are those of one device."""

# X any dimensions · E the divided one, which is the last

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from podium.models.rank_axis import RankAxis, passed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorAxis(RankAxis):
    """This rank's place among the ranks that compute on the same data."""

    def part(self, length: int) -> slice:
        """This rank's part of a dimension that the ranks divide evenly."""
        assert length % self.size == 0
        each = length // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

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
        return torch.cat(self.stacked(part).unbind(0), dim=dim)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def copy_to_axis(values: Tensor, axis: TensorAxis) -> Tensor:
    """Values that all ranks have, into layers of which each rank has a part. Backward: each rank has a part of their
    gradient, and these are added up."""
    return passed(values, lambda values: values.view_as(values), partial(_added, axis=axis))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def reduce_from_axis(values: Tensor, axis: TensorAxis) -> Tensor:
    """Values of which each rank has a summand. Backward: each summand has the gradient of the sum."""
    return passed(values, partial(_added, axis=axis), lambda grad: grad)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_from_axis(values_XE: Tensor, axis: TensorAxis) -> Tensor:
    """Values of which each rank has a part of the last dimension. Backward: each rank takes the gradient of its part,
    which all ranks have."""
    return passed(values_XE, partial(_joined, axis=axis), partial(_own_part, axis=axis))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def scatter_to_axis(values_XE: Tensor, axis: TensorAxis) -> Tensor:
    """This rank's part of the last dimension of values that all ranks have. Backward: the gradients of all parts."""
    return passed(values_XE, partial(_own_part, axis=axis), partial(_joined, axis=axis))


def _added(values: Tensor, axis: TensorAxis) -> Tensor:
    return axis.sum(values.clone(memory_format=torch.contiguous_format))


def _own_part(values_XE: Tensor, axis: TensorAxis) -> Tensor:
    return values_XE[..., axis.part(values_XE.shape[-1])].contiguous()


def _joined(values_XE: Tensor, axis: TensorAxis) -> Tensor:
    return axis.gather(values_XE, values_XE.dim() - 1)
