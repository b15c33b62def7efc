# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run as a file that ui.perfetto.dev and chrome://tracing open. Torch-free.

The format is Chrome's trace event format: a process for every pool of workers, a thread for every worker (several,
if it did several things at a time), complete events for spans and recoveries, instant events for publishes, lending
and changes of membership, and counters for metrics. Times are whole microseconds since the trace begins. Perfetto drops
a complete event that sticks out of the one around it, so what rounding moves past an end is cut off there."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from podium.errors import RunFolderError
from podium.observe import read_metrics
from podium.observe.timeline import TimelineSpan, TimelineWorker, is_mark, published_version, read_timeline, slot_change
from podium.observe.timing import NESTED
from podium.runs.events import membership_changes, recoveries
from podium.runs.folder import RunFolder, is_pipeline_folder
from podium.runs.pipeline_folder import PipelineFolder

Event = Mapping[str, Any]
# Metrics that are drawn as curves above the spans, where a run has them.
_COUNTERS = ("tokens_per_s", "loss", "reward/mean", "response/mean", "staleness/mean", "mfu")
# The process of what belongs to no worker.
_RUN = "run"
# Begin and length of a span are rounded one by one, so that an end is up to this far from where it was.
_ROUNDING_US = 2


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """A span in a lane, in microseconds since the trace begins."""

    lane: int
    span: TimelineSpan
    begin_us: int
    end_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What a trace has."""

    file: Path
    workers: int
    spans: int
    seconds: float  # from the first span to the end of the last


def write_trace(run: Path, file: Path) -> TraceSummary:
    """Writes the trace of a run, or of all stages of a pipeline; compressed if the name ends in .gz."""
    timelines = [(prefix, each, list(read_timeline(each))) for prefix, each in _runs(run)]
    spans = [span for _, _, some in timelines for span in some]
    if not spans:
        raise RunFolderError(
            f"{run} has no timeline: its run has not finished a step, or an earlier version of Podium has made it."
        )
    tracks, begin_s, end_s = _Tracks(), min(span.begin_s for span in spans), max(span.end_s for span in spans)
    with _opened(file) as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for prefix, each, some in timelines:
            lasting = [span for span in some if not is_mark(span)]
            events = (
                *_spans(lasting, prefix, tracks, begin_s), *_marks(some, prefix, tracks, begin_s),
                *_events(each, prefix, tracks, begin_s),
            )  # fmt: skip
            for event in events:
                out.write(json.dumps(event, separators=(",", ":")) + ",\n")
        out.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in tracks.names()))
        out.write("\n]}\n")
    workers = {(prefix, span.worker) for prefix, _, some in timelines for span in some}
    return TraceSummary(file=file, workers=len(workers), spans=len(spans), seconds=end_s - begin_s)


def _runs(run: Path) -> list[tuple[str, Path]]:
    """Folders with timelines, and what the names of their processes begin with."""
    if not is_pipeline_folder(run):
        return [("", RunFolder.open(run).path)]
    folder = PipelineFolder.open(run)
    stages = [(name, folder.run(name).path) for name in folder.state()["order"]]
    return [(f"{name}: ", path) for name, path in stages if path.is_dir()]


class _Tracks:
    """Numbers of processes and threads in the trace."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}

    def place(self, process: str, thread: str) -> dict[str, int]:
        number = self._processes.setdefault(process, len(self._processes) + 1)
        return {"pid": number, "tid": self._threads.setdefault((process, thread), len(self._threads) + 1)}

    def names(self) -> Iterator[Event]:
        for process, number in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": process}}
            yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        for (process, thread), number in self._threads.items():
            yield {
                "ph": "M", "name": "thread_name", "pid": self._processes[process], "tid": number,
                "args": {"name": thread},
            }  # fmt: skip


def _spans(spans: Sequence[TimelineSpan], prefix: str, tracks: _Tracks, begin_s: float) -> Iterator[Event]:
    """The spans of one run."""
    by_worker: dict[str, list[TimelineSpan]] = {}
    for span in spans:
        by_worker.setdefault(span.worker, []).append(span)
    for worker, some in by_worker.items():
        for placed in in_lanes(some, begin_s):
            place = tracks.place(prefix + TimelineWorker.of(worker).kind, _thread(worker, placed.lane))
            name, values = placed.span.name.rpartition(NESTED)[2], placed.span.values
            yield _complete(placed, name, "span", place, {} if values is None else {"args": values})


def _thread(name: str, lane: int) -> str:
    return name if lane == 0 else f"{name} ({lane + 1})"


def _complete(placed: PlacedSpan, name: str, category: str, place: Mapping[str, int], args: Event) -> Event:
    times = {"ts": placed.begin_us, "dur": placed.end_us - placed.begin_us}
    return {"ph": "X", "name": name, "cat": category, **place, **times, **args}


