# SPDX-License-Identifier: Apache-2.0
"""Lets other threads in between two steps of the engine, and first: a busy loop would not leave them a gap."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Door:
    """One thread at a time. Whoever visits goes before the next step; the step in progress is waited for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: int | None = None  # the thread that is inside
        self._visitors = 0

    @contextmanager
    def visit(self) -> Iterator[None]:
        """For everything but steps. May be entered again by the thread that is inside."""
        me = threading.get_ident()
        if self._inside == me:
            yield
            return
        with self._changed:
            self._visitors += 1
            # A step ends by itself; it has no wait in it that this could outlive.
            self._changed.wait_for(lambda: self._inside is None)
            self._visitors -= 1
            self._inside = me
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def step(self) -> Iterator[None]:
        """For the thread that works."""
        with self._changed:
            self._changed.wait_for(lambda: self._inside is None and self._visitors == 0)
            self._inside = threading.get_ident()
        try:
            yield
        finally:
            self._leave()

    def wait_for_a_visit(self, timeout_s: float) -> None:
        """Returns when somebody has been here, or after the time."""
        with self._changed:
            self._changed.wait(timeout_s)

    def _leave(self) -> None:
        with self._changed:
            self._inside = None
            self._changed.notify_all()
