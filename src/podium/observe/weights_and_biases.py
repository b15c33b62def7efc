# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, behind the `wandb` extra. Project, entity, key and mode are those of its environment variables."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import yaml

from podium.errors import MissingExtraError
from podium.observe.metrics import StepMetrics

_PROJECT = "podium"
_ID_FILE = "wandb-id"


class WandbLogger:
    """One run of Weights & Biases for each run folder; a resumed run continues it. Metrics have the step of the run as
    their axis, so that steps which are repeated after a resume are logged again."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        wandb = _wandb()
        known = folder / _ID_FILE
        continues = resume_step is not None and known.is_file()
        id = known.read_text(encoding="utf-8") if continues else secrets.token_hex(8)
        recipe = folder / "recipe.yaml"  # has `${env:NAME}` and no values of environment variables
        self._table = wandb.Table
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT), name=folder.name, dir=str(folder), id=id,
            resume="allow", config=yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.is_file() else None,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )  # fmt: skip
        known.write_text(id, encoding="utf-8")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: StepMetrics) -> None:
        """Logs the metrics of one step."""
        self._run.log({"step": metrics.step, **metrics.values})

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text as a table of one row."""
        self._run.log({"step": step, name: self._table(columns=["step", "text"], data=[[step, text]])})

    def close(self) -> None:
        """Sends what is buffered."""
        self._run.finish()


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError(
            "run.loggers: `wandb` is asked for and not installed. Run `pip install podium[wandb]`, or remove it from "
            "run.loggers."
        ) from error
    return wandb