def in_lanes(spans: Sequence[TimelineSpan], begin_s: float = 0.0) -> Iterator[PlacedSpan]:
    """The spans of one worker by their begin, each with a lane. In a lane a span is inside the one before it, or comes
    after it: viewers draw nothing else. A span inside another has the other's lane, if there is one."""
    lanes: list[list[PlacedSpan]] = []  # of each: the spans that are open, the outer ones first
    timed = [(_us(each.begin_s - begin_s), _us(each.end_s - begin_s), each) for each in spans]
    # Of spans that begin together, rounding may have made an inner one the longer, or have moved the end of one before.
    for begin_us, end_us, span in sorted(timed, key=lambda each: (each[0], each[2].name.count(NESTED), each[1])):
        at, depth = _room(lanes, span, begin_us, end_us)
        if at == len(lanes):
            lanes.append([])
        around, before = lanes[at][:depth], lanes[at][depth:]
        begin_us = max([begin_us, *(each.end_us for each in before), *(each.begin_us for each in around)])
        end_us = max(begin_us, end_us)
        if around:
            begin_us, end_us = min(begin_us, around[-1].end_us), min(end_us, around[-1].end_us)
        placed = PlacedSpan(at, span, begin_us, end_us)
        lanes[at] = [*around, placed]
        yield placed


def _room(lanes: Sequence[Sequence[PlacedSpan]], span: TimelineSpan, begin_us: int, end_us: int) -> tuple[int, int]:
    """The lane for a span, and how many of its open spans go around it."""
    depths = [_depth(lane, span, begin_us, end_us) for lane in lanes]
    holding = [(lanes[at][depth - 1].begin_us, at, depth) for at, depth in enumerate(depths) if depth]
    if holding:
        return max(holding)[1:]  # the last one that began, where several have this name
    return next((at for at, depth in enumerate(depths) if depth == 0), len(lanes)), 0


def _depth(lane: Sequence[PlacedSpan], span: TimelineSpan, begin_us: int, end_us: int) -> int | None:
    """How many open spans of a lane go around a span; 0: the lane is free; None: it is taken."""
    outer = span.name.rpartition(NESTED)[0]
    for depth in range(len(lane), 0, -1):
        open_span = lane[depth - 1]
        if open_span.span.name == outer and end_us <= open_span.end_us + _ROUNDING_US:
            return depth
        if begin_us < open_span.end_us - _ROUNDING_US:
            return None
    return 0


def _marks(spans: Sequence[TimelineSpan], prefix: str, tracks: _Tracks, begin_s: float) -> Iterator[Event]:
    """The moments at which versions of the weights were published, and devices lent or recalled."""
    place = tracks.place(prefix + _RUN, "events")
    for span in filter(is_mark, spans):
        if slot_change(span) is not None:  # the events of the run say more
            continue
        version = published_version(span)
        yield {
            "ph": "i", "s": "g", "name": span.name, "cat": "lending" if version is None else "publish", **place,
            "ts": _us(span.begin_s - begin_s), "args": {} if version is None else {"version": version},
        }  # fmt: skip


def _events(run: Path, prefix: str, tracks: _Tracks, begin_s: float) -> Iterator[Event]:
    """What else happened in one run."""
    place = tracks.place(prefix + _RUN, "events")
    happened = {
        TimelineSpan(str(number), f"recovery: {each.part}", each.time_s - each.seconds, each.time_s): each
        for number, each in enumerate(recoveries(run))
    }
    for placed in in_lanes(list(happened), begin_s):
        recovery = happened[placed.span]
        args = {"cause": recovery.cause, "remedy": recovery.remedy, "step": recovery.step}
        where = place if placed.lane == 0 else tracks.place(prefix + _RUN, _thread("events", placed.lane))
        yield _complete(placed, placed.span.name, "recovery", where, {"args": args})
    for change in membership_changes(run):
        yield {
            "ph": "i", "s": "g", "name": f"{change.generator} {change.change}", "cat": "membership", **place,
            "ts": _us(change.time_s - begin_s),
            "args": {"cause": change.cause, "step": change.step, "generators": change.generators},
        }  # fmt: skip
    for line in read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else ():
        for name in _COUNTERS:
            if math.isfinite(line.values.get(name, math.nan)):
                yield {
                    "ph": "C", "name": name, "pid": place["pid"], "ts": _us(line.time_s - begin_s),
                    "args": {name: line.values[name]},
                }  # fmt: skip


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _opened(file: Path) -> IO[str]:
    try:
        if file.suffix == ".gz":
            return gzip.open(file, "wt", encoding="utf-8")
        return file.open("w", encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{file} cannot be written: {error.strerror or error}.") from error
