# SPDX-License-Identifier: Apache-2.0
"""When a worker without heartbeats counts as dead, by made-up looks at its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from helpers.processes import wait_until
from podium.cluster.processes import ProcessInfo, children, descendants, kill, look
from podium.cluster.silence import Silence


def seen(state: str, cpu_s: float) -> ProcessInfo:
    return ProcessInfo(pid=7, name="worker", state=state, started=1, cpu_s=cpu_s)


def slices_until_over(looks: list[ProcessInfo | None]) -> int | None:
    coming = iter(looks)
    silence = Silence(lambda: next(coming), warn_s=4.0, timeout_s=6.0)
    assert silence.slice_s == 2.0
    for number in range(1, len(looks) + 1):
        silence.look()
        if silence.is_over:
            return number
    return None


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([seen("T", 5.0)] * 4, 3),  # stopped
        ([None] * 4, 3),  # on another machine
        ([seen("S", 5.0)] * 4, 3),  # deadlocked
        ([seen("R", 2.0 * second) for second in range(20)], None),  # computes
        ([seen("R", 0.0), seen("R", 2.0), *[seen("S", 2.0)] * 4], 5),  # computed until the second look
        ([seen("R", 0.01 * number) for number in range(4)], 3),  # only its idle threads move
    ],
)
def test_a_silence_is_over_after_six_seconds_without_a_sign_of_life(
    looks: list[ProcessInfo | None], expected: int | None
) -> None:
    assert slices_until_over(looks) == expected


def test_one_that_computes_may_be_silent_for_as_long_as_a_call_may_not_advance() -> None:
    looks = iter([seen("R", 2.0 * second) for second in range(20)])
    silence = Silence(lambda: next(looks), warn_s=4.0, timeout_s=6.0, busy_s=20.0)
    slices = 0
    while not silence.is_over:
        silence.look()
        slices += 1
    assert slices == 10
    assert silence.cause == "no heartbeat for 20 s: busy in a call that holds Python's lock"


def test_a_silence_is_reported_once_for_every_warning_time() -> None:
    silence = Silence(lambda: seen("T", 0.0), warn_s=4.0, timeout_s=60.0)
    message = []
    for number in range(1, 7):
        silence.look()
        if silence.should_warn():
            message.append(number)
    assert message == [2, 4, 6]
    assert "process 7" in silence.guess
    assert "SIGSTOP" in silence.guess


def test_a_process_is_seen_alive_then_stopped_then_gone() -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE)
    try:
        assert process.pid in children(os.getpid())
        wait_until(lambda: len(descendants([process.pid])) == 1, "the start of its child", deadline_s=20)
        (grandchild,) = (look(pid) for pid in descendants([process.pid]))
        found = look(process.pid)
        assert found is not None
        assert found.is_alive
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: (now := look(process.pid)) is not None and now.is_stopped, "its stop", deadline_s=20)
        kill(ProcessInfo(pid=process.pid, name="", state="R", started=found.started + 1, cpu_s=0.0))
        assert process.poll() is None  # another process with that pid is not killed
        kill(found)
        assert process.wait(20) == -signal.SIGKILL
        assert grandchild is not None
        kill(grandchild)
    finally:
        process.kill()
        process.wait(20)
    assert look(process.pid) is None
