# SPDX-License-Identifier: Apache-2.0
"""Holds an engine's answers until the episode runners that requested them fetch them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from podium.data.trajectories import TrajectoryId
from podium.errors import RolloutError
from podium.rollout.requests import Completion


class Mailboxes:
    """One mailbox for each runner. The generating thread calls `deliver`, control threads call `fetch`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owners: dict[TrajectoryId, str] = {}
        self._boxes: dict[str, list[Completion]] = {}
        self._closing = True
        self._failure: BaseException | None = None
        self._idle_s = 0.0

    @property
    def idle_s(self) -> float:
        """Seconds in which the mailboxes were open and no answer was expected."""
        return self._idle_s

    @property
    def is_idle(self) -> bool:
        """Whether no answer is expected, and requests may come."""
        with self._changed:
            return not self._owners and not self._closing

    def open(self, keeps_answers: bool = False) -> None:
        """Accepts requests from now on. What nobody has fetched before is forgotten: a run that went back asks for the
        same episodes again, and must not get answers of other weights or turns. `keeps_answers`: the runners are the
        same as before, and still wait for it."""
        with self._changed:
            self._closing, self._failure = False, None
            self._owners.clear()
            if not keeps_answers:
                self._boxes.clear()

    def close(self) -> None:
        """Closes the mailboxes: no more requests will come. Threads that wait for work stop waiting."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Closes the mailboxes, and forgets what is in them."""
        with self._changed:
            self._closing, self._failure = True, None
            self._owners.clear()
            self._boxes.clear()
            self._changed.notify_all()

    def expect(self, runner: str, ids: Sequence[TrajectoryId]) -> bool:
        """Routes the answers of these requests to this runner. False: the mailboxes are closed."""
        with self._changed:
            if self._closing:
                return False
            self._owners.update(dict.fromkeys(ids, runner))
            self._changed.notify_all()
            return True

    @property
    def open_ids(self) -> tuple[TrajectoryId, ...]:
        """Requests without an answer."""
        with self._changed:
            return tuple(self._owners)

    def withdraw(self, ids: Sequence[TrajectoryId]) -> None:
        """Removes requests that were not submitted after all."""
        with self._changed:
            for id in ids:
                self._owners.pop(id, None)
            self._changed.notify_all()

    def of(self, runner: str) -> list[TrajectoryId]:
        """Requests that this runner still waits for."""
        with self._changed:
            return [id for id, owner in self._owners.items() if owner == runner]

    def fail(self, error: BaseException) -> None:
        """Fails all mailboxes: every `fetch` from now on raises this error."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def deliver(self, answer: Completion) -> None:
        """Puts an answer into the mailbox of the runner that requested it."""
        with self._changed:
            self._boxes.setdefault(self._owners.pop(answer.id), []).append(answer)
            self._changed.notify_all()

    def fetch(self, runner: str, wait_s: float) -> list[Completion]:
        """Returns the answers for this runner; waits briefly if there are none yet."""
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
        """Waits for work. Returns False when the mailboxes are closed and no answer is expected any more."""
        with self._changed:
            if not self._owners and not self._closing:
                began = time.monotonic()
                self._changed.wait(wait_s)
                self._idle_s += time.monotonic() - began
            return bool(self._owners) or not self._closing
