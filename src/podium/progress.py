# SPDX-License-Identifier: Apache-2.0
"""Marks of progress: work that may take hours marks every advance, so that a watcher can tell slow from stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_advanced_s: dict[int, float] = {}  # thread -> when it advanced last; in the future while it waits with a deadline


def mark_progress() -> None:
    """The work of this thread has advanced: a micro-batch, a token, a bucket of weights."""
    thread, now_s = threading.get_ident(), time.monotonic()
    _advanced_s[thread] = max(now_s, _advanced_s.get(thread, now_s))


@contextmanager
def waiting_at_most(seconds: float) -> Iterator[None]:
    """What is inside has a deadline of its own: no progress is expected from this thread until then."""
    thread = threading.get_ident()
    before_s = _advanced_s.get(thread, 0.0)
    _advanced_s[thread] = max(before_s, time.monotonic() + seconds)
    try:
        yield
    finally:
        now_s = time.monotonic()
        _advanced_s[thread] = max(before_s, now_s)


def stalled_s(thread: int) -> float:
    """Seconds since a thread advanced last; 0 if it never marked anything, or waits with a deadline."""
    now_s = time.monotonic()
    return max(0.0, now_s - _advanced_s.get(thread, now_s))
