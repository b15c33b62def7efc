# SPDX-License-Identifier: Apache-2.0
"""Podium as a process of its own: started, watched, stopped, and nothing left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

DEADLINE_S = 120.0


def wait_until(happened: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> None:
    """Returns as soon as it has happened; fails with `what` after the deadline."""
    end = time.monotonic() + deadline_s
    while not happened():
        assert time.monotonic() < end, f"{what} did not happen within {deadline_s:.0f} s"
        time.sleep(0.01)


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # pid (name) state parent group ...: the name may hold anything, what follows it may not.
                state, _, its_group = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:3]
                if int(its_group) == group and state != "Z":
                    found.append(int(entry.name))
    return found


@contextmanager
def started(arguments: Sequence[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`python ARGUMENTS` in a process group of its own, its words in `output`; the whole group is gone afterwards."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_hears_interrupts,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)


def _hears_interrupts() -> None:
    """What a shell runs in the background ignores Ctrl-C, and so do its children; these tests must not depend on it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def assert_gone(group: int) -> None:
    wait_until(lambda: not members(group), f"the end of all processes of group {group}", deadline_s=20)


def finished(arguments: Sequence[str], output: Path, *, deadline_s: float = DEADLINE_S) -> str:
    """Runs to its end with exit code 0; returns what it said."""
    with started(arguments, output) as process:
        code = process.wait(deadline_s)
        assert code == 0, output.read_text()
        assert_gone(process.pid)
    return output.read_text()


def descendants(root: int) -> dict[int, str]:
    """Living processes below one, by id, with the names that they have given themselves."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    name = entry.joinpath("cmdline").read_bytes().split(b"\0")[0]
                    parents[int(entry.name)] = int(parent)  # last: it may end between two reads
                    names[int(entry.name)] = name.decode(errors="replace")
    found: dict[int, str] = {}
    edge = {root}
    while edge:
        edge = {process for process, parent in parents.items() if parent in edge}
        found |= {process: names[process] for process in edge}
    return found


def ray_workers() -> list[int]:
    """Living processes of Podium's actor class that Ray runs for this process."""
    return [process for process, name in descendants(os.getpid()).items() if name.startswith("ray::Worker")]


def user_processes() -> list[int]:
    """Living processes of user code that this process started; none where there is no /proc."""
    found = []
    for thread in Path(f"/proc/{os.getpid()}/task").glob("*"):
        with suppress(OSError):
            for process in thread.joinpath("children").read_text().split():
                with suppress(OSError):  # the command line of one that has ended is empty
                    if b"podium.environments.user_main" in Path(f"/proc/{process}/cmdline").read_bytes():
                        found.append(int(process))
    return found


def spawned_children(launcher: int | None = None) -> list[int]:
    """Living ranks that this process, or another one, started; in the order in which it did."""
    launcher = os.getpid() if launcher is None else launcher
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
                command = entry.joinpath("cmdline").read_bytes()
                if int(parent) == launcher and state != "Z" and b"spawn_main" in command:
                    found.append(int(entry.name))
    return sorted(found)


def outside_listeners_of(root: int) -> set[str]:
    """Listening TCP sockets of a process and those below it whose address is not loopback. (Those of the whole
    machine are not only ours.)"""
    ours = set()
    for process in (root, *descendants(root)):
        for entry in Path(f"/proc/{process}/fd").glob("*"):
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.startswith("socket:["):
                ours.add(target[len("socket:[") : -1])
    found = set()
    loopback = ("0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F")
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in ours and not fields[1].startswith(loopback):
                found.add(fields[1])
    return found
