# SPDX-License-Identifier: Apache-2.0
"""Exported models as artifacts of a run at its trackers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, assert_never, get_args

from podium.errors import RecipeError, TrackerError
from podium.observe.tracking import error_text, require_tracker

ArtifactTracker = Literal["wandb", "mlflow", "trackio"]


def artifact_trackers(loggers: Sequence[str]) -> list[ArtifactTracker]:
    """Those of a run's loggers that keep artifacts. Raises an error if there is none, or one is not installed."""
    found = [tracker for tracker in get_args(ArtifactTracker) if tracker in loggers]
    if not found:
        known = ", ".join(get_args(ArtifactTracker))
        raise RecipeError(f"run.loggers: the run has no tracker that keeps artifacts ({known}).")
    for tracker in found:
        require_tracker(tracker, "run.loggers")
    return found


def log_export(trackers: Sequence[ArtifactTracker], folder: Path, exported: Path) -> None:
    """Adds an exported model to the run of a run folder at these trackers."""
    for tracker in trackers:
        try:
            _log_artifact(tracker, folder.absolute(), exported.absolute())
        except Exception as error:
            raise TrackerError(f"{exported} is written, but {tracker} does not take it: {error_text(error)}") from error


def _log_artifact(tracker: ArtifactTracker, folder: Path, exported: Path) -> None:
    match tracker:
        case "wandb":
            from podium.observe import weights_and_biases

            weights_and_biases.log_artifact(folder, exported)
        case "mlflow":
            from podium.observe import mlflow_runs

            mlflow_runs.log_artifact(folder, exported)
        case "trackio":
            from podium.observe import trackio_runs

            trackio_runs.log_artifact(folder, exported)
        case other:
            assert_never(other)
