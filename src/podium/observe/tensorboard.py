# SPDX-License-Identifier: Apache-2.0
"""TensorBoard event files in the run folder, behind the `tensorboard` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from podium.observe.metrics import StepMetrics
from podium.observe.tracking import Row


class TensorBoardTracker:
    """Writes to `tensorboard/` in the run folder. A resumed run hides events after its step, and one that begins again
    all of them."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        events = folder / "tensorboard"
        purge_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(log_dir=str(events), purge_step=purge_step if any(events.glob("*")) else None)
        recipe = folder / "recipe.yaml"
        if resume_step is None and recipe.is_file():
            self._writer.add_text("recipe", _as_code(recipe.read_text(encoding="utf-8")), 0)

    def log(self, metrics: StepMetrics) -> None:
        """Writes the metrics of one step."""
        for name, value in metrics.values.items():
            self._writer.add_scalar(name, value, metrics.step, walltime=metrics.time_s)

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text."""
        self._writer.add_text(name, text, step)

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Writes a table in Markdown, which TensorBoard shows as one."""
        if rows:
            columns = list(rows[0])
            lines = [columns, ["---"] * len(columns), *([_cell(row[column]) for column in columns] for row in rows)]
            self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def close(self, *, failed: bool) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


def _as_code(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _cell(value: str | float | None) -> str:
    """The value on one line, without what would end its cell."""
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ⏎ ").replace("\r", "")
