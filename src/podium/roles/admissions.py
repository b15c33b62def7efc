# SPDX-License-Identifier: Apache-2.0
"""Knows the episodes that a stream was given and that have not ended, and says when the stream is over."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from podium.data.trajectories import TrajectoryId
from podium.errors import RolloutError


class Admissions:
    """Control threads call `add` and `finish`; the work thread calls `wait_for_work` and `end`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ids: set[TrajectoryId] = set()
        self._is_open = False

    @property
    def open_ids(self) -> tuple[TrajectoryId, ...]:
        """Episodes that have not ended."""
        with self._changed:
            return tuple(self._ids)

    def open(self) -> None:
        """Accepts episodes from now on."""
        with self._changed:
            self._ids, self._is_open = set(), True

    def add(self, ids: Iterable[TrajectoryId]) -> None:
        """Notes episodes before they begin."""
        with self._changed:
            if not self._is_open:
                raise RolloutError("prompts were admitted to a stream that is not open, or was finished.")
            self._ids.update(ids)
            self._changed.notify_all()

    def end(self, ids: Iterable[TrajectoryId]) -> None:
        """Notes episodes that have ended, or did not begin after all."""
        with self._changed:
            self._ids.difference_update(ids)

    def finish(self) -> None:
        """No more episodes come."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def wait_for_work(self, wait_s: float) -> bool:
        """Waits briefly if there is no work. Returns False when none is left and none can come."""
        with self._changed:
            if not self._ids and self._is_open:
                self._changed.wait(wait_s)
            return self._is_open or bool(self._ids)
