# SPDX-License-Identifier: Apache-2.0
"""When a stream has work, and when it is over."""

from __future__ import annotations

import threading

import pytest

from podium.data.trajectories import TrajectoryId
from podium.errors import RolloutError
from podium.roles.admissions import Admissions

ONE, TWO = TrajectoryId(0, 0), TrajectoryId(0, 1)


def test_a_stream_is_over_when_it_is_finished_and_nothing_is_open() -> None:
    admissions = Admissions()
    assert admissions.wait_for_work(0.0)  # more may come
    assert admissions.is_idle
    admissions.add([ONE, TWO])
    assert not admissions.is_idle
    admissions.finish()
    assert admissions.wait_for_work(0.0)
    admissions.end([ONE])
    assert admissions.open_ids == (TWO,)
    assert admissions.wait_for_work(0.0)
    admissions.end([TWO])
    assert not admissions.wait_for_work(0.0)


def test_nothing_is_admitted_to_a_stream_that_is_finished_until_it_has_ended() -> None:
    admissions = Admissions()
    admissions.finish()
    assert admissions.is_over
    with pytest.raises(RolloutError):
        admissions.add([ONE])
    admissions.reset()
    admissions.add([ONE])
    assert admissions.open_ids == (ONE,)
    assert not admissions.is_over


@pytest.mark.timeout(30)
def test_who_waits_for_work_is_woken_by_it() -> None:
    admissions = Admissions()
    threading.Timer(0.05, lambda: admissions.add([ONE])).start()
    assert admissions.wait_for_work(60.0)
    admissions.end([ONE])
    threading.Timer(0.05, admissions.finish).start()
    assert not admissions.wait_for_work(60.0)
