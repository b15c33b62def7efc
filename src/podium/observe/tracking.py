# SPDX-License-Identifier: Apache-2.0
"""What the trackers of experiments have in common: their packages, the recipe as parameters, and the id of the run."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args

import yaml

from podium.errors import MissingExtraError, PodiumError
from podium.observe.metrics import StepMetrics
from podium.recipe.schema import TrackerName

TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)
PROJECT = "podium"
"""Project or experiment where the environment names no other."""

Row = Mapping[str, str | float | None]
"""One row of a table of samples."""

_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SECRET_IN_URL = re.compile(r"(://)[^/\s]+@|([?&][\w-]*(?:key|token|secret|password)=)[^&\s]+", re.IGNORECASE)
_SHORTEST_SECRET = 6
_MOST_SHOWN = 300


class Tracker(Protocol):
    """One run at a tracker. Only one thread calls it; what it raises is retried or dropped."""

    def log(self, metrics: StepMetrics) -> None:
        """Logs the metrics of one step."""

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text that belongs to a step."""

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Logs rows that belong to a step. All have the same columns."""

    def close(self, *, failed: bool) -> None:
        """Sends what is buffered, and marks the run as finished or failed."""


def require_tracker(name: TrackerName, key: str) -> None:
    """Raises an error if the package of a tracker is not installed. Imports nothing."""
    try:
        is_installed = importlib.util.find_spec(name) is not None
    except ValueError:  # imported already, without a spec
        is_installed = True
    if not is_installed:
        raise MissingExtraError(
            f"{key}: `{name}` is asked for and not installed. Run `pip install podium[{name}]`, or remove it from "
            "run.loggers."
        )


def run_id(folder: Path, tracker: TrackerName) -> str | None:
    """The tracker's id of a run, as an earlier process has noted it."""
    try:
        return _id_file(folder, tracker).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def note_run_id(folder: Path, tracker: TrackerName, id: str) -> None:
    """Notes the tracker's id of a run in the run folder, for a resumed run."""
    _id_file(folder, tracker).write_text(id, encoding="utf-8")


def new_run_id() -> str:
    """An id for a tracker that takes it from its caller."""
    return secrets.token_hex(8)


def recipe_of(folder: Path) -> dict[str, Any]:
    """The resolved recipe of a run. It has `${env:NAME}` and no values of environment variables."""
    try:
        values = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    except OSError:
        return {}
    return dict(values)


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as path of keys -> text, for example `data.train.0.path`. Empty lists and maps are kept."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, list):
            value = {str(index): each for index, each in enumerate(value)} or value
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{path}.")
        else:
            flat[path] = str(value)
    return flat


def error_text(error: BaseException, environment: Mapping[str, str] = os.environ) -> str:
    """An error of a tracker in one line without secrets: no passwords or tokens of URLs, and no values of environment
    variables whose names sound secret."""
    text = " ".join(str(error).split())
    if not isinstance(error, PodiumError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    for name, value in environment.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_VARIABLE.search(name):
            text = text.replace(value, "***")
    text = _SECRET_IN_URL.sub(lambda match: f"{match[1]}***@" if match[1] else f"{match[2]}***", text)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def _id_file(folder: Path, tracker: TrackerName) -> Path:
    return folder / f"{tracker}-id"
