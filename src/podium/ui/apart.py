# SPDX-License-Identifier: Apache-2.0
"""Long work in a process of its own, so that it does not slow down the answers of the server: Python runs one thread at
a time.

The processes are forked from a server of multiprocessing that has imported what they need: starting Python and
importing Podium would take longer than most of the work."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

_T = TypeVar("_T")
_ENDING_S = 2.0
_NICENESS = 10
_IMPORTED = ["podium.planning.findings", "podium.runs.showing", "podium.ui.rollout_index", "podium.ui.timelines"]


class Apart:
    """Starts processes that compute values. They end with `close`, or with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[multiprocessing.process.BaseProcess] = set()
        self._is_closed = False

    @staticmethod
    def prepare() -> None:
        """Starts the process that others are forked from, without waiting for it. The first of them is there sooner."""
        _context()
        multiprocessing.forkserver.ensure_running()

    def call(self, function: Callable[..., _T], *args: Any, most_s: float) -> _T | None:
        """The value of a function that is defined in a module; None if it failed, or took longer."""
        with contextlib.closing(self.each(_only, function, args, most_s=most_s)) as values:
            return next(values, None)

    def each(self, function: Callable[..., Iterable[_T]], *args: Any, most_s: float) -> Generator[_T, None, None]:
        """The values that such a function yields, as they come. They end where it fails, or all together take
        longer."""
        until_s = time.monotonic() + most_s
        context = _context()
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_compute, args=(sender, function, args), daemon=True)
        with self._lock:
            if self._is_closed:
                return
            process.start()
            self._running.add(process)
        sender.close()
        try:
            while receiver.poll(max(0.0, until_s - time.monotonic())):
                value: _T = receiver.recv()
                yield value
        except (EOFError, OSError):
            return
        finally:
            receiver.close()
            process.kill()
            process.join(_ENDING_S)
            with self._lock:
                self._running.discard(process)

    def close(self) -> None:
        """Ends what still computes."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def _only(function: Callable[..., _T], args: tuple[Any, ...]) -> Iterator[_T]:
    yield function(*args)


def _compute(sender: Connection, function: Callable[..., Iterable[Any]], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    os.nice(_NICENESS)
    try:
        for value in function(*args):
            sender.send(value)
    except Exception:  # the caller does without, and asks again later
        sender.close()
