# SPDX-License-Identifier: Apache-2.0
"""Trackio, behind the `trackio` extra: a database on this machine, or what its environment variables name."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium.errors import TrackerError
from podium.observe.metrics import StepMetrics
from podium.observe.tracking import PROJECT, Row, new_run_id, note_run_id, recipe_of, run_id


class TrackioTracker:
    """One Trackio run for each run folder; a resumed run continues it. Steps that the run has already keep their first
    values."""

    def __init__(self, folder: Path) -> None:
        import trackio

        self._table = trackio.Table
        self._run, self._last_step = _start(folder, recipe_of(folder))

    def log(self, metrics: StepMetrics) -> None:
        """Logs the metrics of one step."""
        if metrics.step > self._last_step:
            self._run.log(dict(metrics.values), step=metrics.step)

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text as a table of one row."""
        self.table(step, name, [{"text": text}])

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Logs a table."""
        if rows and step > self._last_step:
            self._run.log({name: self._table(data=[dict(row) for row in rows])}, step=step)

    def close(self, *, failed: bool) -> None:
        """Writes what is buffered. Trackio has no mark for a run that failed."""
        self._run.finish()


def log_artifact(folder: Path, exported: Path) -> None:
    """Adds an exported model to the Trackio run of a run folder."""
    if run_id(folder, "trackio") is None:
        raise TrackerError(f"{folder} has no run at Trackio")
    run, _ = _start(folder, None)
    try:
        run.log_artifact(exported, name=f"{folder.name}-model", type="model")
    finally:
        run.finish()


def _start(folder: Path, config: dict[str, Any] | None) -> tuple[Any, int]:
    """The run, and the last step that it has; -1: none."""
    import trackio

    known = run_id(folder, "trackio")
    name = known or f"{folder.name}-{new_run_id()}"
    with contextlib.suppress(OSError):  # the run folder may be gone or full
        note_run_id(folder, "trackio", name)
    _silence()
    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT") or PROJECT, name=name, resume="allow", config=config, embed=False
    )
    # No public name says it. Without it, repeated steps are logged again.
    next_step = getattr(run, "_next_step", 0) if known is not None else 0
    return run, next_step - 1


def _silence() -> None:
    """Trackio prints to standard output, where the console of the run is, and has no switch for it. Redirecting the
    stream would take the console's lines too."""
    for name in ("trackio", "trackio.run", "trackio.utils", "trackio.sqlite_storage"):
        if name in sys.modules:
            vars(sys.modules[name])["print"] = lambda *texts, **options: None
