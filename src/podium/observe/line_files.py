# SPDX-License-Identifier: Apache-2.0
"""Files of lines that a run appends to. A disk that is full, broken or gone costs no half line and ends no run."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from podium.disk import disk_fault

# Lines that wait in memory for a disk that can be written again; the oldest are lost first.
_MOST_WAITING = 100_000
_CHUNK = 1 << 20


class DiskReports(Protocol):
    """Is told which files cannot be written, and which can again."""

    def cannot_write(self, path: Path, fault: str) -> None:
        """A file cannot be written now; called again at every try."""

    def writes_again(self, path: Path, num_lost: int) -> None:
        """A file is complete again, but for `num_lost` lines."""


class LineFile:
    """Appends lines to one file, and opens it with the first. Every line has been flushed when `append` returns, or
    waits in memory for the next call: the file never has half a line. A file that somebody removed is written again
    from its beginning."""

    def __init__(self, path: Path, reports: DiskReports | None = None) -> None:
        """Without `reports`, a fault of the disk is raised as the OSError that it is."""
        self._path, self._reports = path, reports
        self._handle: int | None = None
        self._end = 0  # of the last whole line
        self._waiting: deque[bytes] = deque()
        self._num_lost = 0
        self._is_failing = False

    def open(self) -> None:
        """Opens the file now, and removes half a line that a killed process left at its end."""
        self._opened()

    @property
    def num_waiting(self) -> int:
        """Lines that are not in the file yet."""
        return len(self._waiting)

    def append(self, lines: Sequence[str]) -> None:
        """Writes lines, each with its line break, after those that wait."""
        self._waiting.extend(line.encode() for line in lines)
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._num_lost += 1
        self.write_waiting()

    def write_waiting(self) -> None:
        """Writes the lines that wait, if the disk allows it now."""
        if not self._waiting and not self._is_failing:
            return
        try:
            self._write()
        except OSError as error:
            fault = disk_fault(error)
            if fault is None or self._reports is None:
                self._waiting.clear()
                raise
            self._is_failing = True
            self._reports.cannot_write(self._path, fault)
        else:
            if self._is_failing and self._reports is not None:
                self._reports.writes_again(self._path, self._num_lost)
            self._is_failing, self._num_lost = False, 0

    def restore(self) -> None:
        """Writes a file that somebody removed again, as far as that is possible now."""
        if self._handle is not None and not self._is_in_place(self._handle):
            self._is_failing = True
            self.write_waiting()

    def close(self) -> None:
        """Tries once more to write what waits, and closes the file."""
        try:
            self.write_waiting()
        finally:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    def _write(self) -> None:
        handle = self._opened()
        content = b"".join(self._waiting)
        try:
            _write_all(handle, content)
        except OSError:
            with contextlib.suppress(OSError):  # otherwise the next call removes the half line
                os.ftruncate(handle, self._end)
            raise
        self._end += len(content)
        self._waiting.clear()

    def _opened(self) -> int:
        """The open file, which ends with a whole line."""
        before = self._handle
        if before is None or not self._is_in_place(before):
            handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if before is not None:
                    self._copy_lines(before, handle)
                end = _end_of_lines(handle)
            except OSError:
                os.close(handle)
                raise
            if before is not None:
                os.close(before)
            self._handle, self._end = handle, end
        assert self._handle is not None
        if os.fstat(self._handle).st_size != self._end:
            os.ftruncate(self._handle, self._end)
        return self._handle

    def _copy_lines(self, before: int, handle: int) -> None:
        """Copies the lines of a removed file, which lives as long as it is open, to the new one if that is empty."""
        if os.fstat(handle).st_size:
            return
        try:
            for start in range(0, self._end, _CHUNK):
                _write_all(handle, os.pread(before, min(_CHUNK, self._end - start), start))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, 0)
            raise

    def _is_in_place(self, handle: int) -> bool:
        try:
            found, held = os.stat(self._path), os.fstat(handle)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def _end_of_lines(handle: int) -> int:
    """Where the last whole line ends: a killed process may have left a part of one after it."""
    size = os.fstat(handle).st_size
    position = size
    while position > 0:
        start = max(0, position - _CHUNK)
        found = os.pread(handle, position - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0
