# SPDX-License-Identifier: Apache-2.0
"""The controller's handles for grading: processes that run reward functions, and reward models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from podium.cluster import RoleGroup, WorkerId, Workers
from podium.cluster.deadlines import wall_s
from podium.cluster.results import Span
from podium.data.trajectories import Ints
from podium.environments.grading import MOST_HANGING
from podium.errors import ClusterError, DeadlineError, WorkerDiedError
from podium.observe.timeline import EPISODES
from podium.roles.carriers import (
    Floats,
    GradeNote,
    GraderFacts,
    GradeShard,
    Residency,
    ScoreNote,
    first_rows,
    join_errors,
    join_extras,
    take_errors,
)
from podium.roles.grader import Grader, Purpose
from podium.roles.handles import PHASE_S
from podium.roles.interfaces import RewardModel
from podium.roles.lost_workers import Answer, LostWorker, Replacements
from podium.roles.mini_batches import even_parts
from podium.roles.stages import Rollouts

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewarded:
    """Results of reward functions for a batch, in the order of its rows."""

    rewards: tuple[int, ...]  # positions of the columns among the recipe's rewards
    values_NR: Floats
    errors: Mapping[int, str]  # by row: why it has no reward
    extras: Mapping[str, Floats]  # further numbers of each row; NaN: it has none
    texts: tuple[tuple[int, str, str], ...] = ()  # row, prompt, answer

    def __len__(self) -> int:
        return len(self.values_NR)

    def take(self, rows: Ints) -> Rewarded:
        """The results of these rows, in this order."""
        place = {int(row): at for at, row in enumerate(rows)}
        return Rewarded(
            rewards=self.rewards,
            values_NR=self.values_NR[rows],
            errors=take_errors(self.errors, rows),
            extras={name: values_N[rows] for name, values_N in self.extras.items()},
            texts=tuple((place[row], prompt, answer) for row, prompt, answer in self.texts if row in place),
        )

    @classmethod
    def join(cls, parts: Sequence[Rewarded]) -> Rewarded:
        """The results of several batches, one after the other."""
        sizes = [len(part) for part in parts]
        return cls(
            rewards=parts[0].rewards,
            values_NR=np.concatenate([part.values_NR for part in parts]),
            errors=join_errors([part.errors for part in parts], sizes),
            extras=join_extras([part.extras for part in parts], sizes),
            texts=tuple(
                (row + first, prompt, answer)
                for part, first in zip(parts, first_rows(sizes), strict=True)
                for row, prompt, answer in part.texts
            ),
        )


class GraderHandle:
    """Graders run user code in processes. A grader that dies is replaced, and its share is retried."""

    def __init__(
        self, workers: Workers, group: RoleGroup[Grader], rewards: tuple[int, ...], *, timeout_s: float,
        warn: Callable[[str], None], replacements: Replacements, judging_s: Callable[[int], float] | None = None,
    ) -> None:  # fmt: skip
        """`replacements` decides whether a share is retried whose grader died. If it is not, its episodes have no
        rewards: they may be what it dies of. `judging_s`: longest time in which judges behind an endpoint judge so
        many episodes."""
        group.requires(Grader.grade)
        self._replacements = replacements
        self._replacing: set[WorkerId] = set()  # those that are being replaced
        self._workers, self._group, self._rewards = workers, group, rewards
        self._warn, self._warned = warn, set[str]()
        # Every call has its own deadline, and so does its process, which takes a moment to be replaced. This deadline
        # is for a worker that fails in another way.
        self._deadline_s = 2 * (MOST_HANGING + 2) * (timeout_s + 5.0) + 30.0
        self._judging_s = judging_s
        self._open_rows: dict[int, int] = {}  # by rank: the batches of a grader wait together

    @property
    def num_graders(self) -> int:
        """Number of processes that grade."""
        return self._group.mesh.shape.world

    async def facts(self) -> GraderFacts:
        """How episodes may be cut into batches."""

        async def ask() -> GraderFacts:
            return (await self._group.call_one(0, Grader.facts)).value

        facts = await self._tried(0, ask)
        if isinstance(facts, _FailedShare):
            raise facts.errors[-1]
        return facts

    async def grade_on(self, rank: int, rollouts: Rollouts, purpose: Purpose = "train", *, show: int = 0) -> Rewarded:
        """Grades a batch on one grader, which may grade others at the same time."""
        note = await self._share(rank, shard_of(rollouts, show=show), purpose)
        return Rewarded(
            rewards=self._rewards,
            values_NR=note.values_NR,
            errors=note.errors,
            extras=note.extras,
            texts=tuple((row, prompt, answer) for row, (prompt, answer) in enumerate(note.texts)),
        )

    async def grade(self, rollouts: Rollouts, purpose: Purpose = "train", *, show: int = 0) -> Rewarded:
        """Grades a batch. Groups stay whole, because a reward may compare within them. `show`: of how many rows the
        texts are returned too."""
        if not len(rollouts):
            return Rewarded(rewards=self._rewards, values_NR=np.empty((0, 0)), errors={}, extras={})
        parts = group_parts(rollouts.group_N, self.num_graders)
        rewarded = await asyncio.gather(
            *(
                self.grade_on(rank, rollouts.take(part), purpose, show=int((part < show).sum()))
                for rank, part in enumerate(parts)
                if len(part)
            )
        )
        return Rewarded.join(rewarded).take(np.argsort(np.concatenate(parts)))

    async def _share(self, rank: int, shard: GradeShard, purpose: Purpose) -> GradeNote:
        self._open_rows[rank] = self._open_rows.get(rank, 0) + len(shard.rows)
        try:
            return await self._graded(rank, shard, purpose)
        finally:
            self._open_rows[rank] -= len(shard.rows)

    def _deadline_of(self, rank: int) -> float:
        judging_s = 0.0 if self._judging_s is None else self._judging_s(self._open_rows[rank])
        return self._deadline_s + judging_s

    async def _graded(self, rank: int, shard: GradeShard, purpose: Purpose) -> GradeNote:
        async def grade() -> GradeNote:
            worker, began_s = self._group.workers[rank], wall_s()
            group = self._group.within(self._deadline_of(rank))
            try:
                note: GradeNote = (await group.control_one(rank, Grader.grade, shard, purpose)).value
            except (WorkerDiedError, DeadlineError):
                self._workers.record_lost("grader.grade", began_s, worker)
                raise
            # Replies of control calls have no spans, and a grader at work is not idle.
            values = {EPISODES: float(len(shard.rows))}
            self._workers.record([Span("grader.grade", began_s, wall_s(), worker, values)])
            return note

        note = await self._tried(rank, grade)
        if not isinstance(note, _FailedShare):
            self._show(note.warnings)
            return note
        reason = str(note.errors[-1]).splitlines()[0]
        columns = len(self._rewards) if purpose == "train" else 1
        failed = f"the grader's process failed {len(note.errors)} times: {reason}"
        return GradeNote(
            values_NR=np.full((len(shard.rows), columns), np.nan),
            errors=dict.fromkeys(range(len(shard.rows)), failed),
        )

    async def _tried(self, rank: int, call: Callable[[], Awaitable[Value]]) -> Value | _FailedShare:
        """What a grader answers, or its successors."""
        errors: list[ClusterError] = []
        while True:
            worker = self._group.workers[rank]
            try:
                return await call()
            except (WorkerDiedError, DeadlineError) as error:
                errors.append(error)
            hangs = sum(isinstance(each, DeadlineError) for each in errors)
            lost = LostWorker(part="grader", worker=worker, error=errors[-1], failures=len(errors), hangs=hangs)
            answer = self._replacements.decide(lost)
            await self._replace(lost, answer)
            match answer:
                case "retry":
                    pass
                case "give up":
                    return _FailedShare(errors=tuple(errors))

    def _show(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                self._warn(warning)

    async def _replace(self, lost: LostWorker, answer: Answer) -> None:
        """Once for all batches that the worker had."""
        pool, worker = lost.worker.pool, lost.worker
        if worker in self._replacing or worker not in self._group.workers:
            await self._workers.recover(pool)  # waits until it is replaced
            return
        self._replacing.add(worker)
        try:
            with self._replacements.replacing(lost, answer):
                with contextlib.suppress(WorkerDiedError):  # it may be dead already
                    await self._workers.end_worker(worker)
                await self._workers.recover(pool)
        finally:
            self._replacing.discard(worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailedShare:
    """Graders died of a call, or did not answer it, too often."""

    errors: tuple[ClusterError, ...]


class RewardModelHandle:
    """A model that scores episodes."""

    def __init__(self, group: RoleGroup[RewardModel], *, by_group: bool = False) -> None:
        """`by_group`: groups stay whole, because it may compare within them."""
        group.requires(RewardModel.score, RewardModel.hold)
        self._by_group = by_group
        self._group = group.within(PHASE_S, work_only=True)

    async def score(self, rollouts: Rollouts) -> ScoreNote:
        """One score for each episode."""
        count = self._group.mesh.shape.data_ranks
        lengths_N, group_N = rollouts.rows.lengths_N, rollouts.group_N
        parts = group_parts(group_N, count) if self._by_group else even_parts(lengths_N, count)
        shards = [shard_of(rollouts.take(part)) for part in parts]
        merged = await self._group.call_sharded(RewardModel.score, shards)
        results = [result for result in merged.results if len(result.ids)]
        if not results:
            return ScoreNote(values_N=np.empty(0))
        rows = np.concatenate([rollouts.rows.ids.positions_of(result.ids) for result in results])
        return ScoreNote.join([result.note for result in results]).take(np.argsort(rows))

    async def hold(self, residency: Residency) -> None:
        """Sets the residency on all ranks."""
        await self._group.call_all(RewardModel.hold, residency)


def shard_of(rollouts: Rollouts, *, show: int = 0) -> GradeShard:
    """A batch for a grader."""
    return GradeShard(
        rows=rollouts.rows,
        tasks=rollouts.tasks,
        truncated_N=rollouts.truncated_N,
        environment_N=rollouts.note.environment_N,
        show=show,
    )


def group_parts(group_N: Ints, count: int) -> list[Ints]:
    """Rows for each of `count` graders: contiguous whole groups, about the same number for each grader."""
    prompt_indices, group = np.unique(group_N, return_inverse=True)
    owner: Sequence[int] | np.ndarray = np.arange(len(prompt_indices)) * count // max(1, len(prompt_indices))
    return [np.flatnonzero(np.asarray(owner)[group] == rank) for rank in range(count)]
