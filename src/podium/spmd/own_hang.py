# SPDX-License-Identifier: Apache-2.0
"""Watches the single rank of a run that has no other process: a hang raises an error where it hangs. Torch-free."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from podium.cluster.processes import descendants
from podium.errors import LaunchError
from podium.progress import advanced_s
from podium.spmd.rank_processes import LOOK_S, Stalls, place_of
from podium.stack_dumps import append_stacks, dumped_stacks, dumper_name

# Where a person looks at a process that is stopped in a debugger.
_DEBUGGERS = ("pdb", "bdb", "pydevd", "debugpy", "IPython")


@contextmanager
def raising_if_hung(limit_s: float, stacks_file: Path | None, note: Callable[[str], object]) -> Iterator[None]:
    """Inside, the main thread must mark progress every `limit_s`, or gets an error where it is: a signal interrupts
    locks and endless loops of Python, though no call that never returns to Python. `note` gets a line about it. A
    process in a debugger is left alone, and so is any other thread than the main one."""
    if math.isinf(limit_s) or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch(threading.get_ident(), limit_s, stacks_file, note)
    before = signal.signal(signal.SIGUSR1, watch.raise_error)
    watching = threading.Thread(target=watch.run, name="hang-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        watch.ended.set()
        watching.join()
        signal.signal(signal.SIGUSR1, before)


class _Watch:
    """Looks at the marks of one thread, from another one."""

    def __init__(self, thread: int, limit_s: float, stacks_file: Path | None, note: Callable[[str], object]) -> None:
        self._thread, self._limit_s, self._stacks_file, self._note = thread, limit_s, stacks_file, note
        self.ended = threading.Event()
        self._cause = ""

    def run(self) -> None:
        """Looks until the run ends, and reports each time that the limit is reached."""
        stalls, reported_s = Stalls(), 0.0
        while not self.ended.wait(LOOK_S):
            stalled_s = stalls.look(self._thread, advanced_s(self._thread))
            reported_s = reported_s if stalled_s else 0.0
            if stalled_s - reported_s >= self._limit_s and not self._is_debugged():
                reported_s = stalled_s
                self._report()

    def raise_error(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler: runs in the main thread, where it hangs."""
        if self._cause and not self.ended.is_set():
            cause, self._cause = self._cause, ""
            raise LaunchError(cause)

    def _is_debugged(self) -> bool:
        frame = sys._current_frames().get(self._thread)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS:
                return True
            frame = frame.f_back
        return False

    def _report(self) -> None:
        dump = _own_stacks()
        helpers = [(dumper_name(pid), dumped_stacks(pid)) for pid in descendants([os.getpid()])]
        texts = [f"{name}\n{text}" for name, text in helpers if name is not None]
        place = place_of(dump)
        cause = f"no progress for {self._limit_s:g} s (placement.timeout_s)" + (f", at {place}" if place else "")
        if self._stacks_file is not None:
            append_stacks(self._stacks_file, f"the run hangs: {cause}", "\n".join([dump, *texts]))
            cause += f". The stacks of all threads are in {self._stacks_file}"
        self._note(f"{cause}. The run ends")
        self._cause = f"The run hangs: {cause}."
        signal.pthread_kill(self._thread, signal.SIGUSR1)


def _own_stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
