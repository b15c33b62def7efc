# SPDX-License-Identifier: Apache-2.0
"""Learner and grader of a simulated run: they have the interfaces of the real ones, wait as long as the cost model
says, and learn nothing. Methods that wait are asynchronous: the cluster awaits them. Torch-free."""

# N episodes · T tokens of all of them · R rewards of the recipe

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from podium.algorithms.staleness import ByAge, statistics_by_age, updates_between
from podium.algorithms.statistics import EffectiveSampleSize, Moments, PolicyStatistics
from podium.cluster import Computed, RowRefs, WorkerContext
from podium.controller.simulation.costs import KeptState, RunCosts
from podium.data.costs import SequenceCost
from podium.data.trajectories import TokenColumn, TrajectoryBlock
from podium.engine.checkpoint_files import (
    PARTIAL,
    Extras,
    SavedCheckpoint,
    SaveState,
    complete,
    record_loss,
    saved_steps,
    to_remove,
    write_json,
)
from podium.errors import ClusterError
from podium.recipe import ModelReward
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

_WEIGHTS = "weights"  # in the values of a checkpoint
NO_CHANGE = MemoryChange(measured_bytes=0, accounted_bytes=0)


class SimulatedLearner(Learner):
    """One rank of the policy. Its weights are a digest of everything that they were trained on: two runs end with the
    same ones only if they had the same updates. Its checkpoints have no tensors."""

    def __init__(self, context: WorkerContext, spec: LearnerSpec, costs: RunCosts) -> None:
        self._context, self._spec, self._costs = context, spec, costs
        self._weights = ""
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
        lengths_N, cost = shard.rows.lengths_N, self._costs.model.update
        tokens_B = [float(sum(lengths_N[rows].sum() for rows in batch)) for batch in shard.batches]
        seconds = sum(cost.update_s(tokens, devices=1) for tokens in tokens_B)
        await self._costs.work(self._context.worker, seconds)
        episodes = shard.ids.array_N4[:, :2].tolist()  # of whichever attempt
        advantages = [] if shard.advantages_N is None else shard.advantages_N.tolist()
        trained = repr((self._weights, plan.step, plan.lr, episodes, shard.rows.lengths_N.tolist(), advantages))
        self._weights = hashlib.sha256(trained.encode()).hexdigest()
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

    def score(self, rows: RowRefs[TrajectoryBlock], temperature: float, base: bool = False) -> Computed[TokenColumn]:
        """Not simulated: a recipe that needs it has no simulated layout."""
        raise ClusterError("a simulated learner scores no tokens.")

    def has_stepped(self) -> bool:
        """False: its weights never change, so a failed step can be saved."""
        return False

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
        """Writes a checkpoint without tensors, from which a simulation resumes. A learner that dies meanwhile leaves a
        partial one."""
        folder, settings = self._spec.checkpoints, self._spec.recipe.checkpoint
        partial = folder / f"{PARTIAL}{step:08d}"
        partial.mkdir(parents=True, exist_ok=True)
        await self._costs.work(self._context.worker, self._costs.model.save_s)
        if self._context.rank:
            return "written"
        write_json(partial / "rank-00000.json", {"pieces": {}, "files": {}})
        complete(folder, partial, step, Extras(values={**values, _WEIGHTS: self._weights}, arrays={}), ranks=1)
        resumed = self._spec.resume_step
        saved = saved_steps(folder)
        for old in to_remove(saved, keep=settings.keep, keep_best=settings.keep_best, resumed=resumed):
            shutil.rmtree(old.folder, ignore_errors=True)
        return "written"

    def save_state(self) -> SaveState:
        """Nothing is in flight."""
        return "idle"

    def finish_saving(self, *, give_up: bool = False) -> SaveState:
        """Nothing is in flight."""
        return "idle"

    def snapshot(self, step: int, values: Mapping[str, Any]) -> SnapshotBegun | NoSnapshot:
        """Keeps the last two steps."""
        kept = self._costs.memory.setdefault(self._context.rank, {})
        kept[step] = KeptState(weights=self._weights, values=values)
        for old in sorted(kept)[:-2]:
            del kept[old]
        return SnapshotBegun(copy_s=0.0)

    def snapshots(self) -> tuple[int, ...]:
        """Steps of snapshots."""
        return tuple(sorted(self._costs.memory.get(self._context.rank, {})))

    def forget_snapshots(self) -> None:
        """Removes all snapshots."""
        self._costs.memory.pop(self._context.rank, None)

    def restore(self, step: int, source: StateSource) -> Mapping[str, Any]:
        """Goes back to the weights after this step; a checkpoint has those of rank 0."""
        if source == "memory":
            kept = self._costs.memory[self._context.rank]
            for later in [each for each in kept if each > step]:
                del kept[later]
            self._weights = kept[step].weights
            return kept[step].values
        values = SavedCheckpoint(self._spec.checkpoints / f"step-{step:08d}").values
        self._weights = str(values[_WEIGHTS])
        return values

    def grade(self, step: int, loss: float) -> str | None:
        """Records the loss of a saved step."""
        record_loss(self._spec.checkpoints, step, loss)
        return None


class SimulatedGrader(Grader):
    """Episodes of a batch are graded at the same time, or one after the other where the costs count graders. Every
    second sample of a group is right, unless the group is uniform: then all are."""

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
        rewards_N = np.array([1.0 if group.is_uniform else float(sample % 2) for group, sample in rows])
        sections = self._rewards.rewards if purpose == "train" else self._rewards.evaluation
        columns = sum(not isinstance(section, ModelReward) for section in sections)
        return GradeNote(
            values_NR=np.repeat(rewards_N[:, None], columns, axis=1),
            errors={},
            texts=tuple((shard.tasks[id.prompt_index].prompt_text, "") for id in list(shard.ids)[: shard.show]),
        )
