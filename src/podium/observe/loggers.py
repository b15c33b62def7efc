# SPDX-License-Identifier: Apache-2.0
"""Loggers for metrics: the small protocol that a logger implements, and how the recipe's loggers are opened."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from podium.errors import RecipeError, type_phrase
from podium.observe.metrics import StepMetrics
from podium.recipe import plugins


@runtime_checkable
class Logger(Protocol):
    """Takes the records of rank 0. A plug-in is any callable that takes the run folder and returns one of these, or a
    function of the metrics of a step, whose first parameter is called `metrics`."""

    def log(self, metrics: StepMetrics) -> None:
        """Logs the metrics of one step."""

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text that belongs to a step, such as generated answers."""

    def close(self) -> None:
        """Flushes buffered records. Called once, also after a failure."""


@dataclass(frozen=True, slots=True)
class OpenedLogger:
    """The plug-in of a logger that is open already: called with the run folder, it returns the logger."""

    logger: Logger

    def __call__(self, folder: Path) -> Logger:
        return self.logger


@dataclass(frozen=True, slots=True)
class FunctionLogger:
    """A function that is called with the metrics of every step, as a logger."""

    function: Callable[[StepMetrics], object]

    def log(self, metrics: StepMetrics) -> None:
        """Calls the function."""
        self.function(metrics)

    def text(self, step: int, name: str, text: str) -> None:
        """Texts are not passed on."""

    def close(self) -> None:
        """Nothing is buffered."""


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
    if name == "wandb":
        from podium.observe.weights_and_biases import WandbLogger

        return WandbLogger(folder, resume_step=resume_step)
    plugin = plugins.load(name, key)
    if _takes_metrics(plugin):
        return FunctionLogger(plugin)
    logger = plugin(folder)
    if not isinstance(logger, Logger):
        raise RecipeError(
            f"{key}: {name} returned {type_phrase(logger)}, which is not a logger. It is called with the run "
            "folder and returns an object with log(metrics), text(step, name, text) and close(). A function that is to "
            "be called with the metrics of every step has a parameter called `metrics`."
        )
    return logger


def _takes_metrics(plugin: Callable[..., Any]) -> bool:
    """Whether a plug-in is a function of metrics, by the name of its first parameter."""
    if isinstance(plugin, type):
        return False
    try:
        return next(iter(inspect.signature(plugin).parameters), None) == "metrics"
    except (TypeError, ValueError):  # it has no signature
        return False
