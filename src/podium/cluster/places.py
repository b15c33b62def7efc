# SPDX-License-Identifier: Apache-2.0
"""Where the bundles of one pool are: places that are reserved for its slots on nodes of the cluster."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from podium.cluster.deadlines import Deadline, now_s
from podium.cluster.layout import Pool
from podium.cluster.placement import Bundle, NodeState, bundles_of
from podium.cluster.transport import BundlePlace, Transport


class Places:
    """The reserved places of a pool. A slot keeps its place when its worker dies, for the next one."""

    def __init__(self, pool: Pool, transport: Transport) -> None:
        self._pool, self._transport = pool, transport
        self._places: list[BundlePlace] = []
        self._avoided: dict[str, float] = {}  # node -> until when

    @property
    def by_slot(self) -> dict[int, BundlePlace]:
        """The place of each slot that has one."""
        return {slot: place for place in self._places for slot in place.bundle.slots}

    def missing(self, nodes: Sequence[NodeState], used: Collection[int]) -> list[Bundle]:
        """Bundles without a place. Forgets places on nodes that are gone, and those on nodes that are being drained if
        no slot of them is `used`."""
        alive, draining = {node.id for node in nodes}, {node.id for node in nodes if node.is_draining}
        for place in list(self._places):
            is_used = any(slot in used for slot in place.bundle.slots)
            if place.node.id not in alive or (place.node.id in draining and not is_used):
                self._release(place)
        held = {place.bundle.slots for place in self._places}
        return [bundle for bundle in bundles_of(self._pool) if bundle.slots not in held]

    async def reserve(self, bundles: Sequence[Bundle], nodes: Sequence[NodeState], deadline: Deadline) -> None:
        """Reserves places for the bundles on these nodes."""
        self._places += await self._transport.reserve(bundles, nodes, deadline.left_s)

    def take_over(self, places: Sequence[BundlePlace]) -> None:
        """Takes places that another controller has reserved."""
        self._places += places

    def release(self) -> None:
        """Releases all places."""
        for place in list(self._places):
            self._release(place)

    def leave(self, slots: Collection[int]) -> None:
        """Releases the places of slots whose workers leave. Their nodes may go too, so they are avoided for the grace
        period."""
        for place in list(self._places):
            if any(slot in slots for slot in place.bundle.slots):
                self._avoided[place.node.id] = now_s() + (self._pool.grace_s or 0.0)
                self._release(place)

    @property
    def avoids_for_s(self) -> float | None:
        """Seconds until a node is not avoided any more; None: none is."""
        left_s = [until_s - now_s() for until_s in self._avoided.values()]
        return min((each for each in left_s if each > 0), default=None)

    def inviting(self, nodes: Sequence[NodeState]) -> list[NodeState]:
        """Nodes that are not avoided."""
        return [node for node in nodes if self._avoided.get(node.id, 0.0) <= now_s()]

    def _release(self, place: BundlePlace) -> None:
        self._transport.release(place)
        self._places.remove(place)
