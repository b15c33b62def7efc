# SPDX-License-Identifier: Apache-2.0
"""Lines on a disk that is full, broken or gone: none is cut, none is lost, and the file says so once."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.disks import fill
from podium.observe import line_files
from podium.observe.console import Console
from podium.observe.line_files import LineFile
from podium.observe.metrics import MetricsFile, StepMetrics, read_metrics
from podium.observe.recording import LogFile
from podium.runs.disk_reports import ConsoleDiskReports


class HeardConsole(Console):
    """Remembers warnings and notes."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def console() -> HeardConsole:
    return HeardConsole()


class Disk:
    """Stands in for `os.write`: takes this many bytes more, then raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real, self.room, self.number = os.write, 1 << 30, errno.ENOSPC
        monkeypatch.setattr(line_files.os, "write", self.write)

    def write(self, handle: int, content: bytes) -> int:
        if self.room <= 0:
            raise OSError(self.number, os.strerror(self.number))
        written = self._real(handle, content[: self.room])
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("room", [0, 1, 4, 5, 7])
def test_a_line_that_does_not_fit_waits_and_is_written_whole(
    tmp_path: Path, disk: Disk, console: HeardConsole, room: int, number: int
) -> None:
    path = tmp_path / "lines"
    file = LineFile(path, ConsoleDiskReports(console))
    file.append(["one\n"])
    disk.room, disk.number = room, number
    for line in ("two\n", "three\n", "four\n"):
        file.append([line])
        content = path.read_text()
        assert content.startswith("one\n")
        assert content.endswith("\n")  # never a part of a line
    assert len(console.warnings) == 1
    assert str(path) in console.warnings[0]
    assert os.strerror(number) in console.warnings[0]
    assert console.notes == []

    disk.room = 1 << 30
    file.append(["five\n"])
    file.close()

    assert path.read_text() == "one\ntwo\nthree\nfour\nfive\n"
    assert len(console.notes) == 1
    assert "again" in console.notes[0]


def test_what_waits_is_written_when_the_file_is_closed(tmp_path: Path, disk: Disk, console: HeardConsole) -> None:
    file = LineFile(tmp_path / "lines", ConsoleDiskReports(console))
    disk.room = 0
    file.append(["one\n"])
    assert file.num_waiting == 1
    disk.room = 100
    file.close()
    assert (tmp_path / "lines").read_text() == "one\n"


def test_memory_is_bounded_and_the_loss_is_said(
    tmp_path: Path, disk: Disk, console: HeardConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_files, "_MOST_WAITING", 3)
    file = LineFile(tmp_path / "lines", ConsoleDiskReports(console))
    disk.room = 0
    for number in range(5):
        file.append([f"{number}\n"])
    disk.room = 100
    file.close()
    assert (tmp_path / "lines").read_text() == "2\n3\n4\n"
    assert "2 lines" in console.notes[0]


def test_without_a_console_the_fault_is_raised(tmp_path: Path, disk: Disk) -> None:
    file = LineFile(tmp_path / "lines")
    disk.room = 2
    with pytest.raises(OSError, match="No space"):
        file.append(["one\n"])
    assert (tmp_path / "lines").read_text() == ""
    file.close()


def test_half_a_line_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("one\ntw")
    file = LineFile(tmp_path / "lines")
    file.append(["three\n"])
    file.close()
    assert (tmp_path / "lines").read_text() == "one\nthree\n"


@pytest.mark.parametrize("remove", [Path.unlink, lambda path: shutil.rmtree(path.parent)])
def test_a_removed_file_is_written_again_from_its_beginning(
    tmp_path: Path, console: HeardConsole, remove: Callable[[Path], None]
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    with MetricsFile(path, ConsoleDiskReports(console)) as file:
        for step in (1, 2):
            file.append(StepMetrics(step=step, time_s=0.0, values={"loss": float(step)}))
        remove(path)
        file.append(StepMetrics(step=3, time_s=0.0, values={"loss": 3.0}))
        path.parent.mkdir(exist_ok=True)
        file.append(StepMetrics(step=4, time_s=0.0, values={"loss": 4.0}))

    assert [(each.step, each.values["loss"]) for each in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_the_console_log_continues_where_a_full_disk_stopped_it(small_disk: Path) -> None:
    log = LogFile(small_disk / "console.log")
    log.write("begin\n")
    filler = fill(small_disk)
    text = "".join(f"line {number}\n" for number in range(2000))
    log.write(text)
    filler.unlink()
    log.write("end\n")
    assert (small_disk / "console.log").read_text() == f"begin\n{text}end\n"
