# SPDX-License-Identifier: Apache-2.0
"""Lets the roles that learn keep the newest steps in host memory, while they go on with the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from podium.cluster.deadlines import now_s
from podium.engine.snapshot_pace import SnapshotPace
from podium.errors import ClusterError, WorkerDiedError
from podium.roles.interfaces import NoSnapshot, SnapshotBegun
from podium.roles.state_handle import StateHandle


class Snapshots:
    """Snapshots of all roles that learn. Only the controller's single task uses it."""

    def __init__(self, states: Sequence[StateHandle], *, is_on: bool, note: Callable[[str], None]) -> None:
        """`note` is told once why there are none."""
        self._states, self._is_on, self._note = states, is_on, note
        self._taking: list[asyncio.Task[SnapshotBegun | NoSnapshot]] = []
        self._pace = SnapshotPace()

    async def is_due(self, step: int) -> bool:
        """Whether `begin` would begin one after this step."""
        await self.settle()
        return self._is_on and self._pace.is_due(step)

    async def begin(self, step: int, values: Mapping[str, Any]) -> None:
        """Begins a snapshot of the step that was just committed, unless snapshots would cost too much. The roles take
        it before their next call."""
        if await self.is_due(step):
            self._pace.begin(step, now_s())
            self._taking = [asyncio.create_task(state.snapshot(step, values)) for state in self._states]
            for task in self._taking:  # a run that is given up does not ask for the answers
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.sleep(0)  # each task has sent its calls then: they come before the next ones

    async def settle(self) -> None:
        """Waits until the roles have taken the last snapshot. The death of one is found by the next call to it."""
        taking, self._taking = self._taking, []
        answers = await asyncio.gather(*taking, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerDiedError):
                raise answer
        missing = next((answer for answer in answers if isinstance(answer, NoSnapshot)), None)
        if missing is not None and self._is_on:
            self._is_on = False
            self._note(
                f"no snapshots in memory: {missing.reason}. After a death the run goes back to its last checkpoint"
            )
        copies_s = [answer.copy_s for answer in answers if isinstance(answer, SnapshotBegun)]
        if copies_s:
            self._pace.copied(sum(copies_s))

    async def forget(self) -> None:
        """Removes all snapshots at the end of a run. A role that cannot, because it dies now, leaves them to the next
        run on its node."""
        await self.settle()
        if self._is_on:
            with suppress(ClusterError):
                await asyncio.gather(*(state.forget_snapshots() for state in self._states))
