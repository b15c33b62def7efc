# SPDX-License-Identifier: Apache-2.0
"""Ranks that each hold some of the experts of a mixture, and the exchange that takes tokens to them and back."""

# G ranks of the group · C experts of a rank · N, M tokens that a rank sends and gets · X any dimensions

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from podium.models.tensor_axis import TensorAxis


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertAxis(TensorAxis):
    """This rank's place among the ranks that hold all experts between them. They compute different tokens."""

    def counts(self, sent_GC: Tensor, num_sent: int) -> tuple[Tensor, list[int], list[int]]:
        """Given how many tokens this rank sends to each expert, and at most to all: how many it gets for each of its
        own from each rank, and both summed up by rank."""
        got_GC = torch.empty_like(sent_GC)
        dist.all_to_all_single(got_GC, sent_GC, group=self.group)
        return got_GC, *self.by_rank(sent_GC, got_GC, num_sent)

    def by_rank(self, sent_GC: Tensor, got_GC: Tensor, num_sent: int) -> tuple[list[int], list[int]]:
        """How many tokens this rank sends to each rank, and how many it gets. The host waits for these numbers."""
        sent, got = torch.stack([sent_GC.sum(1), got_GC.sum(1)]).tolist()
        assert sum(sent) <= num_sent
        return sent, got

    def exchange(self, values_NX: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        """Sends the first `sent[0]` values to rank 0 and so on, and has `got[0]` from rank 0 and so on [M, X]."""
        values_NX = values_NX.contiguous()
        received_MX = values_NX.new_empty((sum(got), *values_NX.shape[1:]))
        dist.all_to_all_single(received_MX, values_NX, list(got), list(sent), group=self.group)
        return received_MX


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertGroups:
    """The ranks that hold all experts between them. Of `holders`, those of `tensor` compute the same tokens, and each
    takes the ones of its own experts; those of `exchange` compute different ones, and send them to each other."""

    holders: TensorAxis
    exchange: ExpertAxis | None = None
    tensor: TensorAxis | None = None

    def __post_init__(self) -> None:
        sizes = [1 if axis is None else axis.size for axis in (self.exchange, self.tensor)]
        assert sizes[0] * sizes[1] == self.holders.size

    @property
    def num_tensor(self) -> int:
        """How many ranks compute the same tokens."""
        return 1 if self.tensor is None else self.tensor.size

    @property
    def num_exchange(self) -> int:
        """How many ranks send tokens to each other."""
        return 1 if self.exchange is None else self.exchange.size


def exchange_over_experts(values_NX: Tensor, sent: Sequence[int], got: Sequence[int], axis: ExpertAxis) -> Tensor:
    """`ExpertAxis.exchange`, differentiable: gradients go back the way that values came."""
    return _Exchange.apply(values_NX, sent, got, axis)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_NX: Tensor, sent: Sequence[int], got: Sequence[int], axis: ExpertAxis) -> Tensor:
        ctx.sent, ctx.got, ctx.axis = sent, got, axis
        return axis.exchange(values_NX, sent, got)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.exchange(grads[0], ctx.got, ctx.sent), None, None, None
