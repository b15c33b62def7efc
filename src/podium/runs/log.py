# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: to its metrics file, its loggers, the console, and as samples in its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial

from podium.data.skipping import SkippedRow
from podium.disk import disk_fault
from podium.engine.checkpoint_files import SaveFailure
from podium.errors import RunFolderError, counted
from podium.observe import (
    Console,
    EvaluationView,
    Logger,
    MetricsFile,
    SampleView,
    StepMetrics,
    StepView,
    TableLogger,
    close_loggers,
    open_loggers,
)
from podium.observe.line_files import LineFile
from podium.observe.machine import MachineFigures
from podium.observe.timeline import SlowEpisode, TimelineFile, TimelineSpan, timeline_file
from podium.recipe import Recipe
from podium.runs.disk_reports import ADVICE, ConsoleDiskReports, save_failure_text
from podium.runs.folder import RunFolder, row_lines
from podium.runs.learning_watch import LearningWatch
from podium.runs.result import end_status

# How many skipped rows the console names.
_SHOWN_SKIPPED = 5
# Answers of an evaluation in the tables of loggers, and characters of a cell. samples.jsonl has everything.
_TABLE_ROWS, _CELL_LENGTH = 100, 10_000
# Between two figures of the machine, at least.
_MACHINE_S = 1.0


def open_log(
    stack: ExitStack, recipe: Recipe, folder: RunFolder, console: Console, *, step: int, rank: int = 0
) -> RunLog:
    """Opens the log of a run that begins after `step` steps, without an earlier attempt's records of later steps.
    `stack` closes it. Ranks other than the first write their own timeline, and nothing else."""
    loggers: Sequence[Logger] = ()
    metrics, reports = None, ConsoleDiskReports(console)
    machine: MetricsFile | None = None
    if rank == 0:
        loggers = open_loggers(recipe.run.loggers, folder.path, resume_step=step or None, warn=console.warning)
        stack.push(partial(_close, loggers))
        metrics = stack.enter_context(MetricsFile.resume(folder.metrics_file, step=step, reports=reports))
        machine = stack.enter_context(MetricsFile.resume(folder.machine_file, step=step, reports=reports))
        folder.forget_after(step)
    log = RunLog(
        recipe, folder, console=console, metrics=metrics, loggers=loggers, first_step=step, reports=reports, rank=rank,
        machine=machine,
    )  # fmt: skip
    stack.callback(log.close)
    return log


