# SPDX-License-Identifier: Apache-2.0
"""Handles Ctrl-C and SIGTERM: the first one saves and stops the run, the second ends it at once."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from podium.runs.supervised import SUPERVISION

STOPPING = "\nstopping after this step and saving; press Ctrl-C again to end at once"


class StopRequest:
    """Whether the stop file is there, or was: a stop stays one when the file is removed with its run folder."""

    def __init__(self, stop_file: Path) -> None:
        self._stop_file, self._was_there = stop_file, False

    def __call__(self) -> bool:
        self._was_there = self._was_there or self._stop_file.exists()
        return self._was_there


class InterruptHandler:
    """The first SIGINT or SIGTERM tells the ranks to save and stop. The second ends them."""

    def __init__(self, stop_file: Path | None) -> None:
        self._stop_file = stop_file
        self._asked = False
        self.ended = False
        self._others = set(multiprocessing.active_children())  # child processes of the caller, which are not ended here
        self._before: dict[int, Any] = {}
        self._on_end: Callable[[], object] = lambda: None

    def on_end(self, end: Callable[[], object]) -> None:
        """Registers how to end ranks that are not children of this process."""
        self._on_end = end

    def __enter__(self) -> InterruptHandler:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._end_ranks()

    def _end_ranks(self) -> None:
        for process in set(multiprocessing.active_children()) - self._others:
            process.kill()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        supervision = SUPERVISION.get()
        if supervision is not None:
            supervision.note_signal()
        if self._stop_file is not None and not self._asked:
            self._asked = True
            try:
                self._stop_file.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed the run folder
                self._stop_file.touch()
                print(STOPPING, flush=True)
            except OSError as error:
                reason = error.strerror or error
                print(f"\n{self._stop_file} cannot be written: {reason}. Press Ctrl-C again to end at once", flush=True)
        else:
            self.ended = True
            self._end_ranks()
            self._on_end()
