# SPDX-License-Identifier: Apache-2.0
"""What ranks do in tests of the groups of axes. Here, because a spawned process imports it by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from helpers.ranks import mesh_of
from podium.engine.mesh import with_axes
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import RankPlace

# Of each rank: the ranks of the groups that it formed, in order, and what sums over them give.
Formed = list[tuple[list[int], float]]


def groups_rank(place: RankPlace, shapes: tuple[MeshSizes, ...], *, beside: tuple[int, ...]) -> list[list[Formed]]:
    """The groups of each rank for each shape, one after the other over one default group. `beside`: ranks that have one
    more group from the beginning."""
    new_group = dist.new_group
    with mesh_of(place) as ranks:
        if beside:
            new_group(list(beside))
        of_all = []
        for sizes in shapes:
            formed = list[tuple[list[int], Any]]()

            def noted(members: Sequence[int], formed: list[tuple[list[int], Any]] = formed, **named: Any) -> Any:
                formed.append((list(members), new_group(members, **named)))
                return formed[-1][1]

            dist.new_group = noted
            with_axes(ranks, sizes, timeout_s=60)
            dist.new_group = new_group
            mine = [(members, group) for members, group in formed if group is not dist.GroupMember.NON_GROUP_MEMBER]
            assert bool(beside) or mine == formed, "without another group, a rank forms its own groups only"
            of_all.append(ranks.gather([(members, _sum_of_ranks(group)) for members, group in mine]))
        return of_all


def _sum_of_ranks(group: Any) -> float:
    number = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(number, group=group)
    return number.item()
