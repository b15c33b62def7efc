# SPDX-License-Identifier: Apache-2.0
"""Answers every address of the page from a folder of runs. Knows nothing of HTTP: the server and the report use it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from podium.errors import PodiumError
from podium.observe.machine import MACHINE_FILE
from podium.observe.metrics import METRICS_FILE, json_value
from podium.observe.timeline import timeline_file
from podium.runs.comparing import RunComparison, compare_runs
from podium.runs.example_files import read_examples
from podium.runs.folder import RunFolder
from podium.runs.showing import show_lines
from podium.ui.answers import PageError, Query
from podium.ui.apart import Apart
from podium.ui.catalogue import RunCatalogue, RunEntry
from podium.ui.metric_columns import MetricColumns
from podium.ui.rollout_pages import RunRollouts
from podium.ui.run_findings import RunFindings
from podium.ui.summaries import RunSummaries, run_facts
from podium.ui.timelines import RunTimeline

_POINTS, _MOST_POINTS, _MOST_NAMES = 1000, 20_000, 500
# Points of all curves of one answer, which are in memory at once.
_MOST_VALUES = 500_000
# How long the facts of a run wait for the lines of `podium show`, which reads all metrics.
_LINES_S, _MOST_LINES_S = 0.3, 60.0
# From this size of metrics and timeline on, a process of its own reads them.
_LARGE_BYTES = 2 << 20
# Of samples.jsonl, the newest answers.
_HELDOUT_BYTES, _MOST_PROMPTS = 8 << 20, 200
# Metrics of the machine.
_SYSTEM = re.compile(
    r"^(system|machine|host|device|gpu|cpu|memory)/|(^|[/_])(memory|mem|gib|cpu|gpu|power|mfu)([/_]|$)"
)
Json = dict[str, Any]


class RunData:
    """What was read of one run, for later requests."""

    def __init__(self, path: Path, cache: Path | None, apart: Apart, looking: concurrent.futures.Executor) -> None:
        self.path = path
        self.findings = RunFindings(path, apart, looking)
        self.metrics = MetricColumns(path / METRICS_FILE)
        self.machine = MetricColumns(path / MACHINE_FILE)
        self.timeline = RunTimeline(path, apart)
        self.rollouts = RunRollouts(path, cache, apart)

    def curves(self, names: list[str], query: Query, columns: MetricColumns | None = None) -> Json:
        """Curves of the metrics that the run has, by name. `columns`: of another file than that of the metrics."""
        columns = columns or self.metrics
        names = list(dict.fromkeys(names))[:_MOST_NAMES]
        most = min(_MOST_POINTS, _MOST_VALUES // max(1, len(names)))
        points = query.whole("points", _POINTS, least=1, most=most)
        first, last = query.number("from"), query.number("to")
        found = {
            name: columns.curve(name, points=min(points, most), first_step=first, last_step=last) for name in names
        }
        return {"series": {name: curve.as_json() for name, curve in found.items() if curve is not None}}


class Site:
    """A folder of runs as the page sees it. Used by several threads; `close` ends its own."""

    def __init__(self, folder: Path, *, cache: Path | None = None) -> None:
        """`cache`: where indexes of rollouts are kept between uses; None: nowhere."""
        self.catalogue = RunCatalogue(folder)
        self._cache = cache
        self._summaries = RunSummaries()
        self._data: dict[Path, RunData] = {}
        self._lock = threading.Lock()
        self._apart = Apart()
        self._lines = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="podium-ui-lines")
        self._looking = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="podium-ui-findings")
        self._waiting: dict[tuple[Path, float], concurrent.futures.Future[list[str]]] = {}

    def prepare(self) -> None:
        """Begins to import what processes for long work need."""
        self._apart.prepare()

    def close(self) -> None:
        """Ends all threads and processes."""
        self._apart.close()
        for executor in (self._lines, self._looking):
            executor.shutdown(wait=False, cancel_futures=True)
        for data in list(self._data.values()):
            data.rollouts.close()

    def answer(self, path: str, query: Query) -> Json:
        """The answer to an address below /api/, without the events."""
        match [unquote(part) for part in path.strip("/").split("/")]:
            case ["api", "runs"]:
                return {"folder": str(self.catalogue.folder), "runs": self.runs()}
            case ["api", "compare"]:
                return self._compare(query)
            case ["api", "runs", run_id]:
                return self._facts(self.catalogue.readable(run_id))
            case ["api", "runs", run_id, "rollouts", step, group]:
                return self.data(run_id).rollouts.group(_number(step, "step"), _number(group, "group"), query)
            case ["api", "runs", run_id, name] if name in _OF_RUN:
                return _OF_RUN[name](self, run_id, query)
        raise PageError(404, f"there is nothing at {path[:200]!r}. Open the page at / instead.")

    def runs(self) -> list[Json]:
        """All runs and pipelines, the last changed first; stages beside their pipeline have it as `parent`."""
        rows = [self._summaries.row(entry) for entry in self.catalogue.entries()]
        return sorted(rows, key=lambda row: (-row["changed_s"], row["id"]))

    def status(self, run_id: str) -> Json:
        """The row of one run."""
        return self._summaries.row(self.catalogue.find(run_id))

    def data(self, run_id: str) -> RunData:
        """The data of a run that can be read."""
        path = self.catalogue.readable(run_id).path
        with self._lock:
            return self._data.setdefault(path, RunData(path, self._cache, self._apart, self._looking))

    def _facts(self, entry: RunEntry) -> Json:
        names: list[str] = []
        has_rollouts = False
        if not entry.is_pipeline:
            data = self.data(entry.id)
            data.metrics.refresh()
            names, has_rollouts = data.metrics.names, data.rollouts.are_there
        row = self._summaries.row(entry)
        if row["broken"] is not None:
            raise PageError(422, row["broken"])
        facts = run_facts(entry, row, names, has_rollouts=has_rollouts)
        lines = self._show_lines(entry, row["changed_s"], 0.0 if _is_large(entry.path) else _LINES_S)
        return facts | {"texts": lines or [], "texts_pending": lines is None}

    def _show_lines(self, entry: RunEntry, changed_s: float, wait_s: float) -> list[str] | None:
        """Lines of `podium show`; None if they take longer."""
        key = entry.path, changed_s
        with self._lock:
            if key not in self._waiting:
                for old in [each for each in self._waiting if each[0] == entry.path]:
                    self._waiting.pop(old).cancel()
                self._waiting[key] = self._lines.submit(self._read_lines, entry.path)
            future = self._waiting[key]
        try:
            return future.result(timeout=wait_s)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            return None  # it takes longer, or the run has changed meanwhile, and another request reads it again
        except Exception as error:
            return [f"`podium show` cannot read {entry.path}: {error}"]

    def _read_lines(self, path: Path) -> list[str]:
        if not _is_large(path):
            return show_lines(path)
        return self._apart.call(show_lines, path, most_s=_MOST_LINES_S) or [f"look at it with: podium show {path}"]

    def _texts(self, run_id: str, query: Query) -> Json:
        entry = self.catalogue.readable(run_id)
        row = self._summaries.row(entry)
        return {"texts": self._show_lines(entry, row["changed_s"], _MOST_LINES_S) or []}

    def _metrics(self, run_id: str, query: Query) -> Json:
        data = self.data(run_id)
        data.metrics.refresh()
        asked = query.text("names")
        return data.curves(asked.split(",") if asked else data.metrics.names, query)

    def _system(self, run_id: str, query: Query) -> Json:
        data = self.data(run_id)
        data.metrics.refresh()
        data.machine.refresh()
        found = data.curves([name for name in data.metrics.names if _SYSTEM.search(name)], query)
        return {"series": data.curves(data.machine.names, query, data.machine)["series"] | found["series"]}

    def _timeline(self, run_id: str, query: Query) -> Json:
        points = query.whole("points", _POINTS, least=10, most=_MOST_POINTS)
        return self.data(run_id).timeline.view(
            query.number("from_s"), query.number("to_s"), points, after=query.text("after"),
            point_s=query.number("point_s"),
        )  # fmt: skip

    def _accounting(self, run_id: str, query: Query) -> Json:
        return self.data(run_id).timeline.accounting()

    def _findings(self, run_id: str, query: Query) -> Json:
        return self.data(run_id).findings.view()

    def _rollouts(self, run_id: str, query: Query) -> Json:
        return self.data(run_id).rollouts.page(query)

    def _heldout(self, run_id: str, query: Query) -> Json:
        return heldout_answers(RunFolder(path=self.catalogue.readable(run_id).path).samples_file)

    def _examples(self, run_id: str, query: Query) -> Json:
        found = read_examples(RunFolder(path=self.catalogue.readable(run_id).path).examples_file)
        return {"examples": [asdict(each) for each in found]}

    def _compare(self, query: Query) -> Json:
        ids = [query.text(side) for side in ("a", "b")]
        if not all(ids):
            raise PageError(400, "the address needs a=RUN&b=RUN: the ids of two runs.")
        first, second = (self.catalogue.readable(run_id) for run_id in ids)
        try:
            return comparison_json(compare_runs(first.path, second.path))
        except (PodiumError, OSError) as error:
            raise PageError(422, str(error)) from error


_OF_RUN: dict[str, Callable[[Site, str, Query], Json]] = {
    "metrics": Site._metrics,
    "timeline": Site._timeline,
    "accounting": Site._accounting,
    "findings": Site._findings,
    "rollouts": Site._rollouts,
    "heldout": Site._heldout,
    "examples": Site._examples,
    "system": Site._system,
    "texts": Site._texts,
}


def comparison_json(found: RunComparison) -> Json:
    """Two runs beside each other."""
    return {
        "standings": list(found.standings),
        "recipe": [{"key": key, "a": a, "b": b} for key, (a, b) in found.changed.items()],
        "first_difference": [
            {
                "name": each.name,
                "step": each.first_step,
                "differing": each.num_differing,
                "steps": each.num_steps,
                "last_a": json_value(each.sides[0][max(each.sides[0])]),
                "last_b": json_value(each.sides[1][max(each.sides[1])]),
            }
            for each in found.differing
        ],
        "num_equal": found.num_equal,
        "alone": {"a": list(found.alone[0]), "b": list(found.alone[1])},
        "speeds": [{"name": name, "a": a, "b": b} for name, a, b in found.speeds],
    }


def heldout_answers(samples: Path) -> Json:
    """Answers of evaluations by prompt, each over the steps; the newest of a large file."""
    try:
        with samples.open("rb") as file:
            skipped = max(0, samples.stat().st_size - _HELDOUT_BYTES)
            file.seek(skipped)
            lines = file.read().split(b"\n")
    except OSError:
        return {"prompts": [], "left_out": 0}
    prompts: dict[str, list[Json]] = {}
    for line in lines:
        try:
            row = json.loads(line)
            prompt = str(row.pop("prompt"))
            answer = {"step": int(row["step"]), "answer": str(row["answer"])}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue  # half a line at either end, or one that no run wrote
        prompts.setdefault(prompt, []).append({"reference": None, "score": None} | row | answer)
    shown = list(prompts.items())[:_MOST_PROMPTS]
    return {
        "prompts": [
            {"prompt": prompt, "answers": sorted(answers, key=lambda row: row["step"])} for prompt, answers in shown
        ],
        "left_out": len(prompts) - len(shown),
        "is_whole": skipped == 0,
    }


def _is_large(run: Path) -> bool:
    size = 0
    for file in (run / METRICS_FILE, timeline_file(run)):
        with contextlib.suppress(OSError):
            size += file.stat().st_size
    return size >= _LARGE_BYTES


def _number(text: str, name: str) -> int:
    return Query({name: text}).optional_whole(name) or 0
