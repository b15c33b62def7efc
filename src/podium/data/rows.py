# SPDX-License-Identifier: Apache-2.0
"""One row of a source, and its printable place for error messages."""

from __future__ import annotations

import bisect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from podium.data.storage import open_binary, size_bytes

# Files of rows that were given in Python, which python_rows.py writes: one line or row for each.
_PYTHON_ROWS = re.compile(r"rows-[0-9a-f]{16}-(?P<key>.+)\.(?:jsonl|parquet)")
_COUNTING_CHUNK_BYTES = 1 << 22
# (file, its size) -> (byte, newlines before it), in order.
_counted: dict[tuple[str, int], list[tuple[int, int]]] = {}


def place_text(file: str, what: Literal["line", "row"], number: int) -> str:
    """A row's place in words: file and line, or the index of a row that was given in Python. `number` counts from 1."""
    match = _PYTHON_ROWS.fullmatch(file.rpartition("/")[2])
    if match is not None:
        return f"row {number - 1} of {match['key']} (given in Python)"
    return f"{file}, {what} {number}"


@dataclass(frozen=True, slots=True)
class LinePlace:
    """A line by its first byte: its line number is counted only when it is printed."""

    file: str
    byte: int

    def __str__(self) -> str:
        try:
            return place_text(self.file, "line", _newlines_before(self.file, self.byte) + 1)
        except OSError:  # the file is not visible from this process, or gone: the byte still names the place
            return f"{self.file}, the line at byte {self.byte}"


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The columns of one row. `where` is its place in words: 'data/train.jsonl, line 17'."""

    values: Mapping[str, Any]
    place: str | LinePlace
    problem: str | None = None  # why the row could not be read; it then has no values

    @property
    def where(self) -> str:
        """File and line or row, for error messages."""
        return str(self.place)


def _newlines_before(file: str, byte: int) -> int:
    """Counts from the nearest place before `byte` that was counted already, so that many rows of one large file can be
    named."""
    places = _counted.setdefault((file, size_bytes(file)), [(0, 0)])
    start, count = places[bisect.bisect_right(places, (byte, sys.maxsize)) - 1]
    left = byte - start
    with open_binary(file) as stream:
        stream.seek(start)
        while left > 0:
            chunk = stream.read(min(left, _COUNTING_CHUNK_BYTES))
            if not chunk:
                break
            count += chunk.count(b"\n")
            left -= len(chunk)
            if left > 0:
                bisect.insort(places, (byte - left, count))
    return count
