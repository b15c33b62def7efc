# SPDX-License-Identifier: Apache-2.0
"""Four ranks over gloo form only the groups that they belong to, for one mesh after another, and these carry data."""

from __future__ import annotations

from functools import partial

import pytest

from helpers.group_ranks import groups_rank
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import launch

pytestmark = pytest.mark.slow
SHAPES = (
    MeshSizes(shard=2, tensor=2),
    MeshSizes(replicate=2, tensor=2),
    MeshSizes(shard=2, context=2, experts=2),
    MeshSizes(shard=2, tensor=2),  # the ranks of the first mesh again, in groups of their own
    MeshSizes(context=4),
)


@pytest.mark.parametrize("beside", [(), (0, 1, 2)], ids=["alike", "some have another group"])
def test_four_ranks_form_their_own_groups_for_one_mesh_after_another(beside: tuple[int, ...]) -> None:
    found = launch(partial(groups_rank, beside=beside), (SHAPES,), ranks=4, restarts=0, stop_file=None)
    for sizes, of_ranks in zip(SHAPES, found, strict=True):
        for rank, formed in enumerate(of_ranks):
            for members, total in formed:
                assert rank in members, sizes
                assert total == sum(2**each for each in members), sizes
    assert [[members for members, _ in formed] for formed in found[0]] == [
        [[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]
    ]  # fmt: skip
    assert found[3] == found[0]
    assert [[members for members, _ in formed] for formed in found[4]] == [[[0, 1, 2, 3]]] * 4
