# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine as the kernel reports them: alive, stopped, busy. Without /proc nothing is reported.

Run as a script (standard library only, so that it starts fast) this is the guard of a process: see `guard`."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A snapshot of a process. The kernel reuses pids; pid and `started` together are unique."""

    pid: int
    name: str
    state: str  # the kernel's letter: R runs, S sleeps, D waits for a disk, T is stopped by a signal, Z is dead
    started: int  # in clock ticks since boot
    cpu_s: float

    @property
    def is_alive(self) -> bool:
        """Whether it is neither dead nor a zombie."""
        return self.state not in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal (SIGSTOP)."""
        return self.state == "T"


def look(pid: int) -> ProcessInfo | None:
    """A snapshot of the process; None if it does not exist."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # pid (name) state ...: the name may contain any character, the fields after it may not.
    name, _, rest = text.rpartition(")")
    fields = rest.split()
    return ProcessInfo(
        pid=pid,
        name=name.partition("(")[2],
        state=fields[0],
        started=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
    )


def command_of(pid: int) -> bytes:
    """Its command line, or the title that it has set; empty if there is no such process."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    """Living and dead children of all threads of a process. Reads a file for each thread."""
    try:
        threads = os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return []
    return [child for thread in threads for child in children_of_thread(pid, int(thread))]


def children_of_thread(pid: int, thread: int) -> list[int]:
    """Process ids of the children that one thread of a process started."""
    try:
        return [int(child) for child in (_PROC / str(pid) / "task" / str(thread) / "children").read_text().split()]
    except OSError:
        return []


def descendants(roots: Iterable[int]) -> list[int]:
    """Children, their children and so on; without the roots."""
    pids: list[int] = []
    edge = list(roots)
    while edge:
        edge = [child for pid in edge for child in children(pid) if child not in pids]
        pids += edge
    return pids


def kill(process: ProcessInfo, number: signal.Signals = signal.SIGKILL) -> None:
    """Sends SIGKILL, which also ends a stopped process. Never hits another process that has reused the pid."""
    now = look(process.pid)
    if now is not None and now.started == process.started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


# A signal takes effect later; a process in an uninterruptible call ends after that call.
_STOP_S = 1.0


def _stop(process: ProcessInfo) -> None:
    kill(process, signal.SIGSTOP)
    end_s = time.monotonic() + _STOP_S
    while (now := look(process.pid)) is not None and now.is_alive and not now.is_stopped and time.monotonic() < end_s:
        time.sleep(0.001)


def kill_trees(roots: Iterable[ProcessInfo]) -> None:
    """Kills processes and their descendants. Stops all of them first: a process killed while it starts another would
    leave that one behind."""
    tree = {each.pid: each for each in roots}
    edge = list(tree.values())
    while edge:
        for process in edge:
            _stop(process)
        below = [look(pid) for process in edge for pid in children(process.pid) if pid not in tree]
        edge = [each for each in below if each is not None]
        tree |= {each.pid: each for each in edge}
    for process in tree.values():
        kill(process)


# How long the guarded process may take to handle the death of a vital process.
_PATIENCE_S = 30.0


def guard() -> None:
    """Ends the processes of a family when the process that started them is gone. Also ends that process when it waits
    for a vital process that is dead: in a call that holds the GIL it cannot notice.

    Reads lines from that process: `family PID STARTED`, `vital PID STARTED NAME`, `folder PATH` (to be removed with the
    family), and finally `end`. Waits for the next line; the end of the pipe, or a vital process that has been dead for
    long, unblocks it. After the line `outlives` the family stays when the pipe ends, until the supervisor of that
    process has ended, of which the first argument is a pidfd."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guarded, family, dead_since_s = look(os.getppid()), set[tuple[int, int]](), 0.0
    vital: dict[tuple[int, int], str] = {}
    folders: list[str] = []
    pending, outlives = b"", False
    while True:
        if select.select([0], [], [], 0.5)[0]:
            read = os.read(0, 65536)
            if not read:
                if outlives:
                    select.select([int(sys.argv[1])], [], [])
                break
            *lines, pending = (pending + read).split(b"\n")
            for kind, _, rest in (os.fsdecode(line).partition(" ") for line in lines):
                if kind == "end":
                    return
                if kind == "outlives":
                    outlives = True
                    continue
                if kind == "folder":
                    folders.append(rest)
                    continue
                values = rest.split()
                key = int(values[0]), int(values[1])
                family.add(key)
                if kind == "vital":
                    vital[key] = values[2]
        dead = [f"{name} (process {key[0]})" for key, name in vital.items() if not _lives(key)]
        dead_since_s = (dead_since_s or time.monotonic()) if dead else 0.0
        if dead and guarded is not None and time.monotonic() - dead_since_s > _PATIENCE_S:
            print(f"error: Ray's {dead[0]} died while this process waited for it.", file=sys.stderr, flush=True)
            kill(guarded)
            break
    kill_trees(process for key in family if _lives(key) and (process := look(key[0])) is not None)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _lives(key: tuple[int, int]) -> bool:
    process = look(key[0])
    return process is not None and process.is_alive and process.started == key[1]


if __name__ == "__main__":
    guard()
