# SPDX-License-Identifier: Apache-2.0
"""Finds nodes for the bundles of pools, and waits for room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from podium.cluster.blocking import in_thread
from podium.cluster.deadlines import Deadline
from podium.cluster.placement import Fits, TooLarge, message, preflight
from podium.cluster.transport import Transport
from podium.errors import PlacementError

if TYPE_CHECKING:
    from podium.cluster.member import Timeouts
    from podium.cluster.worker_pool import WorkerPool

_LOOK_AGAIN_S = 0.25


async def place_pools(
    worker_pools: Sequence[WorkerPool],
    transport: Transport,
    placing: asyncio.Lock,
    timeouts: Timeouts,
    deadline: Deadline,
    *,
    grows: bool,
) -> None:
    """Finds a node for every bundle of these pools that has none, all in one decision, and reserves them. Waits for
    resources that others hold and, if the cluster may grow, for missing ones."""
    limit = deadline.at_most(timeouts.place_s)
    while True:
        async with placing:  # one decision at a time: each must see the reservations of the one before
            nodes = await in_thread(transport.nodes)
            missing = [worker_pool.unplaced(nodes) for worker_pool in worker_pools]
            outcome = preflight([bundle for bundles in missing for bundle in bundles], nodes)
            if isinstance(outcome, Fits):
                chosen = iter(outcome.nodes)
                for worker_pool, bundles in zip(worker_pools, missing, strict=True):
                    await worker_pool.reserve(bundles, [next(chosen) for _ in bundles], limit)
                return
        if isinstance(outcome, TooLarge) and not grows:
            raise PlacementError(outcome.reason)
        if limit.over:
            raise PlacementError(f"{message(outcome)}\nWaited {limit.seconds:.0f} s for room.")
        await asyncio.sleep(_LOOK_AGAIN_S)


async def place_vacant(
    worker_pool: WorkerPool, transport: Transport, placing: asyncio.Lock, deadline: Deadline
) -> tuple[int, ...]:
    """Finds nodes for vacant slots, for as many as there is room now, and reserves them. Returns all vacant slots that
    have a place and no worker. Does not wait for room."""
    async with placing:
        nodes = await in_thread(transport.nodes)
        placed, bundles, inviting = worker_pool.vacant_bundles(nodes)
        while bundles:
            outcome = preflight(bundles, inviting)
            if isinstance(outcome, Fits):
                await worker_pool.reserve(bundles, outcome.nodes, deadline)
                break
            bundles.pop()
    return tuple(sorted([*placed, *(slot for bundle in bundles for slot in bundle.slots)]))
