# SPDX-License-Identifier: Apache-2.0
"""Formats numbers and model output for people, in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def rate(per_second: float) -> str:
    """Tokens per second in three digits: 950, 45.1k, 1.20M."""
    if not math.isfinite(per_second):
        return "?"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(per_second) >= 0.9995 * size:
            return f"{three_digits(per_second / size)}{letter}"
    return f"{per_second:.0f}"


def three_digits(value: float) -> str:
    """1.23, 12.3, 123."""
    places = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{places}f}"


def duration(seconds: float) -> str:
    """0:09, 12:34, 1:02:03, 2d 03:04."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24:02d}:{minutes % 60:02d}"
    if hours:
        return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their cells in columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def curve(values: Sequence[float], scale: tuple[float, float], *, columns: int) -> str:
    """A curve in one line of text: means over equal parts of the values, as blocks between the two ends of the scale.
    A part without a finite value is a blank."""
    least, most = scale
    columns = min(columns, len(values))
    blocks = ""
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        finite = [value for value in part if math.isfinite(value)]
        if not finite:
            blocks += " "
            continue
        height = (sum(finite) / len(finite) - least) / (most - least) if most > least else 0.0
        blocks += _BLOCKS[min(len(_BLOCKS) - 1, max(0, int(height * len(_BLOCKS))))]
    return blocks


def one_line(text: str, *, limit: int = 200) -> str:
    """Model output made safe for a terminal: control characters are escaped, a long text is cut."""
    printable = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"
