# SPDX-License-Identifier: Apache-2.0
"""Long work in a process of its own, so that it does not slow down the answers of the server: Python runs one thread at
a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

_T = TypeVar("_T")
_ENDING_S = 2.0
_NICENESS = 10


class Apart:
    """Starts processes that compute one value each. They end with `close`, or with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[multiprocessing.process.BaseProcess] = set()
        self._is_closed = False

    def call(self, function: Callable[..., _T], *args: Any, most_s: float) -> _T | None:
        """The value of a function that is defined in a module; None if it failed, or took longer."""
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_compute, args=(sender, function, args), daemon=True)
        with self._lock:
            if self._is_closed:
                return None
            process.start()
            self._running.add(process)
        sender.close()
        try:
            if not receiver.poll(most_s):
                return None
            value: _T | None = receiver.recv()
            return value
        except (EOFError, OSError):
            return None
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


def _compute(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    os.nice(_NICENESS)
    try:
        value = function(*args)
    except Exception:  # the caller does without, and asks again later
        value = None
    sender.send(value)