def _close(
    loggers: Sequence[Logger], kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> None:
    close_loggers(loggers, failed=error is not None)


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
        reports: ConsoleDiskReports | None = None,
        rank: int = 0,
        machine: MetricsFile | None = None,
    ) -> None:
        """`machine`: gets figures of this machine with the steps."""
        self._recipe, self._folder = recipe, folder
        self.disk_reports = reports or ConsoleDiskReports(console)
        self._samples = LineFile(folder.samples_file, self.disk_reports)
        self._skipped = LineFile(folder.skipped_file, self.disk_reports)
        self._timeline = TimelineFile(timeline_file(folder.path, rank), self.disk_reports)
        self._snapshot = {} if metrics is None else folder.snapshot()
        self._holding = ExitStack()  # of the folder that was made again
        self._failed_loggers: set[str] = set()
        self._is_announced = self._save_is_failing = False
        self._metrics, self._loggers, self.console = metrics, loggers, console
        self._machine_file = machine
        self._machine = None if machine is None else MachineFigures(every_s=_MACHINE_S)
        self._first_step = first_step
        self._first_done: tuple[int, float] | None = None  # the first step of this process, and when it was done
        self._learning_watch = LearningWatch.of(recipe)
        self.last_loss: float | None = None
        self._skipped_places: set[str] | None = None  # read when a row is skipped

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes to the metrics file and all loggers."""
        metrics = _stamped(step, values)
        if self._metrics is not None:
            self._metrics.append(metrics)
        for logger in self._loggers:
            self._use(logger, lambda logger=logger: logger.log(metrics))  # type: ignore[misc]

    def _write_machine(self, step: int) -> None:
        """What the machine does, if the last figures are old enough. They are no metrics of the run: no two runs on the
        same weights and data have the same."""
        if self._machine is None or self._machine_file is None:
            return
        figures = self._machine.due()
        if figures:
            self._machine_file.append(_stamped(step, figures))

    def spans(self, spans: Iterable[TimelineSpan]) -> None:
        """Adds spans to the timeline of the run."""
        self._timeline.append(spans)

    def slowest(self, step: int, episodes: Sequence[SlowEpisode]) -> None:
        """Adds the slowest episodes of a step to the timeline."""
        self._timeline.append_slowest(step, episodes)

    def _use(self, logger: Logger, write: Callable[[], None]) -> None:
        """Writes to a logger. A fault of the disk costs it a record, and not the run."""
        try:
            write()
        except OSError as error:
            fault = disk_fault(error)
            if fault is None:
                raise
            if type(logger).__name__ not in self._failed_loggers:
                self._failed_loggers.add(type(logger).__name__)
                self.console.warning(f"{type(logger).__name__} cannot write: {fault}. Some of its records are missing.")

    def step(self, view: StepView, values: Mapping[str, float]) -> None:
        """Logs a finished step: its metrics, a console line with the remaining time, and a warning if the last steps
        cannot learn."""
        self.write(view.step, values)
        self._write_machine(view.step)
        self.last_loss = values.get("loss")
        if not self._is_announced:
            self._announce()
        self.console.step(replace(view, eta_s=self._eta_s(view.step, values.get("step_s"))))
        warning = self._learning_watch.check(view.step, values)
        if warning is not None:
            self.console.warning(warning)

    def _announce(self) -> None:
        """Notes in run.json that the run has begun. A disk that does not take it is tried again after the next
        step."""
        try:
            self._folder.update(status="running")
            self._folder.forget_overwritten()
        except OSError as error:
            fault = disk_fault(error)
            if fault is None:
                raise
            self.disk_reports.cannot_write(self._folder.path, fault)
            return
        self._is_announced = True
        self.disk_reports.writes_again(self._folder.path)
        if self._metrics is not None:
            self._snapshot = self._folder.snapshot()

    def restore_folder(self) -> bool:
        """Makes the run folder again if somebody has removed it, with recipe, state and metrics. Returns whether that
        happened: then no checkpoint is left. Ranks other than the first return False."""
        if not self._folder.is_removed(self._snapshot):
            return False
        try:
            self._folder.restore(self._snapshot)
        except OSError as error:
            fault = disk_fault(error)
            if fault is None:
                raise RunFolderError(
                    f"the run folder {self._folder.path} was removed, and cannot be made again: "
                    f"{error.strerror or error}. Nothing can be saved there."
                ) from error
            self.disk_reports.cannot_write(self._folder.path, fault)
            return False
        self._holding.close()
        self._holding.enter_context(self._folder.held())
        self.console.warning(
            f"somebody removed the run folder {self._folder.path} while the run uses it. It is made again with recipe, "
            "state and metrics; checkpoints, samples and records of steps are lost. A new checkpoint is written next."
        )
        if self._metrics is not None:
            self._metrics.restore()
        for file in (self._samples, self._skipped, self._timeline):
            file.restore()
        return True

    def save_failed(self, failure: SaveFailure, *, newest: int | None, retry_step: int) -> None:
        """Warns that a checkpoint could not be written, and says when it is tried again."""
        self._save_is_failing = True
        self.console.warning(
            f"{save_failure_text(failure, newest=newest)} Training goes on, and step {retry_step} tries again. {ADVICE}"
        )

    def saved(self, step: int) -> None:
        """Notes that a checkpoint is whole, if one before it failed."""
        if self._save_is_failing:
            self._save_is_failing = False
            self.console.note(f"the checkpoint of step {step} is written: checkpoints can be saved again")

    def close(self) -> None:
        """Tries once more to write what waits, and closes the files."""
        for file in (self._samples, self._skipped, self._timeline):
            file.close()
        self._holding.close()

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
            self._samples.append(row_lines(view.step, [asdict(answer) for answer in answers]))
            for logger in self._loggers:
                self._use(logger, partial(_log_samples, logger, view, answers))

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
        self._skipped.append(row_lines(step, [row.values() for row in new.values()]))

    def finish(self, step: int) -> None:
        """Logs the end of the run: all steps are done, or a stop was requested."""
        self.restore_folder()
        if self._metrics is not None and self._metrics.num_waiting:
            self.console.warning(
                f"{counted(self._metrics.num_waiting, 'line')} of {self._folder.metrics_file} could not be written"
            )
        self._folder.stop_file.unlink(missing_ok=True)
        self._folder.update(status=end_status(self._recipe, step), step=step)


def _log_samples(logger: Logger, view: EvaluationView, answers: Sequence[SampleView]) -> None:
    """The first answers as a table, or those that the console shows as a text."""
    if isinstance(logger, TableLogger):
        rows = [
            {name: value[:_CELL_LENGTH] if isinstance(value, str) else value for name, value in asdict(answer).items()}
            for answer in answers[:_TABLE_ROWS]
        ]
        logger.table(view.step, "samples", rows)
    else:
        logger.text(view.step, "samples", "\n\n".join(f"{each.prompt}\n-> {each.answer}" for each in view.samples))


def _stamped(step: int, values: Mapping[str, float]) -> StepMetrics:
    return StepMetrics(step=step, time_s=time.time(), values=values)
