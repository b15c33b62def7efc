# SPDX-License-Identifier: Apache-2.0
"""Loggers for metrics: the small protocol that a logger implements, and how the recipe's loggers are opened."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, assert_never, runtime_checkable

from podium.errors import RecipeError, type_phrase
from podium.observe.background import BackgroundLogger
from podium.observe.metrics import StepMetrics
from podium.observe.tracking import TRACKERS, Row, Tracker, require_tracker
from podium.recipe import plugins
from podium.recipe.schema import TrackerName


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


@runtime_checkable
class TableLogger(Protocol):
    """A logger may have this method too. Without it, a table reaches the logger as a text."""

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Logs rows that belong to a step, such as the answers of an evaluation: column -> text, number or None."""


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


def open_loggers(
    names: Sequence[str],
    folder: Path,
    *,
    resume_step: int | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> list[Logger]:
    """The loggers of `run.loggers`, in order. On failure none stays open. Trackers are behind a thread each, and say
    through `warn` what fails; what a plug-in raises is raised."""
    opened: list[Logger] = []
    try:
        for index, name in enumerate(names):
            opened.append(_open(name, f"run.loggers.{index}", folder, resume_step, warn))
    except BaseException:
        close_loggers(opened, failed=True)
        raise
    return opened


def close_loggers(loggers: Sequence[Logger], *, failed: bool) -> None:
    """Closes all loggers, also if one raises. Trackers send what waits at the same time. `failed`: the run did."""
    for logger in loggers:
        if isinstance(logger, BackgroundLogger):
            logger.begin_close(failed=failed)
    with ExitStack() as stack:
        for logger in reversed(loggers):
            stack.callback(logger.close)


def _open(name: str, key: str, folder: Path, resume_step: int | None, warn: Callable[[str], None]) -> Logger:
    for tracker in TRACKERS:
        if name == tracker:
            require_tracker(tracker, key)
            # The folder is used later, and by processes of trackers that were started in another current folder.
            opening = partial(_open_tracker, tracker, folder.absolute(), resume_step)
            return BackgroundLogger(name, opening, warn=warn)
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


def _open_tracker(name: TrackerName, folder: Path, resume_step: int | None) -> Tracker:
    match name:
        case "tensorboard":
            from podium.observe.tensorboard import TensorBoardTracker

            return TensorBoardTracker(folder, resume_step=resume_step)
        case "wandb":
            from podium.observe.weights_and_biases import WandbTracker

            return WandbTracker(folder)
        case "mlflow":
            from podium.observe.mlflow_runs import MlflowTracker

            return MlflowTracker(folder)
        case "trackio":
            from podium.observe.trackio_runs import TrackioTracker

            return TrackioTracker(folder)
        case other:
            assert_never(other)


def _takes_metrics(plugin: Callable[..., Any]) -> bool:
    """Whether a plug-in is a function of metrics, by the name of its first parameter."""
    if isinstance(plugin, type):
        return False
    try:
        return next(iter(inspect.signature(plugin).parameters), None) == "metrics"
    except (TypeError, ValueError):  # it has no signature
        return False
