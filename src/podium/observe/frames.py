# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run as a table of pandas or polars, which are imported only here."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from podium.errors import MissingExtraError, RecipeError
from podium.observe.metrics import StepMetrics

FrameLibrary = Literal["pandas", "polars"]


def metrics_frame(lines: Sequence[StepMetrics], library: FrameLibrary | None = None) -> Any:
    """One row per step, in order: columns `step` and `time_s` (of the step's last line), then one for each metric. A
    step without a metric has NaN there. Default library: pandas, or polars where there is no pandas."""
    frames = importlib.import_module(_available(library))
    rows: dict[int, dict[str, float]] = {}
    for line in lines:
        rows.setdefault(line.step, {}).update({"time_s": line.time_s, **line.values})
    names = list(dict.fromkeys(["time_s", *(name for values in rows.values() for name in values)]))
    columns: dict[str, list[Any]] = {"step": list(rows)}
    columns |= {name: [values.get(name, math.nan) for values in rows.values()] for name in names}
    return frames.DataFrame(columns)


def _available(library: FrameLibrary | None) -> str:
    known = get_args(FrameLibrary)
    if library is not None and library not in known:
        raise RecipeError(f"library: {library!r} is none of {', '.join(known)}.")
    wanted = known if library is None else (library,)
    for name in wanted:
        if importlib.util.find_spec(name) is not None:
            return str(name)
    raise MissingExtraError(
        f"a table of metrics needs {' or '.join(wanted)}, which is not installed. Run `pip install {wanted[0]}`, or "
        "read lines with podium.observe.read_metrics."
    )
