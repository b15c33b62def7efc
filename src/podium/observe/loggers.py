# SPDX-License-Identifier: Apache-2.0
"""Loggers for metrics: the small protocol that a logger implements, and how the recipe's loggers are opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from podium.errors import RecipeError
from podium.observe.metrics import StepMetrics
from podium.recipe import plugins


@runtime_checkable
class Logger(Protocol):
    """Takes the records of rank 0. A plug-in is any callable that takes the run folder and returns one of these."""

    def log(self, metrics: StepMetrics) -> None:
        """Logs the metrics of one step."""

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text that belongs to a step, such as generated answers."""

    def close(self) -> None:
        """Flushes buffered records. Called once, also after a failure."""


def open_loggers(names: Sequence[str], folder: Path, *, resume_step: int | None = None) -> list[Logger]:
    """The loggers of `run.loggers`, in order. On failure none stays open."""
    opened: list[Logger] = []
    try:
        for index, name in enumerate(names):
            opened.append(_open(name, f"run.loggers.{index}", folder, resume_step))
    except BaseException:
        for logger in opened:
            logger.close()
        raise
    return opened


def _open(name: str, key: str, folder: Path, resume_step: int | None) -> Logger:
    if name == "tensorboard":
        from podium.observe.tensorboard import TensorBoardLogger

        return TensorBoardLogger(folder, resume_step=resume_step)
    logger = plugins.load(name, key)(folder)
    if not isinstance(logger, Logger):
        raise RecipeError(
            f"{key}: {name} returned a {type(logger).__name__}, which is not a logger. It is called with the run "
            "folder and returns an object with log(metrics), text(step, name, text) and close()."
        )
    return logger
