# SPDX-License-Identifier: Apache-2.0
"""When a process that should become a worker counts as missing."""

from __future__ import annotations

import time

from podium.cluster.processes import ProcessInfo
from podium.cluster.ray_compat import may_be_worker
from podium.cluster.starting import MOST_AT_ONCE, StartingProcesses


def process(pid: int, started: int = 1) -> ProcessInfo:
    return ProcessInfo(pid=pid, name="python", state="S", started=started, cpu_s=0.0)


def is_missing(starting: StartingProcesses, pids: list[int], looks: int = 20) -> bool:
    """Whether one is found missing in so many looks at these processes."""
    began_s = time.monotonic()
    for _ in range(looks):
        starting.look([process(pid) for pid in pids])
    return starting.is_missing(began_s)


def test_as_many_processes_as_are_waited_for_are_enough() -> None:
    starting = StartingProcesses()
    starting.add("a")
    starting.add("b")
    assert not is_missing(starting, [7, 8])


def test_a_process_that_nobody_saw_alive_is_missed() -> None:
    starting = StartingProcesses()
    starting.add("a")
    starting.add("b")
    assert is_missing(starting, [7])


def test_ray_has_two_seconds_after_each_request() -> None:
    starting = StartingProcesses()
    starting.add("a")
    assert not is_missing(starting, [], looks=19)
    starting.add("b")
    assert not is_missing(starting, [], looks=19)
    assert is_missing(starting, [], looks=1)


def test_a_worker_that_is_up_is_no_process_for_another() -> None:
    starting = StartingProcesses()
    starting.add("a")
    starting.add("b")
    starting.discard("a", process(7))
    assert is_missing(starting, [7])
    assert not is_missing(starting, [7, 8])


def test_the_pid_of_a_worker_that_is_gone_may_be_used_again() -> None:
    starting = StartingProcesses()
    starting.add("a")
    starting.discard("a", process(7))
    starting.add("b")
    for _ in range(20):
        starting.look([process(7, started=2)])
    assert not starting.is_missing(0.0)


def test_the_end_of_a_process_that_nobody_needs_is_no_loss() -> None:
    """A pool was given up and started anew: the raylet ends its first processes some seconds later."""
    starting = StartingProcesses()
    starting.add("first")
    starting.discard("first")
    starting.add("second")
    assert not is_missing(starting, [7, 8])
    assert not is_missing(starting, [8])


def test_all_who_waited_hear_of_it_and_who_begins_later_does_not() -> None:
    """Two pools wait for three processes. The one that hears of it first starts anew before the other has heard."""
    starting = StartingProcesses()
    began_s = time.monotonic()
    for worker in ("a0", "a1", "b0"):
        starting.add(worker)
    assert is_missing(starting, [7, 8])
    starting.discard("a0")
    starting.discard("a1")
    assert starting.is_missing(began_s)
    assert not starting.is_missing(time.monotonic())


def test_what_the_raylet_starts_later_is_not_missed() -> None:
    starting = StartingProcesses()
    for worker in range(MOST_AT_ONCE + 10):
        starting.add(worker)
    assert not is_missing(starting, list(range(MOST_AT_ONCE)))


def test_servers_of_ray_are_no_workers() -> None:
    assert may_be_worker(b"/usr/bin/python\0/ray/default_worker.py\0--worker-id=1")
    assert may_be_worker(b"ray::IDLE\0")
    assert may_be_worker(b"ray::Worker.__init__\0")
    assert not may_be_worker(b"/usr/bin/python\0/ray/default_worker.py\0--worker-type=SPILL_WORKER")
    assert not may_be_worker(b"ray::IDLE_SpillWorker\0")
    assert not may_be_worker(b"ray::DashboardAgent\0")
