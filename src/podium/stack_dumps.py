# SPDX-License-Identifier: Apache-2.0
"""Stacks of a process that cannot answer, because a call holds Python's lock: a signal makes it write them into memory
that others of its user can read. Needs no tracing, and leaves no file."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import re
import signal
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

_NAME = "podium-stacks"
_SIGNAL = signal.SIGUSR2
_ANSWER_S, _LOOK_S = 1.0, 0.02
# Files in which a thread is that a debugger has stopped.
_DEBUGGER = re.compile(r'/(pdb|bdb)\.py"|/(pydevd|_pydevd_bundle|debugpy|IPython)[/.]')
# Code that hangs again and again must not fill the disk.
_MOST_BYTES = 16 * 2**20


def allow_dumps(name: str = "") -> None:
    """From now on this process writes the stacks of its threads when it gets the signal, whatever it is doing.
    `name`: how others know it. Only on Linux."""
    if not hasattr(os, "memfd_create"):
        return
    file = os.memfd_create(f"{_NAME}:{name}")  # stays open as long as the process
    faulthandler.register(_SIGNAL, file=file, all_threads=True)


def dumped_stacks(pid: int) -> str | None:
    """The stacks of a process of this machine that allows it, innermost call first; None if it does not, or is
    stopped. Blocks for up to a second."""
    with contextlib.suppress(OSError):
        found = _memory(pid)
        return None if found is None else _asked(pid, found[0])
    return None


def dumper_name(pid: int) -> str | None:
    """The name under which a process of this machine allows dumps."""
    with contextlib.suppress(OSError):
        found = _memory(pid)
        return None if found is None else found[1]
    return None


def append_stacks(file: Path, title: str, stacks: str) -> bool:
    """Adds stacks to a file of a run. False if it cannot be written, or has as many as a person can read."""
    time_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    try:
        with file.open("a", encoding="utf-8") as opened:
            if opened.tell() > _MOST_BYTES:
                return False
            opened.write(f"=== {time_text} {title}\n{stacks}\n")
    except OSError:
        return False
    return True


def innermost(dump: str) -> str | None:
    """The innermost call of a dump's main thread that is not in Python's own library."""
    return innermost_frame(frames_of_threads(dump)[-1])


def frames_of_threads(dump: str) -> list[list[str]]:
    """The frames of each thread of a dump, innermost first; the main thread comes last."""
    parts = re.split(r"(?:Current t|T)hread 0x", dump)
    return [[line.strip() for line in part.splitlines() if line.lstrip().startswith("File ")] for part in parts]


def innermost_frame(frames: Sequence[str]) -> str | None:
    """The innermost frame that is not in Python's own library."""
    library = f'File "{sysconfig.get_paths()["stdlib"]}/'
    outside = [each for each in frames if not each.startswith(library) or "/site-packages/" in each]
    return next(iter(outside or frames), None)


def is_debugged(frames: Sequence[str]) -> bool:
    """Whether a debugger has stopped a thread: Podium, or what it calls, has called the debugger. What has called
    Podium, for instance a notebook, does not count. `frames`: innermost first."""
    inside = itertools.takewhile(lambda frame: "/podium/" not in frame, frames)
    return any(_DEBUGGER.search(frame) for frame in inside)


def _memory(pid: int) -> tuple[Path, str] | None:
    """The file into which a process dumps, and the name of the process."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        _, known, name = os.readlink(link).partition(f"memfd:{_NAME}:")
        if known:
            return link, name.removesuffix(" (deleted)")
    return None


def _asked(pid: int, file: Path) -> str | None:
    before = file.stat().st_size
    os.kill(pid, _SIGNAL)
    deadline, size = time.monotonic() + _ANSWER_S, before
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        last, size = size, file.stat().st_size
        if size > before and size == last:
            break
    return file.read_bytes()[before:].decode(errors="replace") or None
