# SPDX-License-Identifier: Apache-2.0
"""Deadlines, by a clock that the test sets."""

import pytest

from podium.cluster import deadlines
from podium.cluster.deadlines import Deadline


class Clock:
    now_s = 100.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(deadlines, "time", clock)
    return clock


def test_a_deadline_counts_down_and_stays_at_zero(clock):
    deadline = Deadline(10.0)
    assert (deadline.left_s, deadline.over) == (10.0, False)
    clock.now_s = 107.5
    assert (deadline.left_s, deadline.over) == (2.5, False)
    clock.now_s = 110.0
    assert (deadline.left_s, deadline.over) == (0.0, True)
    clock.now_s = 500.0
    assert (deadline.left_s, deadline.over) == (0.0, True)
    assert deadline.seconds == 10.0


def test_a_part_of_a_deadline_never_ends_after_it(clock):
    deadline = Deadline(10.0)
    clock.now_s = 104.0
    assert deadline.at_most(3.0).seconds == 3.0
    assert deadline.at_most(30.0).seconds == 6.0
    clock.now_s = 120.0
    assert deadline.at_most(3.0).over
