# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute the same data together: each group gets one shard, and its first rank answers for it."""

from __future__ import annotations

import pytest

from helpers.clusters import Opener, in_cluster, inline_then_ray, one_role
from helpers.roles import Counter, Request, ids
from podium.cluster import Cluster, MeshShape, Workers
from podium.data.trajectories import TrajectoryId, TrajectoryIds
from podium.errors import ClusterError, ResultError

PAIRS = one_role(Counter, (5,), slots=4, mesh=MeshShape(shard=4, same_data=2))
LEFT = TrajectoryIds.of([TrajectoryId(1, 1), TrajectoryId(0, 0), TrajectoryId(1, 0)])
RIGHT = TrajectoryIds.of([TrajectoryId(0, 1)])
SHARDS = [Request(ids=LEFT), Request(ids=RIGHT)]


@inline_then_ray
def test_each_group_gets_one_shard_and_answers_once(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        merged = await group.call_sharded(Counter.generate, SHARDS)
        assert [(result.rank, len(result.ids)) for result in merged.results] == [(0, 3), (2, 1)]
        assert merged.rows is not None
        # Trajectories 0.0, 0.1, 1.0 and 1.1, each once.
        assert merged.rows.read().tokens_T.tolist() == [0] * 1 + [1] * 4 + [100] * 8 + [101] * 11
        nothing = await group.call_sharded(Counter.generate, [Request(ids=ids(range(0)))] * 2)
        assert nothing.rows is not None
        assert len(nothing.rows) == 0

    in_cluster(open_cluster, PAIRS, body)


@inline_then_ray
def test_there_is_a_shard_for_each_group_and_what_is_lost_is_missed(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        with pytest.raises(ClusterError, match=r"2 groups of 2 ranks \(shard 4 \(2 on the same data\)\).*4 shards"):
            await group.call_sharded(Counter.generate, [*SHARDS, *SHARDS])
        with pytest.raises(ResultError, match="missing"):
            await group.call_sharded(Counter.lose_one, SHARDS)
        with pytest.raises(ResultError, match="given to several ranks"):
            await group.call_sharded(Counter.generate, [SHARDS[0], SHARDS[0]])

    in_cluster(open_cluster, PAIRS, body)
