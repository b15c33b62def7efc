# SPDX-License-Identifier: Apache-2.0
"""Marks of progress: work that may take hours marks every advance, so that a watcher can tell slow from stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What waits for others (collectives, engines, runners) waits this much longer than a watcher, whose report comes first.
WATCH_SLACK_S = 30.0

_advanced_s: dict[int, float] = {}  # thread -> when it advanced last; in the future while it waits with a deadline
_publish: dict[int, Callable[[float], object]] = {}  # thread -> what gets its times


def mark_progress() -> None:
    """The work of this thread has advanced: a micro-batch, a token, a bucket of weights."""
    thread, now_s = threading.get_ident(), time.monotonic()
    _advance(thread, max(now_s, _advanced_s.get(thread, now_s)))


def mark_progress_of(other: int | None) -> None:
    """This thread waits for another one: what that advances counts as its own."""
    thread = threading.get_ident()
    if other in _advanced_s:
        _advance(thread, max(_advanced_s[other], _advanced_s.get(thread, 0.0)))


@contextmanager
def waiting_at_most(seconds: float) -> Iterator[None]:
    """What is inside has a deadline of its own: no progress is expected from this thread until then."""
    thread = threading.get_ident()
    before_s = _advanced_s.get(thread, 0.0)
    _advance(thread, max(before_s, time.monotonic() + seconds))
    try:
        yield
    finally:
        now_s = time.monotonic()
        _advance(thread, max(before_s, now_s))


def advanced_s(thread: int) -> float | None:
    """When a thread advanced last, or will at the end of a wait with a deadline; None if it never marked anything."""
    return _advanced_s.get(thread)


def stalled_s(thread: int) -> float:
    """Seconds since a thread advanced last; 0 if it never marked anything, or waits with a deadline."""
    now_s = time.monotonic()
    return max(0.0, now_s - _advanced_s.get(thread, now_s))


@contextmanager
def published(publish: Callable[[float], object]) -> Iterator[None]:
    """Inside, `publish` gets the time of every advance of this thread, on the monotonic clock, which all processes of a
    machine share: another process watches."""
    thread = threading.get_ident()
    _publish[thread] = publish
    try:
        yield
    finally:
        del _publish[thread]


def _advance(thread: int, at_s: float) -> None:
    _advanced_s[thread] = at_s
    publish = _publish.get(thread)
    if publish is not None:
        publish(at_s)
