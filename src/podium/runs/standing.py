# SPDX-License-Identifier: Apache-2.0
"""How a run stands: its status, its step, its last figures and its speed. Reads only the end of the metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import RunFolderError
from podium.observe import StepMetrics
from podium.observe.metrics import read_last_metrics
from podium.runs.folder import RunFolder, is_held

HELDOUT = "heldout/"
# Metric of a step -> its name for people; the first that a step has is the method's own figure.
_FIGURES = {"reward/mean": "reward", "accuracy": "accuracy", "divergence": "divergence", "loss": "loss"}
# Of an evaluation, the first of these that there is.
_HELDOUT_FIGURES = {"heldout/score": "score", "heldout/loss": "loss"}
# Steps that the speed is averaged over.
_SPEED_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number, and the step it belongs to."""

    name: str
    value: float
    step: int

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStanding:
    """How a run stands. `status` is that of run.json, but `dead` where it should be running and no process holds the
    folder."""

    status: str
    step: int
    num_steps: int
    figures: tuple[Figure, ...]  # of the last step: the method's own first
    heldout: Figure | None  # of the last evaluation
    seconds_per_step: float | None

    @property
    def is_active(self) -> bool:
        """Whether a process runs it now."""
        return self.status in ("starting", "running")

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step; None if it is not running, or too young."""
        if not self.is_active or self.seconds_per_step is None:
            return None
        return self.seconds_per_step * (self.num_steps - self.step)


def standing_of(run: RunFolder) -> RunStanding:
    """Reads run.json, the recipe and the end of the metrics."""
    state = mapping_in(run)
    lines = read_last_metrics(run.metrics_file)
    steps = [line for line in lines if "step_s" in line.values]
    last = steps[-1] if steps else None
    figures = () if last is None else tuple(_figures(last, _FIGURES))
    evaluations = [line for line in lines if any(name in line.values for name in _HELDOUT_FIGURES)]
    heldout = next(_figures(evaluations[-1], _HELDOUT_FIGURES), None) if evaluations else None
    recent = steps[-_SPEED_STEPS:]
    return RunStanding(
        status=status_of(run.path, state),
        step=step_of(state, lines),
        num_steps=run.recipe(needs_environment=False).steps,
        figures=figures,
        heldout=heldout,
        seconds_per_step=sum(line.values["step_s"] for line in recent) / len(recent) if recent else None,
    )


def status_of(path: Path, state: Mapping[str, Any]) -> str:
    """The recorded status of a run or pipeline, or `dead` if it was killed."""
    status = str(state.get("status"))
    return "dead" if status in ("starting", "running") and not is_held(path) else status


def step_of(state: Mapping[str, Any], lines: Sequence[StepMetrics]) -> int:
    """The last known step: from the metrics of an active run, else from its end."""
    if state.get("status") in ("finished", "stopped") and "step" in state:
        return int(state["step"])
    return max((line.step for line in lines), default=0)


def mapping_in(run: RunFolder) -> Mapping[str, Any]:
    """The content of run.json; a damaged file is an error."""
    state: Any = run.state()
    if not isinstance(state, Mapping):
        raise RunFolderError(f"{run.path / 'run.json'} is damaged (it does not hold an object). Restore it.")
    return state


def changed_s(path: Path) -> float:
    """When a run or pipeline last wrote its state or its metrics, in seconds since 1970."""
    moments = [0.0]
    for name in ("run.json", "pipeline.json", "metrics.jsonl"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            moments.append((path / name).stat().st_mtime)
    return max(moments)


def moment(seconds: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _figures(line: StepMetrics, names: Mapping[str, str]) -> Iterator[Figure]:
    return (
        Figure(name=label, value=line.values[name], step=line.step)
        for name, label in names.items()
        if name in line.values
    )
