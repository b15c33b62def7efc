# SPDX-License-Identifier: Apache-2.0
"""SpmdRun: what an SPMD program is given. It hands out steps and takes reports; metrics, evaluation, checkpoints and
stopping happen in between, when they are due."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from podium.data.documents import Document, PackedBatch, SplitExamples, pack_examples
from podium.data.loader import DocumentCounts, LoaderState, StepExamples, StepLoader, encode
from podium.data.splitting import split_step
from podium.engine.checkpoint import CheckpointWriter, Extras
from podium.engine.mesh import Mesh
from podium.engine.resuming import checkpoint_pieces
from podium.engine.schedule import learning_rate
from podium.engine.train_step import PendingReport, StepReport, TrainEngine
from podium.errors import TrainingDivergedError
from podium.models.cost import ModelCost
from podium.observe import Console, Logger, MetricsFile, StepMetrics, StepView, Stopwatch
from podium.recipe import SpmdRecipe
from podium.spmd.evaluation import Evaluation, Evaluator, HeldoutMeasure
from podium.spmd.folder import RunFolder
from podium.spmd.result import RunResult

RecipeT_co = TypeVar("RecipeT_co", bound=SpmdRecipe, covariant=True)
Averages = Callable[[Mapping[str, float], int], Mapping[str, float]]
"""Sums of a step's tally over all ranks, and its number of examples -> metrics."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainStep:
    """One optimizer step as this rank sees it."""

    number: int  # 1, 2, ... recipe.steps
    lr: float
    ready: StepExamples
    split: SplitExamples
    imbalance: float

    @property
    def num_examples(self) -> int:
        """Over all ranks: what losses of whole rows are divided by."""
        return len(self.split.examples)

    @property
    def global_tokens(self) -> int:
        """Trained tokens of the step over all ranks: what losses of tokens are divided by."""
        return self.ready.num_trained

    @property
    def micro_batches(self) -> tuple[PackedBatch, ...]:
        """This rank's, packed."""
        return tuple(pack_examples(part).packed for part in self.split.parts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of all documents of the step."""
        return tuple(document.num_inputs for example in self.split.examples for document in example.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run begins: at step 0, or after the steps of a checkpoint."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    loader: LoaderState | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts(Generic[RecipeT_co]):
    """Everything a run is made of."""

    recipe: RecipeT_co
    folder: RunFolder
    engine: TrainEngine
    loader: StepLoader
    evaluator: Evaluator | None
    writer: CheckpointWriter
    console: Console
    metrics: MetricsFile | None  # rank 0 only
    loggers: Sequence[Logger]
    cost: ModelCost
    peak_flops: float
    max_tokens: int
    hard_cap: bool
    stop_requested: Callable[[], bool]
    watch: Stopwatch
    check_endings: Callable[[Sequence[Document]], str | None]  # documents -> a warning if none ends with a stop token


class SpmdRun(Generic[RecipeT_co]):
    """Every rank has one, and all do the same at the same step."""

    def __init__(self, parts: Parts[RecipeT_co], progress: Progress) -> None:
        self._parts, self.recipe, self.engine = parts, parts.recipe, parts.engine
        self._mesh: Mesh = parts.engine.mesh
        self._step = self._saved_step = progress.step
        self._skipped, self._in_a_row = progress.skipped, progress.skipped_in_a_row
        self._loader_state = progress.loader
        self._pending: tuple[TrainStep, PendingReport, float] | None = None
        self._last_record = time.perf_counter()
        self._began = (time.perf_counter(), progress.step)
        self._stopping = False
        self._last_loss: float | None = None
        self._evaluation: Evaluation | None = None
        self._evaluated_step: int | None = None

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop; the train step tells all ranks, so that they stop at the same step."""
        return self._parts.stop_requested()

    @property
    def is_fresh(self) -> bool:
        """Whether the weights are still those that the run began with."""
        return self._step == 0

    @property
    def max_tokens(self) -> int:
        """Most tokens of one forward on this rank."""
        return self._parts.max_tokens

    @contextmanager
    def preparing(self, what: str) -> Iterator[Callable[[str], None]]:
        """Work before the first step, told to the user and accounted for; gives what tells how far it is."""
        console = self._parts.console
        with self._parts.watch.span("preparation"):
            console.note(what)
            console.doing(what)
            yield lambda progress: console.doing(f"{what}: {progress}")
            console.doing(None)

    def steps(self, measure: HeldoutMeasure, averages: Averages | None = None) -> Iterator[TrainStep]:
        """The steps still to do. `measure` is what held-out examples are measured with; `averages` makes metrics of
        the sums that a step's tally adds up."""
        self._measure, self._averages = measure, averages
        if self._step == 0 and self.recipe.evaluation.at_start:
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
        for the device; what is due at this step (evaluation, checkpoint) waits for them."""
        now = time.perf_counter()
        elapsed, self._last_record = now - self._last_record, now
        self._flush()
        self._step, self._loader_state = step.number, step.ready.state
        self._pending = (step, report, elapsed)
        recipe = self.recipe
        evaluate = _is_due(recipe.evaluation.every, step.number) and self._parts.evaluator is not None
        save = _is_due(recipe.checkpoint.every, step.number)
        if self._mesh.device.type != "cuda" or evaluate or save or step.number == recipe.steps:
            self._flush()
        # Saved first: whatever happens in an evaluation (it runs the user's code), the steps are safe.
        if save:
            self._save()
        if evaluate:
            self._evaluate()
        self._last_record = time.perf_counter() if evaluate or save else self._last_record

    def result(self) -> RunResult:
        evaluation = self._evaluation
        return RunResult(
            folder=self._parts.folder.path,
            status="finished" if self._step >= self.recipe.steps else "stopped",
            step=self._step,
            loss=self._last_loss,
            heldout_loss=evaluation.heldout_loss if evaluation else None,
            score=evaluation.score if evaluation else None,
            time=self._parts.watch.summary(),
        )

    def _next_step(self) -> TrainStep:
        ready = next(self._parts.loader)
        plan = split_step(
            [example.num_inputs for example in ready.examples],
            num_ranks=self._mesh.world,
            max_tokens=self._parts.max_tokens,
            cost=self._parts.cost.per_sequence,
            hard_cap=self._parts.hard_cap,
        )
        number = self._step + 1
        self._seed(number)
        return TrainStep(
            number=number,
            lr=learning_rate(self.recipe.optimizer, number, self.recipe.steps),
            ready=ready,
            split=SplitExamples(
                examples=ready.examples,
                rows=tuple(tuple(part.tolist()) for part in plan.rows(self._mesh.rank)[0]),
            ),
            imbalance=plan.imbalance,
        )

    def _seed(self, number: int) -> None:
        """Random streams are keyed by (seed, step, rank): nothing of them needs saving, and a resumed run draws the
        same numbers."""
        key = np.random.SeedSequence([self.recipe.run.seed, number, self._mesh.rank]).generate_state(2)
        torch.manual_seed(int(key[0]))
        random.seed(int(key[1]))
        np.random.seed(int(key[1]))

    def _flush(self) -> None:
        """Reads the report in hand: metrics, the console, the non-finite guard, and whether all ranks stop."""
        if self._pending is None:
            return
        (step, pending, elapsed), self._pending = self._pending, None
        report = pending.resolve()
        self._skipped += report.skipped
        self._in_a_row = self._in_a_row + 1 if report.skipped else 0
        self._last_loss = report.loss
        self._stopping = self._stopping or report.stop_requested
        if self._mesh.is_main:
            self._publish(step, report, elapsed)
        if self._in_a_row >= self.recipe.optimizer.max_skipped_in_a_row:
            raise TrainingDivergedError(
                f"steps {step.number - self._in_a_row + 1} to {step.number} had a non-finite loss or gradient (last: "
                f"loss {report.loss}, gradient norm {report.grad_norm}) and were skipped. The weights are those of "
                f"step {step.number - self._in_a_row}. Lower optimizer.lr, lengthen warmup_steps, or look at the data "
                f"of these steps; {self._parts.folder.metrics_file} has the numbers."
            )

    def _publish(self, step: TrainStep, report: StepReport, elapsed: float) -> None:
        parts, counts, lengths = self._parts, step.ready.counts, step.lengths
        num_inputs = sum(lengths)
        flops = parts.cost.training_flops(lengths, step.global_tokens)
        mfu = flops / elapsed / (parts.peak_flops * self._mesh.world)
        done = step.number - self._began[1]
        eta = (time.perf_counter() - self._began[0]) / max(1, done) * (self.recipe.steps - step.number)
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
            **(self._averages(report.sums, step.num_examples) if self._averages is not None else {}),
        }
        self._log(StepMetrics(step=step.number, time_s=time.time(), values=values))
        if step.number == 1:
            parts.folder.update(status="running")
            self._warn_of_endings(step)
        if step.number in (1, self.recipe.steps):
            self._warn_of_losses(counts)
        parts.console.step(
            StepView(
                step=step.number,
                num_steps=self.recipe.steps,
                loss=report.loss,
                lr=step.lr,
                tokens_per_s=num_inputs / elapsed,
                mfu=mfu,
                eta_s=eta,
                grad_norm=report.grad_norm,
                num_skipped=self._skipped,
            )
        )
        if report.skipped:
            parts.console.warning(f"step {step.number} skipped: loss {report.loss}, gradient norm {report.grad_norm}")

    def _warn_of_losses(self, counts: DocumentCounts) -> None:
        """What is cut or dropped is said, at the beginning and at the end: it is easily meant otherwise."""
        lost = {
            f"truncated to data.max_length {self.recipe.data.max_length}": counts.truncated,
            "dropped as longer than data.max_length": counts.dropped_overlong,
            "dropped without a trained token": counts.dropped_untrained,
            "dropped by the source's map": counts.dropped_by_map,
        }
        for what, count in lost.items():
            if count:
                self._parts.console.warning(f"{count} of {counts.read} rows read so far were {what}")

    def _warn_of_endings(self, step: TrainStep) -> None:
        """That the first step trains no stop token; where every document may have been cut, nothing is said."""
        documents = [document for example in step.split.examples for document in example.documents]
        if len(step.split.examples) > step.ready.counts.truncated:
            warning = self._parts.check_endings(documents)
            if warning is not None:
                self._parts.console.warning(f"data.train: {warning}")

    def _log(self, metrics: StepMetrics) -> None:
        if self._parts.metrics is not None:
            self._parts.metrics.append(metrics)
        for logger in self._parts.loggers:
            logger.log(metrics)

    def _evaluate(self) -> None:
        parts = self._parts
        assert parts.evaluator is not None
        with parts.watch.span("evaluation"):
            parts.console.doing("evaluating")
            self._evaluation = evaluation = parts.evaluator.run(self._step, self._measure)
            self._evaluated_step = self._step
            parts.console.doing(None)
        if not self._mesh.is_main:
            return
        if self._saved_step == self._step and self._step > 0:
            parts.writer.grade(self._step, evaluation.heldout_loss)
        values = {f"heldout_{name}": value for name, value in evaluation.measured.items()}
        if evaluation.score is not None:
            values["heldout_score"] = evaluation.score
        self._log(StepMetrics(step=self._step, time_s=time.time(), values=values))
        parts.console.evaluation(evaluation.view)
        if evaluation.answers:
            parts.folder.samples(
                self._step,
                [
                    {"prompt": each.prompt, "answer": each.answer, "reference": each.reference, "score": each.score}
                    for each in evaluation.answers
                ],
            )
            for logger in parts.loggers:
                shown = "\n\n".join(f"{each.prompt}\n-> {each.answer}" for each in evaluation.view.samples)
                logger.text(self._step, "samples", shown)

    def _save(self) -> None:
        if self._saved_step == self._step or self._loader_state is None:
            return
        with self._parts.watch.span("checkpoint"):
            values, arrays = encode(self._loader_state)
            extras = Extras(
                values={
                    "loader": values,
                    "skipped": self._skipped,
                    "skipped_in_a_row": self._in_a_row,
                    "updates": self._step - self._skipped,
                    "missed_updates": self.engine.optimizer.missed_updates(),
                    "recipe": self.recipe.model_dump(mode="json"),
                },
                arrays=arrays,
            )
            self._parts.writer.save(self._step, checkpoint_pieces(self.engine), extras)
            self._saved_step = self._step

    def _finish(self) -> None:
        self._flush()
        self._save()
        is_done = self._step >= self.recipe.steps
        if is_done and self._parts.evaluator is not None and self._evaluated_step != self._step:
            self._evaluate()
        with self._parts.watch.span("checkpoint"):
            self._parts.writer.wait()
        self._mesh.barrier()
        if self._mesh.is_main:
            self._parts.folder.stop_file.unlink(missing_ok=True)
            self._parts.folder.update(status=self.result().status, step=self._step)


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
