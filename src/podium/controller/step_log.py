# SPDX-License-Identifier: Apache-2.0
"""Where a step goes on record: metrics, loggers, the console, the ledger, and the guards that watch the numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from podium.controller.parts import Parts, Progress
from podium.controller.records import StepRecord, idle_seconds, ledger_records, step_metrics
from podium.engine.schedule import learning_rate
from podium.errors import TrainingDivergedError
from podium.observe import StepMetrics, StepView
from podium.recipe import OnPolicyRecipe
from podium.roles.stages import CriticReport, GradedRollouts, ScoredRollouts, UpdateReport
from podium.weights.canary import GapLimits


class StepLog:
    """Belongs to the controller's one task. The ledger is written while the next step has begun."""

    def __init__(self, parts: Parts[OnPolicyRecipe], progress: Progress) -> None:
        self._parts = parts
        self._began = (time.perf_counter(), progress.step)
        self._writing: asyncio.Task[None] | None = None
        self.skipped_in_a_row = progress.skipped_in_a_row
        self.last_loss: float | None = None
        self.mark()

    def mark(self) -> None:
        """Here the next step's time begins."""
        self._parts.workers.take_spans()
        self._marked = (time.perf_counter(), time.time(), self._parts.watch.seconds())

    async def record(
        self,
        step: int,
        *,
        graded: GradedRollouts,
        used: GradedRollouts,
        scored: ScoredRollouts | None,
        report: UpdateReport | None,
        critic: CriticReport | None,
        kl_coefficient: float | None,
    ) -> None:
        """Everything about a step that is over; `graded` is all of it, `used` what was learned from."""
        parts, recipe = self._parts, self._parts.recipe
        since_perf, since_wall, before = self._marked
        seconds = {name: spent - before.get(name, 0.0) for name, spent in parts.watch.seconds().items()}
        spans, step_s = parts.workers.take_spans(), time.perf_counter() - since_perf
        record = StepRecord(
            step=step, lr=learning_rate(recipe.optimizer, step, recipe.steps), graded=graded, used=used, scored=scored,
            report=report, critic=critic, kl_coefficient=kl_coefficient, seconds=seconds, step_s=step_s,
            idle_s=idle_seconds(spans, since_wall, since_wall + step_s),
            peak_flops=parts.roles.policy.facts.peak_flops * parts.roles.policy.num_ranks,
            solved_at=recipe.grading.solved_at, extra=parts.prompts.metrics(),
        )  # fmt: skip
        self.mark()  # what is written now is the next step's time
        values = step_metrics(record)
        await self.written()
        rows = ledger_records(graded, used, step)
        self._writing = asyncio.create_task(asyncio.to_thread(parts.ledger.close_step, rows))
        self.write(step, values)
        if step == self._began[1] + 1:
            parts.folder.update(status="running")
        self._show(step, values)
        try:
            self._guard(step, report, warming_up=critic is not None and report is None)
        except TrainingDivergedError:
            await self.written()  # the step that stops a run is on record too
            raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """To the metrics file and all loggers."""
        metrics = StepMetrics(step=step, time_s=time.time(), values=values)
        self._parts.metrics.append(metrics)
        for logger in self._parts.loggers:
            logger.log(metrics)

    async def written(self) -> None:
        """Until the ledger has all steps that were closed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        recipe = self._parts.recipe
        done = step - self._began[1]
        eta = (time.perf_counter() - self._began[0]) / max(1, done) * (recipe.steps - step)
        self.last_loss = values.get("loss")
        own = [("reward", f"{values.get('reward/mean', 0.0):.3f}")]
        if "groups/solve_rate" in values:
            own.append(("solved", f"{values['groups/solve_rate']:.1%}"))
        own.append(("length", f"{values.get('response/mean', 0.0):.1f}"))
        if "kl/reference" in values:
            own.append(("KL", f"{values['kl/reference']:.4f}"))
        own += [("entropy", f"{values.get('entropy', 0.0):.3f}"), ("s", f"{values['step_s']:.2f}")]
        self._parts.console.step(
            StepView(
                step=step,
                num_steps=recipe.steps,
                loss=values.get("loss", 0.0),
                lr=values["lr"],
                tokens_per_s=values["tokens_per_s"],
                grad_norm=values.get("grad_norm"),
                eta_s=eta,
                own=tuple(own),
            )
        )

    def _guard(self, step: int, report: UpdateReport | None, *, warming_up: bool) -> None:
        """Steps without a finite loss, and engines that draw from something else than the policy."""
        recipe, console = self._parts.recipe, self._parts.console
        if report is None:
            if not warming_up:
                console.warning(f"step {step}: nothing to learn from; the weights stay as they are")
            return
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if report.skipped else 0
        if report.skipped:
            console.warning(f"step {step}: {report.skipped} optimizer steps were not finite and were skipped")
        if self.skipped_in_a_row >= recipe.optimizer.max_skipped_in_a_row:
            raise TrainingDivergedError(
                f"{self.skipped_in_a_row} steps in a row had a non-finite loss or gradient and were skipped, the last "
                f"is step {step}. Lower optimizer.lr, lengthen warmup_steps, or look at the rewards of these steps; "
                f"{self._parts.folder.metrics_file} has the numbers."
            )
        limits = GapLimits.of("bfloat16" if self._parts.roles.policy.facts.dtype == "bfloat16" else "float32")
        alarm = report.gap.alarm(limits)
        if alarm is not None and recipe.full_algorithm.correction is None:
            console.warning(f"step {step}: {alarm}")
