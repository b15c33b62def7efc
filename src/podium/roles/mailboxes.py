# SPDX-License-Identifier: Apache-2.0
"""Answers of an engine waiting to be fetched by the episode runners that asked for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from podium.data.trajectories import TrajectoryId
from podium.errors import RolloutError
from podium.rollout.requests import Completion


class Mailboxes:
    """One box for each runner. `deliver` is called by the thread that generates, `fetch` by control threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owners: dict[TrajectoryId, str] = {}
        self._boxes: dict[str, list[Completion]] = {}
        self._closing = False
        self._failure: BaseException | None = None

    def open(self) -> None:
        """Empties all boxes and accepts requests from now on."""
        with self._changed:
            self._closing, self._failure = False, None
            self._owners.clear()
            self._boxes.clear()

    def close(self) -> None:
        """No more requests will come: who waits for work stops waiting."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def expect(self, runner: str, ids: Sequence[TrajectoryId]) -> None:
        """Answers to these go to this runner."""
        with self._changed:
            self._owners.update(dict.fromkeys(ids, runner))
            self._changed.notify_all()

    def withdraw(self, ids: Sequence[TrajectoryId]) -> None:
        """These were not asked for after all."""
        with self._changed:
            for id in ids:
                self._owners.pop(id, None)
            self._changed.notify_all()

    def of(self, runner: str) -> list[TrajectoryId]:
        """What this runner still waits for."""
        with self._changed:
            return [id for id, owner in self._owners.items() if owner == runner]

    def fail(self, error: BaseException) -> None:
        """Nothing more is answered: a caller that fetches gets this error."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def deliver(self, answer: Completion) -> None:
        """Puts an answer into the box of the runner that asked for it."""
        with self._changed:
            self._boxes.setdefault(self._owners.pop(answer.id), []).append(answer)
            self._changed.notify_all()

    def fetch(self, runner: str, wait_s: float) -> list[Completion]:
        """What there is for this runner; waits a little where there is nothing yet."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while not self._boxes.get(runner):
                if self._failure is not None:
                    raise RolloutError(f"the generator has failed while it served: {self._failure}")
                left = deadline - time.monotonic()
                if left <= 0 or self._closing:
                    return []
                self._changed.wait(left)
            return self._boxes.pop(runner)

    def wait_for_work(self, wait_s: float) -> bool:
        """False when the boxes are closed and nothing is expected any more."""
        with self._changed:
            if not self._owners and not self._closing:
                self._changed.wait(wait_s)
            return bool(self._owners) or not self._closing
