# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: to its metrics file, its loggers, the console, and as samples in its folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace

from podium.data.skipping import SkippedRow
from podium.observe import (
    Console,
    EvaluationView,
    Logger,
    MetricsFile,
    SampleView,
    StepMetrics,
    StepView,
    open_loggers,
)
from podium.recipe import Recipe
from podium.runs.folder import RunFolder
from podium.runs.learning_watch import LearningWatch
from podium.runs.result import end_status

# How many skipped rows the console names.
_SHOWN_SKIPPED = 5


def open_log(
    stack: ExitStack, recipe: Recipe, folder: RunFolder, console: Console, *, step: int, is_main: bool = True
) -> RunLog:
    """Opens the log of a run that begins after `step` steps, without an earlier attempt's records of later steps.
    `stack` closes it. Ranks other than the first write nothing."""
    loggers: Sequence[Logger] = ()
    metrics = None
    if is_main:
        loggers = open_loggers(recipe.run.loggers, folder.path, resume_step=step or None)
        for logger in loggers:
            stack.callback(logger.close)
        metrics = stack.enter_context(MetricsFile.resume(folder.metrics_file, step=step))
        folder.forget_after(step)
    return RunLog(recipe, folder, console=console, metrics=metrics, loggers=loggers, first_step=step)


class RunLog:
    """Log of one process. On every rank but the first, `metrics` is None and the others are silent."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        *,
        console: Console,
        metrics: MetricsFile | None,
        loggers: Sequence[Logger],
        first_step: int,
    ) -> None:
        self._recipe, self._folder = recipe, folder
        self._metrics, self._loggers, self.console = metrics, loggers, console
        self._first_step = first_step
        self._first_done: tuple[int, float] | None = None  # the first step of this process, and when it was done
        self._learning_watch = LearningWatch.of(recipe)
        self.last_loss: float | None = None
        self._skipped_places: set[str] | None = None  # read when a row is skipped

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes to the metrics file and all loggers."""
        metrics = StepMetrics(step=step, time_s=time.time(), values=values)
        if self._metrics is not None:
            self._metrics.append(metrics)
        for logger in self._loggers:
            logger.log(metrics)

    def step(self, view: StepView, values: Mapping[str, float]) -> None:
        """Logs a finished step: its metrics, a console line with the remaining time, and a warning if the last steps
        cannot learn."""
        self.write(view.step, values)
        self.last_loss = values.get("loss")
        num_done = view.step - self._first_step
        if num_done == 1:
            self._folder.update(status="running")
            self._folder.forget_overwritten()
        self.console.step(replace(view, eta_s=self._eta_s(view.step, values.get("step_s"))))
        warning = self._learning_watch.check(view.step, values)
        if warning is not None:
            self.console.warning(warning)

    def _eta_s(self, step: int, step_s: float | None) -> float | None:
        """Seconds until the last step, from the steps since the first one, with the evaluations and checkpoints between
        them. The first step has only its own time. What came before it (start-up, an evaluation) does not count."""
        now_s = time.perf_counter()
        if self._first_done is None:
            self._first_done = (step, now_s)
        else:
            first, first_s = self._first_done
            step_s = (now_s - first_s) / (step - first)
        return None if step_s is None else step_s * (self._recipe.steps - step)

    def evaluation(self, view: EvaluationView, values: Mapping[str, float], answers: Sequence[SampleView]) -> None:
        """Logs a finished evaluation: its metrics, its console output, and its answers in the run folder."""
        self.write(view.step, values)
        self.console.evaluation(view)
        if answers:
            self._folder.samples(view.step, [asdict(answer) for answer in answers])
            text = "\n\n".join(f"{each.prompt}\n-> {each.answer}" for each in view.samples)
            for logger in self._loggers:
                logger.text(view.step, "samples", text)

    def skipped_rows(self, step: int, rows: Sequence[SkippedRow]) -> None:
        """Names rows that were skipped up to `step`: all in the run folder, the first on the console. A row that is
        skipped again in a later epoch is named once."""
        if not rows or self._metrics is None:
            return
        if self._skipped_places is None:
            self._skipped_places = self._folder.skipped_places()
        known = self._skipped_places
        new = {row.place: row for row in rows if row.place not in known}
        for row in list(new.values())[: max(0, _SHOWN_SKIPPED - len(known))]:
            self.console.warning(f"skipped a row (data.on_error): {row.problem}")
        if len(known) < _SHOWN_SKIPPED < len(known) + len(new):
            self.console.warning(f"further skipped rows are named in {self._folder.skipped_file} only")
        known |= new.keys()
        self._folder.skipped_rows(step, [row.values() for row in new.values()])

    def finish(self, step: int) -> None:
        """Logs the end of the run: all steps are done, or a stop was requested."""
        self._folder.stop_file.unlink(missing_ok=True)
        self._folder.update(status=end_status(self._recipe, step), step=step)
