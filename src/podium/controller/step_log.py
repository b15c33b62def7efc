# SPDX-License-Identifier: Apache-2.0
"""Records a step in metrics, loggers, console and ledger, and runs the guards that watch the metrics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from podium.algorithms.staleness import AgeStatistics
from podium.cluster.deadlines import now_s, wall_s
from podium.cluster.results import Span
from podium.controller.behavior_logprobs import check_distance, check_logprobs
from podium.controller.ledger import GroupRecord, OpenGroupRecord
from podium.controller.parts import OnPolicyParts
from podium.controller.records import StepRecord, idle_seconds, ledger_records, step_metrics
from podium.controller.state import RunState
from podium.controller.step import Step
from podium.errors import InvariantError, TrainingDivergedError
from podium.observe import ShownMetric, StepView
from podium.observe.timeline import CONTROLLER, TimelineSpan, spans_of
from podium.recipe import OnPolicyRecipe
from podium.roles.stages import CriticReport, TrainBatch, UpdateReport
from podium.runs.guards import DivergenceGuard
from podium.weights.canary import GapLimits, GapWatch

# Metrics in seconds that the console shows as a part of the step, with names of these parts and their labels.
_SHARES = {
    "learner/idle_s": ("learner/idle", "wait"),
    "rollout/idle_s": ("rollout/idle", "idle"),
    "lending/lent_s": ("lending/lent", "lent"),
}


class StepLog:
    """Only the controller's single task uses it. The ledger is written while the next step runs."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe], state: RunState) -> None:
        self._parts, self._state = parts, state
        self._writing: asyncio.Task[None] | None = None
        self._num_without_update = 0
        self._guard = DivergenceGuard(
            parts.recipe.optimizer.max_skipped_in_a_row, parts.folder.metrics_file, in_a_row=state.skipped_in_a_row
        )
        facts = parts.roles.policy.facts
        dtype: Literal["float32", "bfloat16"] = "bfloat16" if facts.dtype == "bfloat16" else "float32"
        self._gaps = GapWatch(GapLimits.of(dtype, facts.logprob_noise))
        self.mark()

    @property
    def skipped_in_a_row(self) -> int:
        """Number of consecutive skipped steps up to now."""
        return self._guard.in_a_row

    def mark(self) -> None:
        """Starts the clock of the next step."""
        self.take_spans()
        self._marked = (now_s(), wall_s(), self._parts.watch.seconds())

    def take_spans(self) -> Sequence[Span]:
        """What the workers have done since the last call. Adds it to the timeline, with what the controller did."""
        parts, taken = self._parts, self._parts.workers.take_spans()
        of_workers = [
            TimelineSpan(str(span.worker), span.name, span.begin_s, span.end_s, span.values) for span in taken
        ]
        parts.log.spans([*spans_of(CONTROLLER, parts.watch), *of_workers])
        return taken

    async def record(
        self,
        step: Step,
        batch: TrainBatch | None,
        *,
        policy: UpdateReport | None,
        critic: CriticReport | None,
        kl_coefficient: float | None,
        metrics: Mapping[str, float],
        groups: Sequence[GroupRecord],
        history: Callable[[int], Sequence[str]],
        open_groups: Sequence[OpenGroupRecord] = (),
    ) -> None:
        """Records a finished step, and the groups that are on their way. `history`: prompt index -> what happened to a
        group of the step."""
        parts, recipe = self._parts, self._parts.recipe
        since_perf, since_wall, before = self._marked
        seconds = {name: spent - before.get(name, 0.0) for name, spent in parts.watch.seconds().items()}
        spans, step_s = self.take_spans(), now_s() - since_perf
        idle_s = idle_seconds(spans, since_wall, since_wall + step_s)
        if recipe.keeps_generating:  # open streams have no span yet, but generators say when they were idle
            idle_s = min(idle_s, step.sampled.rollouts.metrics.get("idle_s", 0.0))
        used, reference = (step.episodes, None) if batch is None else (batch.graded, batch.reference)
        record = StepRecord(
            step=step.number, lr=step.lr, graded=step.sampled, used=used,
            distance=None if reference is None else reference.distance, report=policy, critic=critic,
            kl_coefficient=kl_coefficient, seconds=seconds, step_s=step_s,
            idle_s=idle_s,
            peak_flops=parts.roles.policy.facts.peak_flops * parts.roles.policy.num_ranks,
            solving=recipe.solving, groups=groups, overlaps=recipe.keeps_generating, versions=self._state.versions,
            extra=parts.prompts.metrics(),
        )  # fmt: skip
        self.mark()  # writing from here on counts as the next step's time
        values = step_metrics(record) | {f"program/{name}": float(value) for name, value in metrics.items()}
        await self.written()
        rows = ledger_records(step.sampled, used, step.number)
        self._writing = asyncio.create_task(asyncio.to_thread(parts.ledger.close_step, rows, groups, open_groups))
        parts.log.skipped_rows(step.number, parts.prompts.take_skipped())
        for note in parts.prompts.notes if step.number == 1 else ():
            parts.log.console.note(note)
        parts.log.step(step_view(step.number, recipe, values), values)
        try:
            if policy is not None:
                check_logprobs(step.number, policy, groups, history)
            self._check(step.number, policy, is_warm_up=critic is not None and policy is None)
        except (TrainingDivergedError, InvariantError):
            await self.written()  # a step that stops the run is recorded too
            raise

    async def note_open(self, groups: Sequence[OpenGroupRecord]) -> None:
        """Records the groups that are on their way when a run stops."""
        await self.written()
        self._writing = asyncio.create_task(asyncio.to_thread(self._parts.ledger.close_step, (), (), groups))
        await self.written()

    async def written(self) -> None:
        """Waits until the ledger has all committed steps, or the disk does not take them: `Ledger.fault` says so."""
        ledger, reports = self._parts.ledger, self._parts.log.disk_reports
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing
        elif ledger.fault is not None:
            await asyncio.to_thread(ledger.write_waiting)
        if ledger.fault is not None:
            reports.cannot_write(ledger.path, ledger.fault)
        else:
            reports.writes_again(ledger.path)

    def _check(self, step: int, report: UpdateReport | None, *, is_warm_up: bool) -> None:
        """Checks for steps without a finite loss, for a policy that runs away from the one that sampled, and for
        engines whose log-probs differ a little from the policy's."""
        recipe, console = self._parts.recipe, self._parts.log.console
        if report is None:
            if not is_warm_up:
                self._warn_of_no_update(step)
            return
        if report.skipped:
            console.warning(f"step {step}: {report.skipped} optimizer steps were not finite and were skipped")
        self._guard.check(step, is_skipped=report.skipped > 0, suspect="rewards")
        algorithm = recipe.full_algorithm
        for kl in (report.statistics.kl_k3, AgeStatistics.merge(report.ages.values()).kl):
            _check_kl(step, kl, algorithm.max_kl_behavior, recipe.rollout.staleness)
        check_distance(step, report)
        if algorithm.correction is None:
            alarm = self._gaps.look(report.gap)
            if alarm is not None:
                console.warning(f"step {step}: {alarm}")

    def _warn_of_no_update(self, step: int) -> None:
        """Warns at the first such step, then only at the 10th, the 100th and so on. Metrics have every one."""
        self._num_without_update += 1
        if self._num_without_update == 1:
            text = "nothing to learn from; the weights stay as they are"
        elif math.log10(self._num_without_update).is_integer():
            text = f"nothing to learn from; the weights stayed as they were in {self._num_without_update} steps"
        else:
            return
        self._parts.log.console.warning(f"step {step}: {text}")


