# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run, one JSON object per line in metrics.jsonl. The file stays readable after a crash.

A line is flat: {"step": 3, "time_s": 1.7e9, "loss": 2.31, ...}. Non-finite values are written as the strings "NaN",
"Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from podium.errors import RunFolderError
from podium.observe.line_files import DiskReports, LineFile

METRICS_FILE = "metrics.jsonl"  # in the folder of a run
_TAIL_BYTES = 1 << 18
_RESERVED = ("step", "time_s")
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The metrics of one step. `time_s` is wall-clock time in seconds since 1970."""

    step: int
    time_s: float
    values: Mapping[str, float]


class MetricsFile:
    """Appends metrics to one file; every line has been flushed when `append` returns. With `reports`, a line that the
    disk does not take waits in memory for the next one."""

    def __init__(self, path: Path, reports: DiskReports | None = None) -> None:
        self._file = LineFile(path, reports)
        self._file.open()

    @classmethod
    def resume(cls, path: Path, *, step: int, reports: DiskReports | None = None) -> Self:
        """Opens the file of a resumed run. Lines after `step` are removed first, so that no step appears twice."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _rewrite(path, [metrics for metrics in read_metrics(path) if metrics.step <= step])
        return cls(path, reports)

    @property
    def num_waiting(self) -> int:
        """Lines that are not in the file yet."""
        return self._file.num_waiting

    def append(self, metrics: StepMetrics) -> None:
        """Writes one line and flushes it."""
        self._file.append([_line(metrics)])

    def restore(self) -> None:
        """Writes a file that somebody removed again."""
        self._file.restore()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[StepMetrics]:
    """All lines of a metrics file, or of that in a run folder. A last line that a crash cut short is left out; any
    other bad line is an error."""
    path = Path(path)
    if path.is_dir():
        path = path / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be read ({error.strerror or error}). Give the folder of a run that has taken a step, or "
            f"its {METRICS_FILE}."
        ) from error
    while lines and not lines[-1]:
        lines.pop()
    metrics: list[StepMetrics] = []
    for number, line in enumerate(lines, start=1):
        parsed = parse_line(line)
        if parsed is not None:
            metrics.append(parsed)
        elif number < len(lines):
            raise RunFolderError(
                f"{path}, line {number}: not a line that Podium wrote ({line[:60]!r}). "
                "Something else changed the file; remove that line, or move the file away."
            )
    return metrics


def read_last_metrics(path: Path) -> list[StepMetrics]:
    """The last lines of a metrics file of any size; none if there is no file. Lines that are not whole are left out."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    parsed = (parse_line(line) for line in text.split("\n"))
    return [metrics for metrics in parsed if metrics is not None]


def newest_step(path: Path) -> int:
    """The newest step of a metrics file; 0: it has none."""
    return max((each.step for each in read_last_metrics(path)), default=0)


def _line(metrics: StepMetrics) -> str:
    taken = [name for name in _RESERVED if name in metrics.values]
    assert not taken, f"{taken} are fields of StepMetrics, not names of values"
    values = {name: json_value(value) for name, value in metrics.values.items()}
    return json.dumps({"step": metrics.step, "time_s": metrics.time_s, **values}, allow_nan=False) + "\n"


def json_value(value: float) -> float | str:
    """The value as JSON can hold it: a non-finite one is a word."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def parse_line(line: str | bytes) -> StepMetrics | None:
    """The metrics of a line of the file; None if it is not whole, or none that Podium wrote."""
    try:
        fields = json.loads(line)
        step, time_s = int(fields.pop("step")), float(fields.pop("time_s"))
        values = {
            str(name): _WORDS[value] if isinstance(value, str) else float(value) for name, value in fields.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return StepMetrics(step=step, time_s=time_s, values=values)


def _rewrite(path: Path, metrics: Iterable[StepMetrics]) -> None:
    """Replaces the file in one rename: a crash leaves the old file or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(_line(each) for each in metrics)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
