# SPDX-License-Identifier: Apache-2.0
"""What every process of a run did when: spans, appended to files of bounded size in the run folder.

A line has spans of one process: {"worker": "rank 0", "spans": [["compute", 1.7e9, 0.25], ...]}, each with its name, its
begin in seconds since 1970 and its length in seconds, and numbers about it, where it has some. A span inside another
has both names: "update > forward". Lines of another kind name the slowest episodes of a step."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.disk import disk_fault
from podium.observe.line_files import DiskReports, LineFile
from podium.observe.timing import JOINED, LENT, NESTED, PUBLISHED, RECALLED, VACATED, Stopwatch

# Bytes of one file. A full one becomes the earlier one, and the earlier one before it is lost.
_MOST_BYTES = 32 << 20
# Spans wait in memory so that short steps do not write a line each.
_WRITE_EVERY_S = 1.0
_MOST_WAITING = 5_000
# Lines that wait for a disk. Later spans are lost: the time of a run is worth less than its memory.
_MOST_LINES = 1_000
CONTROLLER = "controller"
STEPS, TAIL = "steps", "tail"
"""Inner spans of generators with summaries of engine steps. `tail`: at most half of the sequences are left, and none
waits."""
EPISODES = "episodes"
"""A number about a grader's batch."""
_WORKER = re.compile(r"(.+)\[(\d{1,18})\]@.*#(\d{1,18})")
_RANK = re.compile(r"rank (\d{1,18})")


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """An interval of the time of one process, in seconds since 1970. Names of outer spans come first."""

    worker: str
    name: str
    begin_s: float
    end_s: float
    values: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowEpisode:
    """One of the episodes of a step that ended last."""

    step: int
    group: int  # prompt index
    sample: int
    tokens: int  # that were sampled
    begin_s: float  # when it was sent to its worker
    end_s: float  # when it came back
    worker: str

    @property
    def seconds(self) -> float:
        """From the moment at which it was sent to its worker."""
        return self.end_s - self.begin_s

    def __str__(self) -> str:
        return f"group {self.group} sample {self.sample} ({self.tokens} tokens, {self.seconds:.1f} s on {self.worker})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSteps:
    """What an engine did in an interval of about a second."""

    worker: str
    begin_s: float
    end_s: float
    steps: int
    lanes: float  # sequences in a step, on average
    generated_tokens: int
    prefilled_tokens: int
    prefill_s: float  # in steps that prefill, which may decode too
    is_tail: bool  # few sequences were left, and none waited


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChange:
    """A worker has come to a vacant slot, or has left its slot vacant."""

    worker: str
    has_joined: bool  # else it has left


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
        self._waiting: dict[str, list[tuple[object, ...]]] = {}
        self._slowest: list[str] = []  # lines
        self._num_waiting, self._written_s = 0, clock()

    def append(self, spans: Iterable[TimelineSpan]) -> None:
        """Takes spans that have ended, and writes them within about a second, with those of later calls."""
        for span in spans:
            times = (span.name, round(span.begin_s, 6), round(span.end_s - span.begin_s, 6))
            values = () if span.values is None else ({name: _short(each) for name, each in span.values.items()},)
            self._waiting.setdefault(span.worker, []).append((*times, *values))
            self._num_waiting += 1
        if self._num_waiting >= _MOST_WAITING or self._clock() - self._written_s >= _WRITE_EVERY_S:
            self.write_waiting()

    def append_slowest(self, step: int, episodes: Sequence[SlowEpisode]) -> None:
        """Takes the slowest episodes of a step, and writes them with the next spans."""
        rows = [
            (each.group, each.sample, each.tokens, round(each.begin_s, 3), round(each.seconds, 3), each.worker)
            for each in episodes
        ]
        self._slowest.append(_line({"step": step, "slowest": rows}))
        self._num_waiting += 1

    def write_waiting(self) -> None:
        """Writes all spans that wait."""
        lines = [_line({"worker": worker, "spans": spans}) for worker, spans in self._waiting.items()] + self._slowest
        self._waiting, self._num_waiting, self._written_s, self._slowest = {}, 0, self._clock(), []
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


def _line(content: Mapping[str, object]) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n"


def _short(value: float) -> float:
    """Whole numbers without a fraction, others with few digits."""
    return int(value) if float(value).is_integer() else round(value, 6)


