# SPDX-License-Identifier: Apache-2.0
"""What every process of a run did when: spans, appended to files of bounded size in the run folder.

A line has spans of one process: {"worker": "rank 0", "spans": [["compute", 1.7e9, 0.25], ...]}, each with its name, its
begin in seconds since 1970 and its length in seconds. A span inside another has both names: "update > forward"."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from podium.disk import disk_fault
from podium.observe.line_files import DiskReports, LineFile
from podium.observe.timing import Stopwatch

# Bytes of one file. A full one becomes the earlier one, and the earlier one before it is lost.
_MOST_BYTES = 32 << 20
# Spans wait in memory so that short steps do not write a line each.
_WRITE_EVERY_S = 1.0
_MOST_WAITING = 5_000
# Lines that wait for a disk. Later spans are lost: the time of a run is worth less than its memory.
_MOST_LINES = 1_000
CONTROLLER = "controller"
_WORKER = re.compile(r"(.+)\[(\d+)\]@.*#(\d+)")
_RANK = re.compile(r"rank (\d+)")


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """An interval of the time of one process, in seconds since 1970. Names of outer spans come first."""

    worker: str
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TimelineWorker:
    """What the name of a worker in a timeline says."""

    kind: str  # its pool, `ranks`, or `controller`
    slot: int
    incarnation: int  # 0: it is there from the start; a replacement has the next one

    @classmethod
    def of(cls, name: str) -> TimelineWorker:
        """`train[0]@node/cpu#1`, `rank 0` or `controller`."""
        if (worker := _WORKER.fullmatch(name)) is not None:
            return cls(worker[1], int(worker[2]), int(worker[3]))
        if (rank := _RANK.fullmatch(name)) is not None:
            return cls("ranks", int(rank[1]), 0)
        return cls(name, 0, 0)


def rank_name(rank: int) -> str:
    """The name of a rank of an SPMD program."""
    return f"rank {rank}"


def timeline_file(run: Path, rank: int = 0) -> Path:
    """The file that the controller, or a rank of an SPMD program, appends to."""
    return run / ("timeline.jsonl" if rank == 0 else f"timeline-{rank}.jsonl")


def earlier_file(path: Path) -> Path:
    """Where a full file is kept."""
    return path.with_suffix(".earlier.jsonl")


def spans_of(worker: str, watch: Stopwatch) -> list[TimelineSpan]:
    """What a stopwatch has measured since the last call."""
    return [TimelineSpan(worker, span.name, span.begin_s, span.end_s) for span in watch.take_spans()]


class TimelineFile:
    """Appends spans to one file. A resumed run appends: a step that was repeated took its time twice."""

    def __init__(
        self, path: Path, reports: DiskReports | None = None,
        *, most_bytes: int = _MOST_BYTES, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._path, self._reports, self._most_bytes, self._clock = path, reports, most_bytes, clock
        self._file = LineFile(path, reports)
        self._num_bytes = path.stat().st_size if path.exists() else 0
        self._waiting: dict[str, list[tuple[str, float, float]]] = {}
        self._num_waiting, self._written_s = 0, clock()

    def append(self, spans: Iterable[TimelineSpan]) -> None:
        """Takes spans that have ended, and writes them within about a second, with those of later calls."""
        for span in spans:
            times = (span.name, round(span.begin_s, 6), round(span.end_s - span.begin_s, 6))
            self._waiting.setdefault(span.worker, []).append(times)
            self._num_waiting += 1
        if self._num_waiting >= _MOST_WAITING or self._clock() - self._written_s >= _WRITE_EVERY_S:
            self.write_waiting()

    def write_waiting(self) -> None:
        """Writes all spans that wait."""
        lines = [
            json.dumps({"worker": worker, "spans": spans}, separators=(",", ":"), ensure_ascii=False) + "\n"
            for worker, spans in self._waiting.items()
        ]
        self._waiting, self._num_waiting, self._written_s = {}, 0, self._clock()
        self._file.append(lines if self._file.num_waiting < _MOST_LINES else [])
        self._num_bytes += sum(len(line.encode()) for line in lines)
        if self._num_bytes > self._most_bytes and not self._file.num_waiting:
            self._begin_another()

    def restore(self) -> None:
        """Writes a file that somebody removed again."""
        self._file.restore()

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        self.write_waiting()
        self._file.close()

    def _begin_another(self) -> None:
        """A disk that does not allow it is asked again after the next spans."""
        self._file.close()
        self._file = LineFile(self._path, self._reports)
        try:
            self._path.replace(earlier_file(self._path))
        except OSError as error:
            if disk_fault(error) is None:
                raise
            return
        self._num_bytes = 0


def read_timeline(run: Path, *, most_bytes: int | None = None) -> Iterator[TimelineSpan]:
    """All spans that the files of a run have, in the order in which each file was written, or those in the last bytes
    of the newest files. A line that a full disk or a killed process has cut is left out."""
    newer = [timeline_file(run), *sorted(path for path in run.glob("timeline-*.jsonl") if path.suffixes == [".jsonl"])]
    for path in newer:
        for file in (earlier_file(path), path) if most_bytes is None else (path,):
            if file.is_file():
                yield from _spans(file, file.stat().st_size if most_bytes is None else most_bytes)


def _spans(file: Path, most_bytes: int) -> Iterator[TimelineSpan]:
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - most_bytes))
        for line in lines:
            try:
                found = json.loads(line)
                worker = str(found["worker"])
                spans = [
                    TimelineSpan(worker, str(name), float(begin_s), float(begin_s) + float(length_s))
                    for name, begin_s, length_s in found["spans"]
                ]
            except (ValueError, TypeError, KeyError):
                continue
            yield from spans
