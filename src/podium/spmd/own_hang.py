# SPDX-License-Identifier: Apache-2.0
"""Watches the single rank of a run that has no other process: a hang raises an error where it hangs. Torch-free."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from podium.cluster.helper_stacks import stacks_of_helpers
from podium.errors import LaunchError
from podium.progress import advanced_s
from podium.spmd.rank_processes import LOOK_S, Stalls, place_of
from podium.stack_dumps import append_stacks, frames_of_threads, is_debugged


@contextmanager
def raising_if_hung(limit_s: float, stacks_file: Path | None, note: Callable[[str], object]) -> Iterator[None]:
    """Inside, the main thread must mark progress every `limit_s`, or gets an error where it is: a signal interrupts
    locks and endless loops of Python, though no call that never returns to Python. `note` gets a line about it. A
    thread that a debugger has stopped is left alone, and so is any other thread than the main one. A handler of the
    caller's for SIGUSR1 still gets the signals that others send."""
    if math.isinf(limit_s) or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch(threading.get_ident(), limit_s, stacks_file, note)
    before = watch.handler_before = signal.signal(signal.SIGUSR1, watch.raise_error)
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
        self.handler_before: Any = None
        self._cause = ""

    def run(self) -> None:
        """Looks until the run ends, and reports each time that the limit is reached."""
        stalls, reported_s = Stalls(), 0.0
        while not self.ended.wait(LOOK_S):
            mark_s = advanced_s(self._thread)
            stalled_s = stalls.look(self._thread, mark_s)
            reported_s = reported_s if stalled_s else 0.0
            if stalled_s - reported_s >= self._limit_s:
                reported_s = stalled_s
                self._report(mark_s)

    def raise_error(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler: runs in the main thread, where it hangs."""
        cause, self._cause = self._cause, ""
        if cause and not self.ended.is_set():
            raise LaunchError(cause)
        if not cause and callable(self.handler_before):
            self.handler_before(number, frame)

    def _report(self, mark_s: float | None) -> None:
        """Unless a debugger has stopped the thread, or it goes on after its last mark."""
        dump = _own_stacks()
        if is_debugged(frames_of_threads(dump)[-1]):
            return
        texts = [f"{name}\n{text}" for name, text in stacks_of_helpers(os.getpid())]
        if advanced_s(self._thread) != mark_s:
            return
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
