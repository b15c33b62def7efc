# SPDX-License-Identifier: Apache-2.0
"""The table of a finished run: what the seconds of its workers went into. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from podium.observe.causes import Cause
from podium.observe.formats import duration
from podium.observe.timeline import CONTROLLER, NewestSpans, SlowEpisode, TimelineWorker, read_newest, read_slowest
from podium.runs.accounting import WorkerTime, times_by_kind, worker_times

# Of all timeline files together: some thousand steps, whose time is accounted in a second or two. A run that has
# recorded more has lasted for hours.
_MOST_BYTES = 4 << 20
_SLOWEST_BYTES = 1 << 18
# Shorter runs have no table.
_SHORTEST_S = 5.0
_MOST_ROWS = 6
_MOST_KINDS = 4
# Share of the time of one kind of worker from which the slowest episodes are named.
_LONG_TAIL = 0.05
_TAIL: Cause = "waiting for the tail of generation"


def closing_lines(run: Path) -> list[str]:
    """The table of a run that has ended, and the slowest episodes where workers waited for them. Of a long run it is of
    the last part, and says so. Nothing for a short run, and nothing if the timeline cannot be read: the run itself has
    ended well."""
    try:
        most_bytes = _MOST_BYTES // max(1, len(list(run.glob("timeline*.jsonl"))))
        newest = read_newest(run, most_bytes=most_bytes)
        times = worker_times(newest.spans)
        if max((each.total_s for each in times), default=0.0) < _SHORTEST_S:
            return []
        part = part_text(newest)
        title = [] if part is None else [f"  {part}:"]
        return [*title, *table_lines(times), *_slowest_lines(run, times)]
    except Exception:
        return []


def part_text(newest: NewestSpans) -> str | None:
    """What of the run a timeline has, where it does not have all of it."""
    if newest.begin_s is None:
        return None
    last_s = max((span.end_s for span in newest.spans), default=newest.begin_s)
    return f"only the last {newest.num_steps:,} steps ({duration(last_s - newest.begin_s)}), not all of the run"


def table_lines(times: Sequence[WorkerTime]) -> list[str]:
    """A row for each of the largest causes and a column for each kind of worker but the controller, which directs the
    others: seconds of all workers of the kind, and their share."""
    names = {TimelineWorker.of(each.worker) for each in times}
    counts = Counter(kind for kind, _ in {(name.kind, name.slot) for name in names})
    kinds = [each for each in times_by_kind(times).values() if each.worker != CONTROLLER][:_MOST_KINDS]
    spent: dict[Cause, float] = {}
    for each in kinds:
        for cause, seconds in each.seconds.items():
            spent[cause] = spent.get(cause, 0.0) + seconds
    ordered = sorted(spent, key=lambda cause: -spent[cause])
    causes = [cause for cause in ordered[:_MOST_ROWS] if spent[cause] >= 0.005 * sum(spent.values())]
    rows: list[tuple[str, list[float]]] = [
        (cause, [each.seconds.get(cause, 0.0) for each in kinds]) for cause in causes
    ]
    rest = [each.total_s - sum(each.seconds.get(cause, 0.0) for cause in causes) for each in kinds]
    if sum(rest) >= 0.005 * sum(spent.values()):
        rows.append(("other", rest))
    idle = [each.idle_s for each in kinds]
    width = max(len("seconds of workers"), *(len(name) for name, _ in rows))
    titles = [f"{each.worker} x{counts[each.worker]}" for each in kinds]
    lines = [f"  {'seconds of workers':<{width}}" + "".join(f" {title:>11}" for title in titles)]
    for name, parts in [*rows, ("idle", idle)]:
        cells = [_cell(part, each.total_s) for part, each in zip(parts, kinds, strict=True)]
        lines.append(f"  {name:<{width}}" + "".join(f" {cell:>11}" for cell in cells))
    return lines


def _cell(seconds: float, total_s: float) -> str:
    if seconds < 0.05:
        return "-"
    digits = 0 if seconds >= 100 else 1
    return f"{seconds:.{digits}f} {seconds / total_s:>4.0%}"


def _slowest_lines(run: Path, times: Sequence[WorkerTime]) -> list[str]:
    """The slowest episode of each of the last steps."""
    kinds = times_by_kind(times).values()
    if not any(each.seconds.get(_TAIL, 0.0) >= _LONG_TAIL * each.total_s for each in kinds if each.total_s):
        return []
    first: dict[int, SlowEpisode] = {}
    for episode in read_slowest(run, most_bytes=_SLOWEST_BYTES):
        if episode.step not in first or episode.end_s > first[episode.step].end_s:
            first[episode.step] = episode
    return [f"  slowest in step {each.step}: {each}" for each in list(first.values())[-2:]]
