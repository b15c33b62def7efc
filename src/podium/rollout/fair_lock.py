# SPDX-License-Identifier: Apache-2.0
"""A lock that serves callers in the order of their requests, so that a loop of steps lets callers in between two
steps."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """`with turns:` waits in a queue. A thread that takes the lock repeatedly joins the end of the queue each time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()  # the first one holds the lock
        self._taken = 0

    def __enter__(self) -> None:
        me = object()
        with self._changed:
            self._line.append(me)
            try:
                self._changed.wait_for(lambda: self._line[0] is me)
            except BaseException:  # an interrupt: later callers must not wait for this one
                self._line.remove(me)
                self._changed.notify_all()
                raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._line.popleft()
            self._taken += 1
            self._changed.notify_all()

    @property
    def taken(self) -> int:
        """Number of finished turns. A turn in progress does not count."""
        with self._changed:
            return self._taken

    def wait_for_another(self, taken: int, *, timeout_s: float) -> None:
        """Waits, without holding the lock, until more than `taken` turns are over. Every caller of the engine unblocks
        this."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken > taken, timeout=timeout_s)
