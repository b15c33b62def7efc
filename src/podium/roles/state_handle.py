# SPDX-License-Identifier: Apache-2.0
"""The controller's handle of a role's state: its snapshots in host memory, and the way back to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.cluster import RoleGroup
from podium.roles.handles import PHASE_S
from podium.roles.interfaces import NoSnapshot, SnapshotBegun, Stateful, StateSource


class StateHandle:
    """The state of a role that learns."""

    def __init__(self, group: RoleGroup[Stateful]) -> None:
        group.requires(Stateful.snapshot, Stateful.snapshots, Stateful.restore, Stateful.forget_snapshots)
        self._group = group.within(PHASE_S, work_only=True)

    async def snapshot(self, step: int, values: Mapping[str, Any]) -> SnapshotBegun | NoSnapshot:
        """Begins a snapshot on all ranks. The slowest of them has copied the last one for `copy_s`."""
        answers = [answer.value for answer in await self._group.call_all(Stateful.snapshot, step, values)]
        missing = next((each for each in answers if isinstance(each, NoSnapshot)), None)
        begun = [each.copy_s for each in answers if isinstance(each, SnapshotBegun)]
        return missing or SnapshotBegun(copy_s=max(begun))

    async def snapshots(self) -> set[int]:
        """Steps of snapshots that are whole."""
        answers = await self._group.call_all(Stateful.snapshots)
        return set.intersection(*(set(answer.value) for answer in answers))

    async def restore(self, step: int, source: StateSource) -> Mapping[str, Any]:
        """Brings all ranks back to the state after this step. Returns the controller's values."""
        return (await self._group.call_all(Stateful.restore, step, source))[0].value

    async def forget_snapshots(self) -> None:
        """Removes all snapshots from the memory of the nodes: the run has ended."""
        await self._group.call_all(Stateful.forget_snapshots)
