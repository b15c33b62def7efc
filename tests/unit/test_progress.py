# SPDX-License-Identifier: Apache-2.0
"""A thread's work has stalled since its last mark of progress, unless it waits with a deadline of its own."""

from __future__ import annotations

import threading

import pytest

from podium import progress
from podium.progress import mark_progress, stalled_s, waiting_at_most


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "_advanced_s", {})
    return clock


ME = threading.get_ident()


def test_a_thread_has_stalled_since_its_last_mark(clock: Clock) -> None:
    mark_progress()
    clock.now_s += 7
    assert stalled_s(ME) == 7
    mark_progress()
    assert stalled_s(ME) == 0


def test_a_thread_that_never_marked_anything_has_not_stalled(clock: Clock) -> None:
    clock.now_s += 1000
    assert stalled_s(ME) == 0


def test_a_wait_with_a_deadline_counts_only_from_there(clock: Clock) -> None:
    mark_progress()
    with waiting_at_most(30):
        clock.now_s += 29
        assert stalled_s(ME) == 0
        clock.now_s += 5
        assert stalled_s(ME) == 4
    assert stalled_s(ME) == 0


def test_a_mark_inside_a_wait_does_not_shorten_it(clock: Clock) -> None:
    with waiting_at_most(30):
        clock.now_s += 10
        mark_progress()
        clock.now_s += 15
        assert stalled_s(ME) == 0


def test_a_wait_inside_a_wait_does_not_shorten_it(clock: Clock) -> None:
    with waiting_at_most(30):
        with waiting_at_most(5):
            clock.now_s += 4
        clock.now_s += 20
        assert stalled_s(ME) == 0
