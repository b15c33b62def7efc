# SPDX-License-Identifier: Apache-2.0
"""A rank forms the process groups that it belongs to, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from podium.dry_run.fake_ranks import fake_mesh
from podium.recipe.policy_mesh import MeshSizes

# Sizes, a rank, and the ranks of the groups that it needs.
CASES: tuple[tuple[MeshSizes, int, list[range]], ...] = (
    (MeshSizes(shard=1024), 700, []),
    (MeshSizes(shard=128, tensor=8), 700, [range(4, 1024, 8), range(696, 704)]),
    (
        MeshSizes(replicate=4, shard=32, tensor=8),
        700,
        [range(516, 772, 8), range(188, 1024, 256), range(696, 704)],
    ),
    (MeshSizes(shard=256, context=4), 700, [range(700, 704)]),
    (
        MeshSizes(shard=64, context=2, tensor=8, experts=16),
        700,
        # context; shard × context; tensor; the ranks with the same experts; those with all; those of one tensor part
        [
            range(692, 708, 8),
            range(4, 1024, 8),
            range(696, 704),
            range(60, 1024, 128),
            range(640, 768),
            range(644, 768, 8),
        ],
    ),
)


@pytest.mark.parametrize(("sizes", "rank", "wanted"), CASES, ids=[str(sizes) for sizes, _, _ in CASES])
def test_one_of_1024_ranks_forms_its_own_groups_only(
    monkeypatch: pytest.MonkeyPatch, sizes: MeshSizes, rank: int, wanted: list[range]
) -> None:
    formed = list[Sequence[int]]()
    new_group = dist.new_group

    def noted(ranks: Sequence[int], **named: Any) -> Any:
        formed.append(ranks)
        return new_group(ranks, **named)

    monkeypatch.setattr(dist, "new_group", noted)
    with fake_mesh(rank, sizes) as mesh:
        assert sorted(formed) == sorted(list(each) for each in wanted)
        assert all(rank in each for each in formed)
        assert mesh.data_ranks == sizes.data_ranks
        if mesh.devices is not None and sizes.replicate > 1:
            assert mesh.devices.mesh.tolist() == [
                [part + at for at in range(4, 256, 8)] for part in range(0, 1024, 256)
            ]
