# SPDX-License-Identifier: Apache-2.0
"""Turns are taken in the order of asking."""

from __future__ import annotations

import threading

from podium.rollout.fair_lock import FairLock
from rollout.judge import in_background

DEADLINE_S = 20.0


def test_a_busy_loop_lets_a_waiting_thread_in_after_its_present_turn() -> None:
    lock, requested, order = FairLock(), threading.Event(), []

    def other() -> None:
        requested.set()
        with lock:
            order.append("other")

    with lock:
        waiting = in_background(other)
        assert requested.wait(DEADLINE_S)
        while len(lock._line) < 2:  # until it stands in line, which no event tells
            pass
        order.append("first")
    with lock:
        order.append("second")
    waiting.result(DEADLINE_S)
    assert order == ["first", "other", "second"]


def test_only_one_at_a_time_is_inside() -> None:
    lock, inside, most = FairLock(), [0], [0]

    def work() -> None:
        for _ in range(200):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    for each in [in_background(work) for _ in range(4)]:
        each.result(DEADLINE_S)
    assert most == [1]
    assert lock.taken == 800


def test_a_turn_is_given_up_when_its_work_raises() -> None:
    lock = FairLock()
    try:
        with lock:
            raise KeyError("x")
    except KeyError:
        pass
    with lock:
        pass


def test_a_turn_that_is_over_before_the_wait_begins_is_not_missed() -> None:
    lock = FairLock()
    with lock:
        seen = lock.taken + 1
    with lock:
        pass
    lock.wait_for_another(seen, timeout_s=DEADLINE_S)  # returns at once, or the test's own timeout ends it
    waiting = in_background(lambda: lock.wait_for_another(lock.taken, timeout_s=0.01))
    waiting.result(DEADLINE_S)
