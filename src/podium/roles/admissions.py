# SPDX-License-Identifier: Apache-2.0
"""Knows the episodes that a stream was given and that have not ended, and says when the stream is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from podium.data.trajectories import TrajectoryId
from podium.errors import RolloutError


class Admissions:
    """Control threads call `add` and `finish`; the work thread calls the others. Episodes may come before their stream
    begins. When it has ended, the next one may come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ids: set[TrajectoryId] = set()
        self._is_finished = False
        self._idle_s = 0.0

    @property
    def idle_s(self) -> float:
        """Seconds in which a stream was open and had no episodes."""
        return self._idle_s

    @property
    def open_ids(self) -> tuple[TrajectoryId, ...]:
        """Episodes that have not ended."""
        with self._changed:
            return tuple(self._ids)

    @property
    def is_idle(self) -> bool:
        """Whether there is no episode, and some may come."""
        with self._changed:
            return not self._ids and not self._is_finished

    @property
    def is_over(self) -> bool:
        """Whether no episode is left and none can come."""
        with self._changed:
            return self._is_finished and not self._ids

    def add(self, ids: Iterable[TrajectoryId]) -> None:
        """Notes episodes before they begin."""
        with self._changed:
            if self._is_finished:
                raise RolloutError("prompts were admitted to a stream that was finished.")
            self._ids.update(ids)
            self._changed.notify_all()

    def end(self, ids: Iterable[TrajectoryId]) -> None:
        """Notes episodes that have ended, or did not begin after all."""
        with self._changed:
            self._ids.difference_update(ids)

    def finish(self) -> None:
        """No more episodes come for this stream."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def reset(self) -> None:
        """The stream has ended."""
        with self._changed:
            self._ids, self._is_finished = set(), False

    def wait_for_work(self, wait_s: float) -> bool:
        """Waits briefly if there is no work. Returns False when the stream is over."""
        with self._changed:
            if not self._ids and not self._is_finished:
                began = time.monotonic()
                self._changed.wait(wait_s)
                self._idle_s += time.monotonic() - began
            return not self._is_finished or bool(self._ids)
