# SPDX-License-Identifier: Apache-2.0
"""Learner and grader of a simulated run: they have the interfaces of the real ones, wait as long as the cost model
says, and learn nothing. Methods that wait are asynchronous: the cluster awaits them. Torch-free."""

# N episodes · T tokens of all of them · R rewards of the recipe

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from podium.algorithms.behavior_check import BehaviorCheck
from podium.algorithms.staleness import ByAge, statistics_by_age, updates_between
from podium.algorithms.statistics import EffectiveSampleSize, Moments, PolicyStatistics
from podium.cluster import Computed, RowRefs, WorkerContext
from podium.controller.simulation.costs import RunCosts
from podium.controller.simulation.learned_state import Kept, LearnedState
from podium.controller.simulation.scoring import BASE, NO_CHANGE, digest_of, scored
from podium.data.costs import SequenceCost
from podium.data.trajectories import TokenColumn, TrajectoryBlock
from podium.engine.checkpoint_files import SaveState, record_loss
from podium.roles.carriers import GradeNote, GraderFacts, GradeShard, Residency, UpdatePlan, UpdateShard
from podium.roles.grader import Grader, GraderSpec, Purpose
from podium.roles.interfaces import (
    Learner,
    LearnerFacts,
    LearnerSpec,
    NoSnapshot,
    SnapshotBegun,
    StateSource,
    UpdateNote,
)
from podium.rollout.engine import MemoryChange
from podium.weights.canary import LogprobGap
from podium.weights.versions import WeightVersion
from podium.weights.weight_transfers import ByStore, WeightTransfer


class SimulatedLearner(Learner):
    """One rank of the policy."""

    def __init__(self, context: WorkerContext, spec: LearnerSpec, costs: RunCosts) -> None:
        self._context, self._spec, self._costs = context, spec, costs
        self.state = LearnedState(context, costs, spec.checkpoints)
        if spec.resume_step is not None:
            self.restore(spec.resume_step, "checkpoint")

    def facts(self) -> LearnerFacts:
        """The cost of a sequence is in seconds of a device, so that the metric `mfu` is the share of time at work."""
        return LearnerFacts(
            architecture="Simulated", num_parameters=0, dtype="float32", device="simulated device",
            cost=SequenceCost(per_token=self._costs.model.update.token_s or 1.0), peak_flops=1.0,
            max_tokens=self._spec.recipe.micro_batch_tokens or 1 << 40, optimizer_bytes=0,
            device_bytes=1,  # any: colocated generators leave it during updates
            cpu=None,
        )  # fmt: skip

    async def update(self, shard: UpdateShard, plan: UpdatePlan) -> Computed[TokenColumn]:  # type: ignore[override]
        """Waits for every optimizer step over this rank's tokens."""
        self.state.begin_update()
        lengths_N, cost = shard.rows.lengths_N, self._costs.model.update
        tokens_B = [float(sum(lengths_N[rows].sum() for rows in batch)) for batch in shard.batches]
        seconds = sum(cost.update_s(tokens, devices=1) for tokens in tokens_B)
        await self._costs.work(self._context.worker, seconds)
        self.state.train(plan.step, plan.lr, plan.kl_coefficient, plan.whitening, *_signal(shard))
        return Computed(done=shard.ids, note=self._note(shard, plan, seconds))

    def _note(self, shard: UpdateShard, plan: UpdatePlan, seconds: float) -> UpdateNote:
        """The policy never moves: all ratios are 1."""
        lengths_N, algorithm = shard.rows.lengths_N, plan.algorithm
        count = float(lengths_N.sum())
        advantages_N = np.zeros(len(lengths_N)) if shard.advantages_N is None else shard.advantages_N
        sums = {"count": count, "sum_ratio": count, "sum_ratio_squared": count, "max_ratio": 1.0}
        same = EffectiveSampleSize(count=count, kept=count, sum=count, sum_squares=count)
        in_loss = algorithm.kl is not None and algorithm.kl.where == "loss"
        return UpdateNote(
            statistics=PolicyStatistics(**{**dict.fromkeys(PolicyStatistics.__dataclass_fields__, 0.0), **sums}),
            kept_mass=(0.0, 0.0),
            gap=LogprobGap(count=int(count), sum_abs=0.0, sum_ratio=count, largest=0.0),
            sampling=same if algorithm.correction is not None else None,
            ages=self._ages(shard.rows, plan),
            behavior=BehaviorCheck(),
            entropy=(0.0, count),
            kl_reference=(0.0, count if in_loss else 0.0),
            advantages=Moments(
                count, float((advantages_N * lengths_N).sum()), float((advantages_N**2 * lengths_N).sum())
            ),
            losses=(0.0,) * len(shard.batches),
            grad_norms=(0.0,) * len(shard.batches),
            skipped=0,
            num_tokens=int(count),
            num_sequences=len(lengths_N),
            seconds=seconds,
            proximal_s=0.0,
        )

    def _ages(self, rows: RowRefs[TrajectoryBlock], plan: UpdatePlan) -> ByAge:
        if not self._spec.recipe.rollout.staleness or not len(rows):
            return {}
        age_T = updates_between(rows.read().versions_T, plan.version, plan.versions)
        logprobs_T = np.zeros(len(age_T))
        return statistics_by_age(logprobs_T, logprobs_T, age_T) if age_T.any() else {}

    async def score(  # type: ignore[override]
        self, rows: RowRefs[TrajectoryBlock], temperature: float, base: bool = False
    ) -> Computed[TokenColumn]:
        """Log-probs of the current weights, or of those that the run began with."""
        return await scored(rows, BASE if base else self.state.weights, self._costs, self._context)

    def has_stepped(self) -> bool:
        """Whether the last update came to its end."""
        return self.state.has_stepped

    def describe(self, number: int) -> WeightVersion:
        """A version without tensors."""
        return WeightVersion(number=number, manifest=(), fingerprints=())

    def describe_base(self) -> WeightVersion:
        """A version without tensors."""
        return self.describe(0)

    def send(self, transfer: WeightTransfer) -> int:
        """Sends nothing: what it takes is in the generators' pause."""
        return 0

    async def store(self, transfer: ByStore) -> AsyncIterator[Computed[Any]]:  # type: ignore[override]
        """Stores nothing: what it takes is in the generators' pause."""
        for _ in transfer.buckets:  # of no tensors
            yield Computed()

    def hold(self, residency: Residency) -> MemoryChange:
        """Takes no time: what it takes to switch is in the generators' time."""
        return NO_CHANGE

    async def save(self, step: int, values: Mapping[str, Any]) -> SaveState:  # type: ignore[override]
        """Writes a checkpoint without tensors."""
        settings = self._spec.recipe.checkpoint
        kept = Kept(newest=settings.keep, best=settings.keep_best, resumed=self._spec.resume_step)
        await self.state.save(step, values, kept)
        return "written"

    def save_state(self) -> SaveState:
        """Nothing is in flight."""
        return "idle"

    def finish_saving(self, *, give_up: bool = False) -> SaveState:
        """Nothing is in flight."""
        return "idle"

    def snapshot(self, step: int, values: Mapping[str, Any]) -> SnapshotBegun | NoSnapshot:
        """Keeps the weights of the last two steps."""
        self.state.snapshot(step, values)
        return SnapshotBegun(copy_s=0.0)

    def snapshots(self) -> tuple[int, ...]:
        """Steps of snapshots."""
        return self.state.snapshots()

    def forget_snapshots(self) -> None:
        """Removes all snapshots."""
        self.state.forget_snapshots()

    def restore(self, step: int, source: StateSource) -> Mapping[str, Any]:
        """Goes back to the weights after this step."""
        return self.state.restore(step, source)

    def grade(self, step: int, loss: float) -> str | None:
        """Records the loss of a saved step."""
        record_loss(self._spec.checkpoints, step, loss)
        return None


