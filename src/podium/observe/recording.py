# SPDX-License-Identifier: Apache-2.0
"""A console that keeps what it shows in a log file."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from podium.disk import disk_fault
from podium.observe.console import Console, EvaluationView, PlainConsole, StepView

# What writing raises when nobody reads standard output any more: a pipe (`| head`), or a terminal that was closed.
_NO_READER = (errno.EPIPE, errno.EIO)
# What it raises when it goes to a file on a full disk. The stream keeps the text, and tries again with the next.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Bytes of text that wait for a disk.
_MOST_WAITING = 1 << 20


class LogFile:
    """Appends text to a file, which several processes may do. Keeps the text until it has a file."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._waiting = path, b""

    def open(self, path: Path) -> None:
        """From now on the text goes to this file, beginning with what was kept."""
        self._path = path.absolute()
        self.write("")

    def write(self, text: str) -> None:
        """Appends the text. What the disk does not take is kept for the next call, up to a limit: it may be full, and
        the folder of a run that failed before its first step is gone."""
        self._waiting += text.encode()
        if self._path is None or not self._waiting:
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                while self._waiting:
                    self._waiting = self._waiting[file.write(self._waiting) :]
        except OSError as error:
            if disk_fault(error) is None:
                raise
            self._waiting = self._waiting[-_MOST_WAITING:]

    def flush(self) -> None:
        """Does nothing: the file is closed after every write."""


class RecordedConsole(Console):
    """Shows everything on a console, and writes it as plain text to a log file as soon as it has one. A run does not
    end with the terminal or the pipe that shows it: only the log file is written from then on."""

    def __init__(self, console: Console, *, log_every: int) -> None:
        self._console, self._file = console, LogFile()
        self._log = PlainConsole(self._file, log_every=log_every)

    def record_in(self, file: Path) -> None:
        """Appends to this file, beginning with everything that was shown before."""
        self._file.open(file)

    def header(self, lines: Sequence[str]) -> None:
        """Shows and records the run's description."""
        self._show(lambda console: console.header(lines))
        self._log.header(lines)

    def step(self, view: StepView) -> None:
        """Shows a step, and records it if it is due."""
        self._show(lambda console: console.step(view))
        self._log.step(view)

    def doing(self, what: str | None) -> None:
        """Shows work other than a step, and records nothing."""
        self._show(lambda console: console.doing(what))

    def evaluation(self, view: EvaluationView) -> None:
        """Shows and records an evaluation."""
        self._show(lambda console: console.evaluation(view))
        self._log.evaluation(view)

    def note(self, text: str) -> None:
        """Shows and records a line."""
        self._show(lambda console: console.note(text))
        self._log.note(text)

    def warning(self, text: str) -> None:
        """Shows and records a warning."""
        self._show(lambda console: console.warning(text))
        self._log.warning(text)

    def close(self) -> None:
        """Releases the terminal."""
        self._show(lambda console: console.close())

    def _show(self, show: Callable[[Console], None]) -> None:
        with tolerate_no_reader(self._lose_console):
            show(self._console)

    def _lose_console(self) -> None:
        self._console = Console()
        self._log.note("nobody reads standard output any more: the rest is in this file only")


@contextlib.contextmanager
def tolerate_no_reader(on_lost: Callable[[], None]) -> Iterator[None]:
    """Around writing to standard output. If nobody reads it any more, it is discarded from then on."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            return
        if error.errno not in _NO_READER:
            raise
        with contextlib.suppress(OSError, ValueError):  # replaced by an object without a file, as in a notebook
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        on_lost()
