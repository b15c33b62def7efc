# SPDX-License-Identifier: Apache-2.0
"""Runs of `ray_scenarios.py` as processes, for tests that kill or stop some of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers.on_policy import session_of
from helpers.processes import wait_until

SCRIPT = Path(__file__).parents[1] / "cluster" / "ray_scenarios.py"
HEARTBEAT_S = 3.0
# How long a controller may take to notice that Ray is dead.
GUARD_S = 30.0
# From the signal to the end of the command: the time that stopping Ray may take, and this machine's load.
ENDED_S = 40.0


@contextmanager
def scenario(moment: str, folder: Path, *preload: str) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own; nothing of the session is left afterwards."""
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), moment, str(folder), str(HEARTBEAT_S), *preload],
            stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        left = session_of(process.pid)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(20)


def commands_of(process: subprocess.Popen[bytes]) -> dict[int, bytes]:
    """Of the living processes of its session."""
    found = {}
    for pid in session_of(process.pid):
        with suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


def rays(process: subprocess.Popen[bytes], name: str) -> int:
    """The scenario's gcs_server or raylet."""
    (pid,) = [pid for pid, command in commands_of(process).items() if command.split(b"\0")[0].endswith(name.encode())]
    return pid


def end_of(process: subprocess.Popen[bytes], folder: Path, *, within_s: float) -> str:
    """How the scenario ended; its session is empty then."""
    began = time.monotonic()
    assert process.wait(within_s) == 0, (folder / "output").read_text()
    lines = (folder / "output").read_text().splitlines()
    assert not [line for line in lines if "state-dump" in line or "(raylet)" in line], lines
    wait_until(lambda: not session_of(process.pid), f"the end of {commands_of(process)}", deadline_s=10)
    assert time.monotonic() - began < within_s
    ended: str = json.loads(lines[-1])["ended"]
    return ended


def kill_at_age(pids: Callable[[], list[int]], which: int, age_s: float, *, deadline_s: float = 60.0) -> None:
    """Kills the process that is number `which` to appear among `pids()`, when it is so old."""
    born_s: dict[int, float] = {}
    limit_s = time.monotonic() + deadline_s
    while len(born_s) <= which:  # without a pause: each millisecond counts
        assert time.monotonic() < limit_s, f"only {len(born_s)} processes appeared within {deadline_s:.0f} s"
        for pid in pids():
            born_s.setdefault(pid, time.monotonic())
    victim = list(born_s)[which]
    while time.monotonic() - born_s[victim] < age_s:
        time.sleep(0.01)
    os.kill(victim, signal.SIGKILL)
