# SPDX-License-Identifier: Apache-2.0
"""SpmdRun: the object that an SPMD program receives. It hands out steps and takes reports. Between steps it handles
metrics, evaluation, checkpoints and stopping when they are due."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from podium.data.documents import Document, Example, SplitExamples
from podium.data.examples import shape_of
from podium.data.loader import DocumentCounts, LoaderState, StepLoader, encode
from podium.data.source_names import mixed_names
from podium.data.splitting import split_step
from podium.engine.checkpoint import CheckpointWriter
from podium.engine.checkpoint_files import Extras, SaveFailure, joined_state
from podium.engine.mesh import Mesh
from podium.engine.resuming import checkpoint_shards
from podium.engine.schedule import learning_rate
from podium.engine.train_step import PendingReport, StepReport, TrainEngine
from podium.errors import CheckpointError, TrainingDivergedError
from podium.models.cost import ModelCost
from podium.observe import ShownMetric, StepView, Stopwatch
from podium.observe.timeline import rank_name, spans_of
from podium.recipe import SpmdRecipe
from podium.runs.disk_reports import last_save_error
from podium.runs.example_files import KeptExample, write_examples
from podium.runs.folder import RunFolder
from podium.runs.guards import DivergenceGuard
from podium.runs.log import RunLog
from podium.runs.milestones import Milestones
from podium.runs.result import RunResult, end_status, left_early
from podium.spmd.by_source import Unit, source_metrics
from podium.spmd.evaluation import Evaluation, Evaluator, HeldoutMeasure
from podium.spmd.step_snapshots import StepSnapshots
from podium.spmd.steps import TrainStep

Averages = Callable[[Mapping[str, float], int], Mapping[str, float]]
"""Sums of a step's tally over all ranks, and its number of examples -> metrics."""
RecipeT_co = TypeVar("RecipeT_co", bound=SpmdRecipe, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpmdProgress:
    """Where an SPMD run begins: at step 0, or after the steps of a checkpoint."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    loader: LoaderState | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpmdParts(Generic[RecipeT_co]):
    """All parts of an SPMD run."""

    recipe: RecipeT_co
    folder: RunFolder
    engine: TrainEngine
    loader: StepLoader | None  # None: the run only evaluates
    evaluator: Evaluator | None
    writer: CheckpointWriter
    log: RunLog
    cost: ModelCost
    peak_flops: float
    max_tokens: int
    hard_cap: bool
    stop_requested: Callable[[], bool]
    watch: Stopwatch
    check_endings: Callable[[Sequence[Document]], str | None]  # documents -> a warning if none ends with a stop token
    show_examples: Callable[[Sequence[Example]], Sequence[KeptExample]]  # as people read them
    milestones: Milestones
    snapshots: StepSnapshots
    evaluates_only: bool = False


class SpmdRun(Generic[RecipeT_co]):
    """Every rank has one, and all do the same at the same step."""

    def __init__(self, parts: SpmdParts[RecipeT_co], progress: SpmdProgress) -> None:
        self._parts, self.recipe, self.engine = parts, parts.recipe, parts.engine
        self._mesh: Mesh = parts.engine.mesh
        self._step = progress.step
        self._skipped = progress.skipped
        self._loader_state = progress.loader
        self._pending: tuple[TrainStep, PendingReport, float] | None = None
        self._last_record = time.perf_counter()
        self._stopping = False
        self._last_loss: float | None = None
        self._evaluation: Evaluation | None = None
        self._is_finished = False
        self._before_steps = contextlib.ExitStack()
        self._is_ending = False
        self._save_failure: SaveFailure | None = None  # of the last save
        self._is_folder_lost = False  # rank 0 had to make the run folder again, and the others do not know yet
        self._recorded_updates = 0  # optimizer steps of the engine when the last step was recorded
        self._source_names = mixed_names(parts.recipe.data.train)
        self._unit: Unit = "tokens" if shape_of(parts.recipe) == "documents" else "rows"
        recipe, folder, self._log = parts.recipe, parts.folder, parts.log
        self._milestones, self._snapshots = parts.milestones, parts.snapshots
        self._stored_recipe = recipe.stored_values()
        self._guard = DivergenceGuard(
            recipe.optimizer.max_skipped_in_a_row, folder.metrics_file, in_a_row=progress.skipped_in_a_row
        )

    @property
    def stop_requested(self) -> bool:
        """Whether this rank should stop. The train step shares this with all ranks, so that they stop at the same
        step."""
        return self._parts.stop_requested()

    @property
    def is_fresh(self) -> bool:
        """Whether the weights are still the initial weights of the run."""
        return self._step == 0

    @property
    def max_tokens(self) -> int:
        """Most tokens of one forward on this rank."""
        return self._parts.max_tokens

    @contextmanager
    def before_steps(self) -> Iterator[None]:
        """For a program: its time until it asks for steps belongs to the start. It opens references and teachers."""
        with self._before_steps:
            self._before_steps.enter_context(self._parts.watch.span("start-up"))
            yield

    @contextmanager
    def preparing(self, what: str) -> Iterator[Callable[[str], None]]:
        """A context for work before the first step, which is reported and timed; yields a function that reports
        progress."""
        console = self._parts.log.console
        with self._parts.watch.span("preparation"):
            console.note(what)
            console.doing(what)
            yield lambda progress: console.doing(f"{what}: {progress}")
            console.doing(None)

    def steps(
        self, measure: HeldoutMeasure, averages: Averages | None = None, *, shown: Sequence[ShownMetric] = ()
    ) -> Iterator[TrainStep]:
        """Yields the remaining steps. `measure` computes metrics of held-out examples; `averages` turns the sums of a
        step's tally into metrics, of which the console shows `shown` before the loss. A run that only evaluates does so
        once, and yields no step."""
        self._before_steps.close()
        self._measure, self._averages, self._shown = measure, averages, shown
        if self._parts.evaluates_only:
            self._evaluate()
            self._is_finished = True
            return
        if self._milestones.starts_with_save(self._step):
            self._save()
        if self._milestones.starts_with_evaluation(self._step):
            self._evaluate()
        self._last_record = time.perf_counter()
        while self._step < self.recipe.steps and not self._stopping:
            with self._parts.watch.span("data"):
                step = self._next_step()
            with self._parts.watch.span("compute"):
                yield step
        self._finish()

    def record(self, step: TrainStep, report: PendingReport) -> None:
        """Takes a step's report. On CUDA the numbers of a step are read one step later, so that the host never waits
        for the device. An evaluation or checkpoint that is due at this step waits for them. A snapshot begins at
        once, and is whole when they are read."""
        now = time.perf_counter()
        elapsed, self._last_record = now - self._last_record, now
        before, self._pending = self._pending, (step, report, elapsed)
        self._step, self._loader_state = step.number, step.ready.state
        self._recorded_updates = self.engine.num_optimizer_steps
        self._resolve(before)
        save, evaluate = self._milestones.save_is_due(step.number), self._milestones.evaluation_is_due(step.number)
        reads_now = self._mesh.device.type != "cuda" or evaluate or save or step.number == self.recipe.steps
        if reads_now:
            self._flush()
        if save:
            self._save()
        if evaluate:
            self._evaluate()
        if step.number < self.recipe.steps:  # the last one is saved at once
            self._snapshots.begin(step)
            if reads_now:
                self._snapshots.complete(self._extras)
        self._last_record = time.perf_counter() if evaluate or save else self._last_record

    def save_before_failing(self, all_failed_after: Callable[[int], bool]) -> None:
        """Saves the last recorded step of a run that fails, as Ctrl-C would, if all ranks failed after it and none has
        changed its weights since. Collective if they have. Raises an error if this rank's weights are no longer those
        of that step."""
        step = self._step
        if self._milestones.saved_step == step:
            return
        if self.engine.num_optimizer_steps != self._recorded_updates:
            raise CheckpointError(f"the weights of step {step} were already updated by the step that failed")
        if not all_failed_after(step):
            return
        self._log.console.note(f"the run failed after step {step}: saving it")
        with contextlib.suppress(TrainingDivergedError):
            self._flush()
        self._save_last()
        self._mesh.barrier()  # no rank ends before rank 0 has the checkpoint in place

    def require_finished(self) -> None:
        """Raises an error if the program left the loop over `steps` early: its last steps are not saved."""
        if not self._is_finished:
            raise left_early(self.recipe.program, self._step)

    def result(self) -> RunResult:
        """The result of the run as the API returns it."""
        evaluation = self._evaluation
        return RunResult(
            folder=self._parts.folder.path,
            status=end_status(self.recipe, self._step),
            step=self._step,
            loss=self._last_loss,
            heldout_loss=evaluation.heldout_loss if evaluation else None,
            score=evaluation.score if evaluation else None,
            time=self._parts.watch.summary(),
        )

    def _next_step(self) -> TrainStep:
        assert self._parts.loader is not None
        ready = next(self._parts.loader)
        plan = split_step(
            [example.num_inputs for example in ready.examples],
            num_ranks=self._mesh.data_ranks,
            max_tokens=self._parts.max_tokens,
            cost=self._parts.cost.per_sequence,
            hard_cap=self._parts.hard_cap,
        )
        number = self._step + 1
        self._seed(number)
        self.engine.save_failed = isinstance(self._parts.writer.state, SaveFailure) or self._is_folder_lost
        return TrainStep(
            number=number,
            lr=learning_rate(self.recipe.optimizer, number, self.recipe.steps),
            ready=ready,
            split=SplitExamples(
                examples=ready.examples,
                rows=tuple(tuple(part.tolist()) for part in plan.rows(self._mesh.data_rank)[0]),
                sources=self._source_names,
            ),
            imbalance=plan.imbalance,
        )

    def _seed(self, number: int) -> None:
        """Seeds random streams by (seed, step, rank of the tokens). They need no saving, and a resumed run samples the
        same numbers."""
        key = np.random.SeedSequence([self.recipe.run.seed, number, self._mesh.token_rank]).generate_state(2)
        torch.manual_seed(int(key[0]))
        random.seed(int(key[1]))
        np.random.seed(int(key[1]))

    def _flush(self) -> None:
        """Reads the pending report."""
        before, self._pending = self._pending, None
        self._resolve(before)

    def _resolve(self, recorded: tuple[TrainStep, PendingReport, float] | None) -> None:
        """Reads a step's report: metrics, the console, the non-finite guard, and whether all ranks stop."""
        if recorded is None:
            return
        step, pending, elapsed = recorded
        report = pending.resolve()
        self._skipped += report.skipped
        self._last_loss = report.loss
        self._stopping = self._stopping or report.stop_requested
        if self._mesh.is_main:
            self._publish(step, report, elapsed)
        self._log.skipped_rows(step.number, step.ready.skipped)
        self._note_time()
        if report.save_failed:
            self._notice_failed_save(step.number)
        self._guard.check(step.number, is_skipped=report.skipped > 0, suspect="data")
        self._snapshots.complete(self._extras)

    def _publish(self, step: TrainStep, report: StepReport, elapsed: float) -> None:
        parts, counts, lengths = self._parts, step.ready.counts, step.lengths
        num_inputs = sum(lengths)
        flops = parts.cost.training_flops(lengths, step.global_tokens)
        mfu = flops / elapsed / (parts.peak_flops * self._mesh.world)
        values = {
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": step.lr,
            "step_s": elapsed,
            "data_wait_s": step.ready.wait_s,
            "tokens": float(num_inputs),
            "trained_tokens": float(step.global_tokens),
            "documents": float(len(lengths)),
            "rows": float(step.num_examples),
            "tokens_per_s": num_inputs / elapsed,
            "mfu": mfu,
            "micro_steps": float(len(step.split.rows)),
            "imbalance": step.imbalance,
            "skipped": float(report.skipped),
            "skipped_total": float(self._skipped),
            "documents_truncated": float(counts.truncated),
            "documents_dropped": float(counts.dropped_overlong + counts.dropped_untrained + counts.dropped_by_map),
            "epoch": float(min(counts.epochs, default=0)),
            **({"rows_skipped": float(counts.skipped)} if self.recipe.data.on_error == "skip" else {}),
            **(self._averages(report.sums, step.num_examples) if self._averages is not None else {}),
            **source_metrics(step.split, report.sums, self._unit),
            **(report.routers.metrics() if report.routers is not None else {}),
        }
        if step.number == 1:
            self._warn_of_endings(step)
            self._keep_examples(step)
            assert parts.loader is not None
            for note in parts.loader.notes:
                parts.log.console.note(note)
        if step.number in (1, self.recipe.steps):
            self._warn_of_losses(counts)
        view = StepView(
            step=step.number,
            num_steps=self.recipe.steps,
            loss=report.loss,
            lr=step.lr,
            tokens_per_s=num_inputs / elapsed,
            mfu=mfu,
            grad_norm=report.grad_norm,
            num_skipped=self._skipped,
            own=tuple(each.fact(values) for each in self._shown),
        )
        self._is_folder_lost = self._log.restore_folder() or self._is_folder_lost
        self._log.step(view, values)
        if parts.writer.state == "written":  # rank 0 writes last
            self._log.saved(self._milestones.saved_step)
        if report.skipped:
            parts.log.console.warning(
                f"step {step.number} skipped: loss {report.loss}, gradient norm {report.grad_norm}"
            )

    def _warn_of_losses(self, counts: DocumentCounts) -> None:
        """Warns about truncated or dropped documents at the beginning and at the end, because they are easily
        overlooked."""
        lost = {
            f"truncated to data.max_length {self.recipe.data.max_length}": counts.truncated,
            "dropped as longer than data.max_length": counts.dropped_overlong,
            "dropped without a trained token": counts.dropped_untrained,
            "dropped by the source's map": counts.dropped_by_map,
            "skipped because they cannot be used (data.on_error)": counts.skipped,
        }
        for what, count in lost.items():
            if count:
                self._parts.log.console.warning(f"{count} of {counts.read} rows read so far were {what}")

    def _warn_of_endings(self, step: TrainStep) -> None:
        """Warns if the first step trains no stop token, unless every document may have been truncated."""
        documents = [document for example in step.split.examples for document in example.documents]
        if len(step.split.examples) > step.ready.counts.truncated:
            warning = self._parts.check_endings(documents)
            if warning is not None:
                self._parts.log.console.warning(f"data.train: {warning}")

    def _keep_examples(self, step: TrainStep) -> None:
        """Writes the first rows as they are trained on. A run that cannot goes on."""
        path = self._parts.folder.examples_file
        try:
            write_examples(path, self._parts.show_examples(step.split.examples))
        except OSError as error:
            self._parts.log.console.warning(f"{path} cannot be written ({error.strerror or error}): it is left out")

    def _evaluate(self) -> None:
        parts = self._parts
        assert parts.evaluator is not None
        with parts.watch.span("evaluation"):
            parts.log.console.doing("evaluating")
            self._evaluation = evaluation = parts.evaluator.run(self._step, self._measure)
            self._milestones.evaluated_step = self._step
            parts.log.console.doing(None)
        if not self._mesh.is_main:
            return
        if self._milestones.saved_step == self._step and self._step > 0 and not parts.evaluates_only:
            self._grade(evaluation.heldout_loss)
        values = {f"heldout/{name}": value for name, value in evaluation.measured.items()}
        if evaluation.score is not None:
            values["heldout/score"] = evaluation.score
        self._log.evaluation(evaluation.view, values, evaluation.answers)

    def _save(self) -> None:
        if self._milestones.saved_step == self._step or self._loader_state is None:
            return
        with self._parts.watch.span("checkpoint"):
            self._end_save()
            extras = self._extras(self._step, self._loader_state, self.engine.optimizer.missed_updates())
            self._parts.writer.save(self._step, checkpoint_shards(self.engine), extras)
            self._milestones.saving(self._step)
            if not self.recipe.checkpoint.background:
                self._end_save()

    def _end_save(self, *, give_up: bool = False) -> None:
        """Waits on all ranks until the save in flight has ended. Training goes on after one that the disk did not
        take: a later step tries again."""
        if not self._milestones.is_saving:
            return
        state = joined_state(self._mesh.gather(self._parts.writer.finish(give_up=give_up)))
        if not isinstance(state, SaveFailure):
            self._save_failure = None
            self._milestones.save_is_whole()
            self._log.saved(self._milestones.saved_step)
            return
        self._save_failure, retry_step = state, self._milestones.save_failed(self._step)
        if not self._is_ending:
            self._log.save_failed(state, newest=self._milestones.whole_step, retry_step=retry_step)

    def _notice_failed_save(self, step: int) -> None:
        """A rank said with its step that its part of a checkpoint failed, or that the run folder is gone. All ranks
        have the same report, so all are here."""
        if self._milestones.is_saving and self._milestones.saved_step < step:
            self._end_save(give_up=True)
        if any(self._mesh.gather(self._is_folder_lost)):
            self._milestones.forget_saved(self._step)
        self._is_folder_lost = False

    def _save_last(self) -> None:
        """Saves the last step, in a second attempt if need be. Raises an error if it is not saved: its work would be
        lost."""
        self._is_ending = True
        with self._parts.watch.span("checkpoint"):
            self._save()
            self._end_save()
            is_lost = self._is_folder_lost or self._log.restore_folder()
            if any(self._mesh.gather(is_lost)):
                self._milestones.forget_saved(self._step)
            self._save()
            self._end_save()
        if self._save_failure is not None:
            raise last_save_error(self._save_failure, newest=self._milestones.whole_step)

    def _grade(self, loss: float) -> None:
        """Records the held-out loss of the last saved step in its checkpoint."""
        fault = self._parts.writer.grade(self._step, loss)
        if fault is not None:
            self._log.console.warning(
                f"the held-out loss of step {self._step} cannot be recorded in its checkpoint: {fault}"
            )

    def _extras(self, step: int, loader: LoaderState, missed_updates: Mapping[str, int]) -> Extras:
        """What is saved beside the tensors of the step whose report was read last."""
        values, arrays = encode(loader)
        return Extras(
            values={
                "loader": values,
                "skipped": self._skipped,
                "skipped_in_a_row": self._guard.in_a_row,
                "updates": step - self._skipped,
                "missed_updates": missed_updates,
                "recipe": self._stored_recipe,
            },
            arrays=arrays,
        )

    def _finish(self) -> None:
        self._flush()
        if self._milestones.last_evaluation_is_due(self._step):
            self._save()
            self._evaluate()
        self._save_last()
        self._mesh.barrier()
        self._note_time()
        if self._mesh.is_main:
            self._log.finish(self._step)
        self._is_finished = True

    def _note_time(self) -> None:
        """Adds what this rank has done to the timeline."""
        self._log.spans(spans_of(rank_name(self._mesh.rank), self._parts.watch))
