# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run as columns, read once and then only as far as the file has grown; and curves of few points."""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 4 << 20
# A longer line is none that a run wrote; it is not kept in memory until it ends.
_LONGEST_LINE = 16 << 20
_MOST_STEP = 1 << 62
# Steps at which a metric was not finite; more are not named.
_MOST_NAMED = 100
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """A metric, thinned out: means with the least and the greatest value of their bucket. A bucket without a finite
    value has NaN."""

    step: NDArray[np.int64]
    time_s: Floats
    value: Floats
    low: Floats
    high: Floats
    not_finite: Sequence[int]  # the first steps with such a value

    def as_json(self) -> dict[str, Any]:
        """As the page reads it."""
        values = {"step": self.step.tolist(), "time_s": self.time_s.tolist()}
        for name, column in (("value", self.value), ("low", self.low), ("high", self.high)):
            values[name] = [each if math.isfinite(each) else None for each in column.tolist()]
        return values | ({"not_finite": list(self.not_finite)} if self.not_finite else {})


class _Column:
    """The values of one metric and the lines that have them."""

    __slots__ = ("lines", "values")

    def __init__(self) -> None:
        self.lines, self.values = array("q"), array("d")


class MetricColumns:
    """All metrics of one file. A file that was replaced or shortened (a resumed run, a run of the same name) is read
    again from its beginning. Used by several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._inode, self._offset = -1, 0
        self._steps, self._times = array("q"), array("d")
        self._columns: dict[str, _Column] = {}
        self.num_bad = 0

    def refresh(self) -> int:
        """Reads what is new, and returns the number of lines so far. A line that is not whole yet waits for its rest;
        a bad one is left out and counted."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    stat = self._path.stat()
                    if stat.st_ino != self._inode or stat.st_size < self._offset:
                        self._forget()
                        self._inode = stat.st_ino
                    file.seek(self._offset)
                    rest = b""
                    while chunk := file.read(_CHUNK):
                        lines = (rest + chunk).split(b"\n")
                        rest = lines.pop()
                        self._offset += sum(map(len, lines)) + len(lines)
                        self._add(lines)
                        if len(rest) > _LONGEST_LINE:
                            self._offset += len(rest)
                            rest = b""
                            self.num_bad += 1
            except OSError:
                self._forget()
            return len(self._steps)

    def _add(self, lines: Sequence[bytes]) -> None:
        names: list[str] = []
        rows: list[list[Any]] = []
        for line in lines:
            if not line:
                continue
            try:
                fields: dict[str, Any] = json.loads(line)
                step, time_s = int(fields.pop("step")), float(fields.pop("time_s"))
                if abs(step) > _MOST_STEP:
                    raise ValueError(f"no step has the number {step}")
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                self.num_bad += 1
                continue
            if list(fields) != names:
                self._add_rows(names, rows)
                names, rows = list(fields), []
            rows.append(list(fields.values()))
            self._steps.append(step)
            self._times.append(time_s)
        self._add_rows(names, rows)

    def _add_rows(self, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Values of the last lines, which have the same names."""
        if not names or not rows:
            return
        try:
            values = np.array(rows, dtype=np.float64)
            if values.ndim != 2:
                raise ValueError("values are lists")
        except (TypeError, ValueError, OverflowError):  # a value that is no number is left out
            values = np.array([[_number(value) for value in row] for row in rows], dtype=np.float64)
        numbers = np.arange(len(self._steps) - len(rows), len(self._steps)).astype(np.int64)
        for name, column_values in zip(names, values.T, strict=True):
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Column()
            column.values.frombytes(column_values.tobytes())
            column.lines.frombytes(numbers.tobytes())

    @property
    def names(self) -> list[str]:
        """All metrics, in the order in which they first came."""
        with self._lock:
            return list(self._columns)

    @property
    def first_time_s(self) -> float | None:
        """When the first line was written."""
        with self._lock:
            return self._times[0] if self._times else None

    def since(self, line: int) -> list[tuple[int, float, dict[str, float]]]:
        """Step, time and values of all lines from the given one on."""
        with self._lock:
            count = len(self._steps)
            found: list[dict[str, float]] = [{} for _ in range(line, count)]
            for name, column in self._columns.items():
                at = len(column.lines) - 1
                while at >= 0 and column.lines[at] >= line:
                    found[column.lines[at] - line][name] = column.values[at]
                    at -= 1
            return [(self._steps[line + at], self._times[line + at], values) for at, values in enumerate(found)]

    def curve(
        self, name: str, *, points: int, first_step: float | None = None, last_step: float | None = None
    ) -> Curve | None:
        """A metric in at most that many points; None if the file does not have it."""
        with self._lock:
            column = self._columns.get(name)
            if column is None:
                return None
            lines, values = np.array(column.lines), np.array(column.values)
            steps, times = np.array(self._steps)[lines], np.array(self._times)[lines]
        chosen = np.ones(len(steps), dtype=bool)
        if first_step is not None:
            chosen &= steps >= first_step
        if last_step is not None:
            chosen &= steps <= last_step
        return thinned(steps[chosen], times[chosen], values[chosen], points=points)


def thinned(steps: NDArray[np.int64], times: Floats, values: Floats, *, points: int) -> Curve:
    """Buckets of equally many values, in their order. The step and time of a bucket are those of its middle."""
    count = len(values)
    buckets = min(points, count)
    finite = np.isfinite(values)
    not_finite = steps[~finite][:_MOST_NAMED].tolist()
    if not buckets:
        nothing = np.zeros(0)
        return Curve(step=steps[:0], time_s=nothing, value=nothing, low=nothing, high=nothing, not_finite=not_finite)
    begins = np.arange(buckets) * count // buckets
    ends = np.append(begins[1:], count)
    middles = (begins + ends - 1) // 2
    counts = np.add.reduceat(finite.astype(np.int64), begins)
    with np.errstate(all="ignore"):
        means = np.add.reduceat(np.where(finite, values, 0.0), begins) / counts
        lows = np.minimum.reduceat(np.where(finite, values, np.inf), begins)
        highs = np.maximum.reduceat(np.where(finite, values, -np.inf), begins)
        means = np.clip(means, lows, highs)  # a mean of equal values is that value, whatever its sum was rounded to
    return Curve(
        step=steps[middles], time_s=times[middles], value=np.where(counts > 0, means, np.nan), low=lows, high=highs,
        not_finite=not_finite,
    )  # fmt: skip


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
