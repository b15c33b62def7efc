# SPDX-License-Identifier: Apache-2.0
"""TensorBoard event files in the run folder, behind the `tensorboard` extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from podium.errors import MissingExtraError
from podium.observe.metrics import StepMetrics


class TensorBoardLogger:
    """Writes to `tensorboard/` in the run folder. A resumed run hides events after its step."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = _summary_writer()(log_dir=str(folder / "tensorboard"), purge_step=purge_step)

    def log(self, metrics: StepMetrics) -> None:
        """Writes the metrics of one step."""
        for name, value in metrics.values.items():
            self._writer.add_scalar(name, value, metrics.step, walltime=metrics.time_s)

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text."""
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            "run.loggers: `tensorboard` is asked for and not installed. "
            "Run `pip install podium[tensorboard]`, or remove it from run.loggers."
        ) from error
    return SummaryWriter