def read_timeline(run: Path, *, most_bytes: int | None = None) -> Iterator[TimelineSpan]:
    """All spans that the files of a run have, in the order in which each file was written, or those in the last bytes
    of the newest files. A line that a full disk or a killed process has cut is left out, and so is a span whose times
    are no numbers, or that ends before it begins: a clock was set back."""
    for found in _lines(run, most_bytes):
        yield from spans_in(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestSpans:
    """The newest part of the timeline of a run. `begin_s`: from when on every file is in it; None: it is all that the
    run has recorded."""

    spans: Sequence[TimelineSpan]
    begin_s: float | None

    @property
    def num_steps(self) -> int:
        """Updates of the controller or of rank 0 in it."""
        steps = {(CONTROLLER, "update"), (rank_name(0), "compute")}
        return sum((span.worker, span.name) in steps for span in self.spans)


def read_newest(run: Path, *, most_bytes: int) -> NewestSpans:
    """The spans in the last bytes of each file, and of a full one before it as far as these reach. Of a part, spans
    that ended before it has all files are left out."""
    begins_s: list[float] = []
    found: list[TimelineSpan] = []
    for path in timeline_files(run):
        sizes = {file: file.stat().st_size for file in (earlier_file(path), path) if file.is_file()}
        of_file: list[TimelineSpan] = []
        for file in sizes:
            room = most_bytes - (sizes.get(path, 0) if file != path else 0)
            if room > 0:
                of_file += (span for line in _lines_of(file, min(room, sizes[file])) for span in spans_in(line))
        if of_file and (len(sizes) > 1 or sum(sizes.values()) > most_bytes):  # what was before a full file is lost
            begins_s.append(min(span.begin_s for span in of_file))
        found += of_file
    if not begins_s:
        return NewestSpans(spans=found, begin_s=None)
    begin_s = max(begins_s)
    return NewestSpans(spans=[span for span in found if span.end_s > begin_s], begin_s=begin_s)


def spans_in(line: Mapping[str, Any]) -> list[TimelineSpan]:
    """The spans of one line, as `read_timeline` gives them; none of a line of another kind."""
    try:
        worker = str(line["worker"])
        spans = [
            TimelineSpan(worker, str(name), float(begin_s), float(begin_s) + float(length_s), _values(*values))
            for name, begin_s, length_s, *values in line["spans"]
        ]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return []
    return [span for span in spans if -math.inf < span.begin_s <= span.end_s < math.inf]


def read_slowest(run: Path, *, most_bytes: int | None = None) -> Iterator[SlowEpisode]:
    """The slowest episodes of every step of a controlled run, those that ended last first. A step that was repeated is
    there twice. `most_bytes`: as in `read_timeline`."""
    for found in _lines(run, most_bytes):
        try:
            step, rows = int(found["step"]), found["slowest"]
            episodes = [
                SlowEpisode(
                    step=step, group=int(group), sample=int(sample), tokens=int(tokens), begin_s=float(begin_s),
                    end_s=float(begin_s) + float(seconds), worker=str(worker),
                )
                for group, sample, tokens, begin_s, seconds, worker in rows
            ]  # fmt: skip
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
        yield from episodes


def engine_steps(spans: Iterable[TimelineSpan]) -> Iterator[EngineSteps]:
    """Summaries of the steps of engines, which the spans of generators carry."""
    for span in spans:
        values, name = span.values, span.name.rpartition(NESTED)[2]
        if values is not None and name in (STEPS, TAIL) and "steps" in values:
            yield EngineSteps(
                worker=span.worker, begin_s=span.begin_s, end_s=span.end_s, steps=int(values["steps"]),
                lanes=values.get("lanes", 0.0), generated_tokens=int(values.get("generated_tokens", 0)),
                prefilled_tokens=int(values.get("prefilled_tokens", 0)), prefill_s=values.get("prefill_s", 0.0),
                is_tail=name == TAIL,
            )  # fmt: skip


def is_mark(span: TimelineSpan) -> bool:
    """Whether a span marks a moment: weights were published, devices lent or recalled, or a slot has got a worker or
    lost it."""
    return span.name in (LENT, RECALLED) or published_version(span) is not None or slot_change(span) is not None


def slot_change(span: TimelineSpan) -> SlotChange | None:
    """The worker that a span marks as one that joined or left a vacant slot; None: it is another span."""
    for prefix in (JOINED, VACATED):
        if span.name.startswith(prefix):
            return SlotChange(worker=span.name.removeprefix(prefix), has_joined=prefix == JOINED)
    return None


def published_version(span: TimelineSpan) -> int | None:
    """The number of the version whose publish a span marks; None: it is another span."""
    number = span.name.removeprefix(PUBLISHED)
    return int(number) if number != span.name and number.isascii() and number.isdigit() else None


def _values(values: Mapping[str, float] | None = None) -> dict[str, float] | None:
    if values is None:
        return None
    return {name: value for name, each in values.items() if math.isfinite(value := float(each))}


def timeline_files(run: Path) -> list[Path]:
    """The files that the processes of a run append to, without full ones. The first may not be there yet."""
    return [timeline_file(run), *sorted(path for path in run.glob("timeline-*.jsonl") if path.suffixes == [".jsonl"])]


def _lines(run: Path, most_bytes: int | None) -> Iterator[Mapping[str, Any]]:
    for path in timeline_files(run):
        for file in (earlier_file(path), path) if most_bytes is None else (path,):
            if file.is_file():
                yield from _lines_of(file, file.stat().st_size if most_bytes is None else most_bytes)


def _lines_of(file: Path, most_bytes: int) -> Iterator[Mapping[str, Any]]:
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - most_bytes))
        for line in lines:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found
