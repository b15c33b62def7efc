# SPDX-License-Identifier: Apache-2.0
"""The list of runs and the facts of one run, for the page."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import PodiumError
from podium.observe.metrics import METRICS_FILE, json_value
from podium.recipe.changes import flat_values
from podium.runs.events import membership_changes, recoveries
from podium.runs.folder import RunFolder
from podium.runs.lineage import inputs_of, short
from podium.runs.pipeline_folder import PipelineFolder
from podium.runs.standing import changed_s, mapping_in, status_of, step_of
from podium.ui.answers import PageError
from podium.ui.catalogue import RunEntry, stage_id
from podium.ui.last_metrics import LastMetrics

_STEPS = re.compile(r"^steps: (\d+)$", re.MULTILINE)
_FIRST_BYTES = 1 << 16
# Of console.log, where the warnings are.
_CONSOLE_BYTES = 1 << 20
_MOST_EVENTS, _MOST_ALARMS = 500, 100
_WARNING = "warning: "
_AT_STEP = re.compile(r"\bsteps? (?:\d+ to )?(\d+)")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Known:
    """A row of the list, and the state of the files that it was made from."""

    stamp: tuple[object, ...]
    row: Json


class RunSummaries:
    """Rows of the list of runs. A run whose files did not change is not read again."""

    def __init__(self) -> None:
        self._known: dict[Path, _Known] = {}
        self._last: dict[Path, LastMetrics] = {}
        self._lock = threading.Lock()

    def row(self, entry: RunEntry) -> Json:
        """One run or pipeline. A folder that cannot be read has its reason in `broken`."""
        if entry.broken is not None:
            return _broken_row(entry, entry.broken)
        try:
            return _pipeline_row(entry) if entry.is_pipeline else self._run_row(entry)
        except Exception as error:  # whatever its files have, the others can be listed
            return _broken_row(entry, _reason(entry, error))

    def _run_row(self, entry: RunEntry) -> Json:
        stamp = tuple(_stamp(entry.path / name) for name in ("run.json", "recipe.yaml", METRICS_FILE))
        known = self._known.get(entry.path)
        if known is None or known.stamp != stamp:
            with self._lock:
                last = self._last.setdefault(entry.path, LastMetrics())
            known = _Known(stamp, _run_row(entry, last))
            with self._lock:
                self._known[entry.path] = known
        state = {"status": known.row["status"]}
        return {**known.row, "status": status_of(entry.path, state)}


def _run_row(entry: RunEntry, metrics: LastMetrics) -> Json:
    """With the status of run.json: whether a process holds the folder does not show in the files."""
    run = RunFolder.open(entry.path)
    state, last = mapping_in(run), metrics.read(run.metrics_file)
    first_s, last_s = _first_time_s(run.metrics_file), None if last is None else last.time_s
    return {
        "id": entry.id,
        "name": entry.path.name,
        "program": str(state.get("program", "-")),
        "status": str(state.get("status")),
        "step": step_of(state, [] if last is None else [last]),
        "steps": _num_steps(run),
        "changed_s": changed_s(entry.path),
        "duration_s": last_s - first_s if first_s is not None and last_s is not None else None,
        "metrics": {} if last is None else {name: json_value(value) for name, value in last.values.items()},
        "parent": entry.parent,
        "broken": None,
    }


def _pipeline_row(entry: RunEntry) -> Json:
    folder = PipelineFolder.open(entry.path)
    state = folder.state()
    stages = [folder.run(name).path for name in state["order"]]
    return {
        "id": entry.id,
        "name": entry.path.name,
        "program": "pipeline",
        "status": status_of(entry.path, state),
        "step": sum(folder.record(name).status == "done" for name in state["order"]),
        "steps": len(stages),
        "changed_s": max(changed_s(path) for path in (entry.path, *stages)),
        "duration_s": None,
        "metrics": {},
        "parent": None,
        "broken": None,
    }


def _broken_row(entry: RunEntry, reason: str) -> Json:
    return {
        "id": entry.id, "name": entry.path.name, "program": "-", "status": "damaged", "step": 0, "steps": 0,
        "changed_s": _changed_s(entry.path), "duration_s": None, "metrics": {},
        "parent": entry.parent, "broken": reason,
    }  # fmt: skip


def _changed_s(path: Path) -> float:
    try:
        return changed_s(path)
    except OSError:
        return 0.0


def _reason(entry: RunEntry, error: Exception) -> str:
    if isinstance(error, PodiumError):
        return str(error)
    return f"{entry.path} cannot be read ({type(error).__name__}: {error}). Restore its files, or remove it."


def _num_steps(run: RunFolder) -> int:
    """Without checking the whole recipe, which takes ten times as long. Where the recipe has no such line it is
    checked."""
    found = _STEPS.search(run.recipe_file.read_text(encoding="utf-8"))
    return int(found[1]) if found is not None else run.recipe(needs_environment=False).steps


def _first_time_s(metrics: Path) -> float | None:
    try:
        with metrics.open("rb") as file:
            return float(json.loads(file.read(_FIRST_BYTES).split(b"\n")[0])["time_s"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def run_facts(entry: RunEntry, row: Json, metric_names: list[str], *, has_rollouts: bool) -> Json:
    """Everything that the page shows about one run beside its curves. A recipe or state that cannot be read is an
    error that says so."""
    try:
        if entry.is_pipeline:
            return _pipeline_facts(entry, row)
        run = RunFolder.open(entry.path)
        recipe, state = run.recipe(needs_environment=False), mapping_in(run)
    except Exception as error:
        raise PageError(422, _reason(entry, error)) from error
    lineage = state.get("lineage")
    return {
        **row,
        "recipe": flat_values(recipe.stored_values()),
        "lineage": _inputs(lineage if isinstance(lineage, Mapping) else {}),
        "checkpoints": list(_checkpoints(run)),
        "metric_names": metric_names,
        "has_rollouts": has_rollouts,
        "has_timeline": any(entry.path.glob("timeline*.jsonl")),
        "has_heldout": run.samples_file.is_file(),
        "has_examples": run.examples_file.is_file(),
        "events": event_marks(entry.path),
        "alarms": alarms(run.console_file),
    }


def _pipeline_facts(entry: RunEntry, row: Json) -> Json:
    folder = PipelineFolder.open(entry.path)
    state = folder.state()
    stages = [
        {
            "name": name,
            "id": stage_id(entry.id, str(name)),
            "status": folder.record(name).status,
            "parents": list(state["parents"].get(name, ())),
        }
        for name in state["order"]
    ]
    recipe = folder.recipe(needs_environment=False).stored_values()
    return {
        **row, "recipe": flat_values(recipe), "lineage": [], "stages": stages, "checkpoints": [], "metric_names": [],
        "has_rollouts": False, "has_timeline": False, "has_heldout": False, "has_examples": False, "events": [],
        "alarms": [],
    }  # fmt: skip


def _inputs(lineage: Mapping[str, Any], depth: int = 0, seen: frozenset[str] = frozenset()) -> list[Json]:
    """What a run was made of, and for weights that a run made: of what that one was, deeper by one."""
    found: list[Json] = []
    ancestors = lineage.get("ancestors")
    for each in inputs_of(lineage):
        maker = ancestors.get(each["fingerprint"]) if isinstance(ancestors, Mapping) else None
        maker = maker if isinstance(maker, Mapping) and each["kind"] == "weights" else None
        made_by = None if maker is None else f"{maker.get('program')}, step {maker.get('step')} of {maker.get('run')}"
        found.append({
            "depth": depth, "kind": each["kind"], "key": each["key"], "path": str(each["path"]),
            "fingerprint": short(each["fingerprint"]), "made_by": made_by,
        })  # fmt: skip
        if maker is not None and each["fingerprint"] not in seen:
            deeper = {**maker, "ancestors": ancestors}
            found += _inputs(deeper, depth + 1, seen | {each["fingerprint"]})
    return found


def _checkpoints(run: RunFolder) -> Iterator[Json]:
    for step in run.saved_steps():
        path = run.checkpoints / f"step-{step:08d}"
        size = 0
        for folder, _, files in os.walk(path):
            for name in files:
                try:
                    size += os.lstat(os.path.join(folder, name)).st_size
                except OSError:  # it was just replaced by a newer one
                    continue
        yield {"step": step, "size_bytes": size, "path_name": path.name}


def event_marks(run: Path) -> list[Json]:
    """Deaths with their recoveries, and generators that joined or left; the newest of many."""
    marks: list[Json] = []
    for each in recoveries(run):
        if not _are_numbers(each.time_s, each.seconds):
            continue
        text = f"{each.part}: {each.cause} ({each.remedy}, {each.seconds:.1f} s)"
        marks.append({"time_s": each.time_s, "kind": "recovery", "text": text, "step": each.step})
        marks[-1]["seconds"] = each.seconds
    for change in membership_changes(run):
        if not _are_numbers(change.time_s):
            continue
        text = f"{change.generator} has {change.change}: {change.cause} ({change.generators} generators)"
        marks.append({"time_s": change.time_s, "kind": change.change, "text": text, "step": change.step})
    return sorted(marks, key=lambda mark: mark["time_s"])[-_MOST_EVENTS:]


def _are_numbers(*values: object) -> bool:
    """Whether a line of events has what its dataclass says: it comes from a file."""
    return all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)


def alarms(console: Path) -> list[Json]:
    """Warnings of the run's console, the newest of many, each once. A wrapped one is put together again."""
    try:
        with console.open("rb") as file:
            file.seek(max(0, console.stat().st_size - _CONSOLE_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    texts: list[str] = []
    is_open = False
    for line in lines:
        if line.startswith(_WARNING):
            texts.append(line.removeprefix(_WARNING))
            is_open = True
        elif is_open and line.startswith("  "):
            texts[-1] += " " + line.strip()
        else:
            is_open = False
    found = []
    for text in dict.fromkeys(texts):
        at = _AT_STEP.search(text)
        found.append({"step": int(at[1]) if at is not None else None, "text": text})
    return found[-_MOST_ALARMS:]
