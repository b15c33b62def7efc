# SPDX-License-Identifier: Apache-2.0
"""Supervisors: two processes above the one that runs user code. They end what it leaves behind, and watch its memory.

    worker > outer supervisor > inner supervisor > user process > whatever user code starts

User code may leave processes behind: forks, subprocesses, daemons in a session of their own. A process group does not
hold them, and the user process may be killed before it can end them. On Linux a supervisor is a child subreaper, which
needs no root: orphans below it become its children, so it finds all of them. It kills everything below it when the
process below it ends, or the process above it. There are two because a supervisor can be killed too: by its worker,
whose last act under Ray is to kill its direct children, or by user code. The other one does the work then.

Elsewhere there is one supervisor, and it ends only the process group of user code.

This file is run before `import podium` and needs only the standard library: a process may fork safely only as long as
it has no threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn

_IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Between two measurements of memory. Code that fills memory as fast as it can gets some 0.2 GiB over the limit in it.
_MEASURE_S = 0.05
# A measurement reads a file for each thread: with very many, it is made less often, to take this share of a core.
_MOST_OF_A_CORE = 0.05
# For processes that even SIGKILL does not end at once, because they are in a call of a driver or of a file system.
_ENDING_S = 10.0
_OVER = struct.Struct("q")


def supervise(worker: int, *, close: Sequence[int], memory_bytes: int | None, file: int, over_at: int) -> None:
    """Forks the supervisors, and returns in the user process. The supervisors close the descriptors `close`.

    When user code has more than `memory_bytes`, the number is written to `file` at the offset `over_at`, and everything
    is ended."""
    # A parent that ignores SIGCHLD hands that down, and then nobody could wait for children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    parent = worker
    watches = (None, memory_bytes) if _IS_LINUX else (None,)
    for memory in watches:
        signal_with_end_of(parent, signal.SIGTERM)
        adopt_orphans()
        parent = os.getpid()
        if child := os.fork():
            try:
                for each in close:
                    os.close(each)
                _supervise(child, memory, file, over_at)
            finally:
                os._exit(1)
    os.setsid()  # signals to user code's group, and from a terminal, concern no supervisor
    signal_with_end_of(parent, signal.SIGKILL)
    _yield_resources()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _supervise(child: int, memory_bytes: int | None, file: int, over_at: int) -> NoReturn:
    """Waits for the end of the child, or of the parent (SIGTERM), or for too much memory. Then ends everything below,
    and itself in the way of the child."""
    code: int | None = None
    interval_s = None if memory_bytes is None else _MEASURE_S
    while code is None:
        news = _next_signal(interval_s)
        code, _ = reaped(child)
        if news == signal.SIGTERM:
            break
        if memory_bytes is not None:
            began_s = time.monotonic()
            held = bytes_over(memory_bytes, descendants(os.getpid()))
            if held is not None and code is None:
                os.pwrite(file, _OVER.pack(held), over_at)
                break
            interval_s = max(_MEASURE_S, (time.monotonic() - began_s) / _MOST_OF_A_CORE)
    end_all(child)
    end_like(-signal.SIGKILL if code is None else code)


def _next_signal(timeout_s: float | None) -> int | None:
    expected = {signal.SIGCHLD, signal.SIGTERM}
    if timeout_s is None or sys.platform == "darwin":
        return signal.sigwait(expected)
    news = signal.sigtimedwait(expected, timeout_s)
    return None if news is None else news.si_signo


def reaped(child: int) -> tuple[int | None, bool]:
    """The exit code of the child if it has ended, and whether any children are left. Orphans are waited for too."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code, False
        if not pid:
            return code, True
        if pid == child:
            code = os.waitstatus_to_exitcode(status)


def end_all(child: int) -> None:
    """Kills everything below, again and again until nothing is left: children of killed processes become children of
    this one, also those that were started meanwhile."""
    end_s = time.monotonic() + _ENDING_S
    while reaped(child)[1] and time.monotonic() < end_s:
        for pid in descendants(os.getpid()) if _IS_LINUX else (-child,):  # negative: its process group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def end_like(code: int) -> NoReturn:
    """Ends this process with an exit code, or (negative) by a signal, so that the worker sees what ended user code."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core of interest is not this one's
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os._exit(code if code >= 0 else 128 - code)


def signal_with_end_of(parent: int, number: signal.Signals) -> None:
    """The kernel signals this process when its parent dies, whatever this process does at the time."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(0)


def adopt_orphans() -> None:
    """Orphans below this process become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _yield_resources() -> None:
    """User code is the first to go when the machine's memory runs out, and its crashes write no core files."""
    # Suppressed: there is no /proc, or its value may not be changed.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _prctl(option: int, value: int) -> None:
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(option, value)


# --- processes and their memory ---


def descendants(root: int) -> list[int]:
    """Children of a process, their children and so on; empty where there is no /proc."""
    pids: list[int] = []
    edge = [root]
    while edge:
        edge = [child for pid in edge for child in _children(pid)]
        pids += edge
    return pids


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


def bytes_over(limit_bytes: int, pids: Collection[int]) -> int | None:
    """The memory of these processes together if it is more than the limit, else None.

    Counted is what only the end of the processes frees: anonymous and shared memory, and what of it is swapped out. No
    resource limit of the kernel (RLIMIT_AS, RLIMIT_DATA) measures that: these count address space, which threads, torch
    and CUDA reserve without using it, and they count for each process alone. Files that are mapped are not counted, the
    kernel takes their pages back when it needs them.

    Processes that were forked share pages, and the count of each has them all. So a sum above the limit is counted
    again exactly, with each page divided by its users, which takes longer."""
    if _total(pids, "status", ("RssAnon", "RssShmem", "VmSwap")) <= limit_bytes:
        return None
    held = _total(pids, "smaps_rollup", ("Pss_Anon", "Pss_Shmem", "SwapPss"))
    return held if held > limit_bytes else None


def _total(pids: Iterable[int], file: str, names: Sequence[str]) -> int:
    return sum(_kib_of(f"/proc/{pid}/{file}", names) for pid in pids) * 1024


def _kib_of(path: str, names: Sequence[str]) -> int:
    """The sum of these fields of a process; 0 if it has ended."""
    total = 0
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in names:
                total += int(value.split()[0])
    return total