def _check_kl(step: int, kl: float, limit: float | None, staleness: int) -> None:
    """Raises an error if a KL, `kl/behavior` or `staleness/kl`, is above `algorithm.max_kl_behavior`."""
    if limit is None or not kl > limit:  # the guard of skipped steps counts those without a finite loss
        return
    stale = f"rollout.staleness (now {staleness}), " if staleness > 0 else ""
    raise TrainingDivergedError(
        f"step {step}: the policy's KL from the weights that sampled is {kl:.4g}, and algorithm.max_kl_behavior is "
        f"{limit:g}. Lower {stale}optimizer.lr, algorithm.mini_batches or "
        "algorithm.epochs, or raise the limit."
    )


def _shares(values: Mapping[str, float]) -> dict[str, float]:
    """Parts of the step in which learners and generators waited, and in which the learner's devices were lent."""
    return {
        name: min(1.0, values[metric] / values["step_s"]) if values["step_s"] else 0.0
        for metric, (name, _) in _SHARES.items()
        if metric in values
    }


def step_view(step: int, recipe: OnPolicyRecipe, values: Mapping[str, float]) -> StepView:
    """The console's view of a step: what the method is about comes first. Metrics that the step has not are left out,
    and so are rewards where nothing gives any."""
    facts: list[tuple[str, str]] = []
    if recipe.only_logs_rewards and "advantage/mean" in values:
        # The advantage of a token is its log-prob under the teachers minus that under the policy.
        facts.append(("teacher KL", f"{-values['advantage/mean']:.4f}"))
    shown = [ShownMetric("reward/mean", "reward")] if recipe.gives_rewards else []
    if recipe.gives_rewards and recipe.solving.is_clear:
        shown.append(ShownMetric("groups/solve_rate", "solved", ".1%"))
    if recipe.rollout.staleness:
        shown.append(ShownMetric("staleness/mean", "age", ".1f"))
    if recipe.keeps_generating:
        values = {**values, **_shares(values)}
        shown += [ShownMetric(name, label, ".0%") for name, label in _SHARES.values()]
    shown += [ShownMetric("response/mean", "length", ".1f"), ShownMetric("kl/reference", "KL", ".4f")]
    shown += [ShownMetric("entropy", "entropy"), ShownMetric("step_s", "s", ".2f")]
    facts += [each.fact(values) for each in shown if each.metric in values]
    return StepView(
        step=step,
        num_steps=recipe.steps,
        loss=values.get("loss"),
        lr=values["lr"],
        tokens_per_s=values["tokens_per_s"],
        grad_norm=values.get("grad_norm"),
        own=tuple(facts),
    )
