# SPDX-License-Identifier: Apache-2.0
"""Nodes of a simulated cluster that come and go. Each has room for the same number of generators."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import assert_never

from podium.cluster.placement import NodeState
from podium.cluster.simulated_faults import GENERATOR_SLOT, NodeFault, SimulatedDrain, SimulatedJoin, SimulatedNodeLoss


class SimulatedNodes:
    """Living nodes by number. One that joins in place of a lost one has its number and another id."""

    def __init__(self, count: int, end_workers: Callable[[str], None], *, slots: int = 1) -> None:
        """`end_workers` ends the workers of a node with this id. `slots`: of each node."""
        self._end_workers, self._num_joined, self._slots = end_workers, 0, slots
        self._ids: dict[int, str] = {}
        self._draining: set[str] = set()
        self._taken: Counter[str] = Counter()  # node -> slots that are reserved
        self._changed = asyncio.Event()
        self._next = count
        for number in range(count):
            self._join(number)

    def states(self) -> tuple[NodeState, ...]:
        """The living nodes."""
        return tuple(
            NodeState(
                id=id, name=id, total=_room(self._slots), free=_room(self._slots - self._taken[id]),
                is_draining=id in self._draining,
            )
            for _, id in sorted(self._ids.items())
        )  # fmt: skip

    def lives(self, id: str) -> bool:
        """Whether a node is there."""
        return id in self._ids.values()

    async def changed(self) -> None:
        """Waits for the next change, or returns at once if there was one since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def take(self, ids: Iterable[str]) -> None:
        """Their slots are reserved."""
        self._taken.update(ids)

    def give_back(self, id: str) -> None:
        """One of its slots is free."""
        if self._taken[id]:
            self._taken[id] -= 1
            self._changed.set()

    def inject(self, fault: NodeFault) -> None:
        """Lets a fault happen to a node, if it is there."""
        later = asyncio.get_running_loop().call_later
        match fault:
            case SimulatedNodeLoss() if fault.node in self._ids:
                self._lose(fault.node, self._ids[fault.node])
                later(fault.seconds, self._join, fault.node)
            case SimulatedDrain() if fault.node in self._ids:
                self._draining.add(self._ids[fault.node])
                later(fault.grace_s, self._lose, fault.node, self._ids[fault.node])
                later(fault.grace_s + fault.seconds, self._join, fault.node)
            case SimulatedJoin():
                self._join(self._next)
                self._next += 1
            case SimulatedNodeLoss() | SimulatedDrain():
                pass
            case other:
                assert_never(other)
        self._changed.set()

    def _lose(self, number: int, id: str) -> None:
        if self._ids.get(number) == id:
            del self._ids[number]
            self._end_workers(id)
            self._changed.set()

    def _join(self, number: int) -> None:
        if number not in self._ids:
            self._num_joined += 1
            self._ids[number] = f"node-{number}.{self._num_joined}"
            self._changed.set()


def _room(slots: int) -> dict[str, float]:
    return {"CPU": 0.9 * slots, GENERATOR_SLOT: float(slots)}
