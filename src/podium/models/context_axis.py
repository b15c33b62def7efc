# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute parts of the same tokens, and the ways in which values pass between them. The loss of such a
group is the sum of its ranks' losses, so each way back is the transpose: values from everyone go back to everyone."""

# N ranks · X any dimensions

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from podium.models.rank_axis import RankAxis, passed, reduce_scatter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextAxis(RankAxis):
    """This rank's place among the ranks that compute parts of the same tokens."""

    def gather(self, part_X: Tensor) -> Tensor:
        """The values of all ranks, of one shape on all of them -> [N, X]."""
        return self.stacked(part_X)

    def add_up(self, parts_NX: Tensor) -> Tensor:
        """The transpose of `gather`: the sum over all ranks of what each has for this one [X]."""
        parts_NX = parts_NX.contiguous()
        part_X = torch.empty_like(parts_NX[0])
        reduce_scatter(part_X.view(-1), parts_NX.view(-1), group=self.group)
        return part_X

    def swap(self, parts_NX: Tensor) -> Tensor:
        """Sends the n-th part to rank n, and has what each rank sends in its place. Its own transpose."""
        parts_NX = parts_NX.contiguous()
        received_NX = torch.empty_like(parts_NX)
        dist.all_to_all_single(received_NX, parts_NX, group=self.group)
        return received_NX

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[], None]:
        """Begins to send tensors to other ranks and to fill those that others send, by rank. The result waits for it;
        until then none of them may change. Ranks without any do nothing."""
        operations = [
            *(dist.P2POp(dist.isend, each, group=self.group, group_peer=peer) for peer, each in sends.items()),
            *(dist.P2POp(dist.irecv, each, group=self.group, group_peer=peer) for peer, each in receives.items()),
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()

        return wait


def swap_over_context(parts_NX: Tensor, axis: ContextAxis) -> Tensor:
    """`ContextAxis.swap`, differentiable."""
    return passed(parts_NX, axis.swap, axis.swap)


def gather_over_context(part_X: Tensor, axis: ContextAxis) -> Tensor:
    """`ContextAxis.gather`, differentiable: a rank's values have the gradients of all ranks that read them."""
    return passed(part_X, axis.gather, axis.add_up)