def _signal(shard: UpdateShard) -> tuple[object, ...]:
    """All that decides what a real learner would learn from a shard, whichever attempt its episodes are."""
    advantages = shard.advantages_N if shard.advantages_N is not None else shard.rewards_N
    turns = shard.turn_rewards if shard.turn_advantages is None else shard.turn_advantages
    return (
        shard.ids.array_N4[:, :2].tolist(),
        shard.rows.lengths_N.tolist(),
        None if advantages is None else advantages.tolist(),
        digest_of(shard.advantages),
        tuple((digest_of(column), weight) for column, weight in shard.teachers),
        (turns.row_K.tolist(), turns.token_K.tolist(), turns.reward_K.tolist()),
        digest_of(shard.reference),
        len(shard.batches),
        shard.absent,
    )


class SimulatedGrader(Grader):
    """Episodes of a batch are graded at the same time, or one after the other where the costs count graders. Rewards
    are those of the costs."""

    def __init__(self, context: WorkerContext, spec: GraderSpec, costs: RunCosts) -> None:
        self._worker, self._rewards, self._costs = context.worker, spec, costs
        self._turn = asyncio.Lock()

    def close(self) -> None:
        """It has no processes."""

    def facts(self) -> GraderFacts:
        """Episodes may be graded one by one."""
        return GraderFacts(inputs=("sample",), overlaps=self._costs.model.graders is None)

    async def grade(self, shard: GradeShard, purpose: Purpose) -> GradeNote:  # type: ignore[override]
        """Waits for the slowest grading of the batch, or for all of them after those of earlier batches."""
        samples = self._costs.samples
        rows = [(self._costs.group(id.prompt_index), id.sample) for id in shard.ids]
        gradings_s = [group.grading_s[sample % samples] for group, sample in rows]
        if self._costs.model.graders is None:
            await self._costs.work(self._worker, max(gradings_s, default=0.0))
        else:
            async with self._turn:
                await self._costs.work(self._worker, sum(gradings_s))
        rewards_N = np.array([self._costs.reward(id.prompt_index, id.sample) for id in shard.ids])
        sections = self._rewards.rewards if purpose == "train" else self._rewards.evaluation
        columns = sum(not section.needs_device for section in sections)
        return GradeNote(
            values_NR=np.repeat(rewards_N[:, None], columns, axis=1),
            errors={},
            texts=tuple((shard.tasks[id.prompt_index].prompt_text, "") for id in list(shard.ids)[: shard.show]),
        )
