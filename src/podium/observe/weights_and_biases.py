# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, behind the `wandb` extra. Project, entity, key and mode are those of its environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium.errors import TrackerError
from podium.observe.metrics import StepMetrics
from podium.observe.tracking import PROJECT, Row, new_run_id, note_run_id, recipe_of, run_id


class WandbTracker:
    """One run of Weights & Biases for each run folder; a resumed run continues it. Its steps are those of the run, so
    that W&B ignores the ones that it has already."""

    def __init__(self, folder: Path) -> None:
        import wandb

        self._table = wandb.Table
        self._run = _start(folder, recipe_of(folder))

    def log(self, metrics: StepMetrics) -> None:
        """Logs the metrics of one step."""
        self._run.log(dict(metrics.values), step=metrics.step)

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text as a table of one row."""
        self.table(step, name, [{"text": text}])

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Logs a table, with the step as its first column."""
        if rows:
            columns = list(rows[0])
            data = [[step, *(row[column] for column in columns)] for row in rows]
            self._run.log({name: self._table(columns=["step", *columns], data=data)}, step=step)

    def close(self, *, failed: bool) -> None:
        """Sends what is buffered."""
        self._run.finish(exit_code=int(failed))


def log_artifact(folder: Path, exported: Path) -> None:
    """Adds an exported model to the W&B run of a run folder."""
    import wandb

    run = _start(folder, None)
    try:
        artifact = wandb.Artifact(name=f"{folder.name}-model", type="model")
        artifact.add_dir(str(exported))
        run.log_artifact(artifact)
    finally:
        run.finish()


def _start(folder: Path, config: dict[str, Any] | None) -> Any:
    import wandb

    settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True)
    # A prompt for a key would wait for a terminal that shows the run.
    if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
        raise TrackerError("no API key. Run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline")
    id = run_id(folder, "wandb") or new_run_id()
    with contextlib.suppress(OSError):  # the run folder may be gone or full
        note_run_id(folder, "wandb", id)
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT), name=folder.name, dir=str(folder), id=id, resume="allow",
        config=config, settings=settings,
    )  # fmt: skip
