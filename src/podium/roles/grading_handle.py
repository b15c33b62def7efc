# SPDX-License-Identifier: Apache-2.0
"""The controller's handles for grading: processes that run reward functions, and reward models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podium.cluster import RoleGroup, Workers
from podium.data.trajectories import Ints
from podium.environments.grading import MOST_HANGING
from podium.errors import ClusterError, DeadlineError, WorkerDiedError
from podium.roles.carriers import Floats, GradeNote, GradeShard, Residency
from podium.roles.grader import Grader, Purpose
from podium.roles.handles import PHASE_S, even_parts
from podium.roles.interfaces import RewardModel
from podium.roles.stages import Rollouts


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewarded:
    """Results of reward functions for a batch, in the order of its rows."""

    rewards: tuple[int, ...]  # positions of the columns among the recipe's rewards
    values_NR: Floats
    errors: Mapping[int, str]
    extras: Mapping[str, tuple[float, float]]
    texts: tuple[tuple[int, str, str], ...]  # (row, prompt, answer) of the rows that were asked for


class GraderHandle:
    """Graders run user code in processes. A grader that dies is replaced, and its share is retried once."""

    def __init__(
        self, workers: Workers, group: RoleGroup[Grader], rewards: tuple[int, ...], *, timeout_s: float,
        warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        group.requires(Grader.grade)
        self._workers, self._group, self._rewards = workers, group, rewards
        self._warn, self._warned = warn, set[str]()
        # Every call has its own deadline, and so does its process, which takes a moment to be replaced. This deadline
        # is for a worker that fails in another way.
        self._deadline_s = 2 * (MOST_HANGING + 2) * (timeout_s + 5.0) + 30.0

    async def grade(self, rollouts: Rollouts, purpose: Purpose = "train", *, show: int = 0) -> Rewarded:
        """Grades a batch. Groups stay whole, because a reward may compare within them. `show`: of how many rows the
        texts are returned too."""
        parts = group_parts(rollouts.group_N, self._group.mesh.shape.world)
        notes = await asyncio.gather(
            *(
                self._share(rank, shard_of(rollouts, part, show=int((part < show).sum())), purpose)
                for rank, part in enumerate(parts)
                if len(part)
            )
        )
        order = np.argsort(np.concatenate([part for part in parts if len(part)] or [np.empty(0, np.int64)]))
        filled = [part for part in parts if len(part)]
        extras: dict[str, tuple[float, float]] = {}
        for note in notes:
            for name, (total, count) in note.extras.items():
                before = extras.get(name, (0.0, 0.0))
                extras[name] = (before[0] + total, before[1] + count)
        columns = notes[0].values_NR.shape[1] if notes else 0
        return Rewarded(
            rewards=self._rewards,
            values_NR=np.concatenate([note.values_NR for note in notes])[order] if notes else np.empty((0, columns)),
            errors={
                int(part[row]): error
                for part, note in zip(filled, notes, strict=True)
                for row, error in note.errors.items()
            },
            extras=extras,
            texts=tuple(
                (int(row), prompt, answer)
                for part, note in zip(filled, notes, strict=True)
                for row, (prompt, answer) in zip(part, note.texts, strict=False)
            ),
        )

    async def _share(self, rank: int, shard: GradeShard, purpose: Purpose) -> GradeNote:
        error: ClusterError | None = None
        for _ in range(2):
            try:
                group = self._group.within(self._deadline_s)
                note: GradeNote = (await group.call_one(rank, Grader.grade, shard, purpose)).value
            except (WorkerDiedError, DeadlineError) as failed:
                error = failed
                await self._replace(rank)
                continue
            self._show(note.warnings)
            return note
        reason = str(error).splitlines()[0]
        columns = len(self._rewards) if purpose == "train" else 1
        return GradeNote(
            values_NR=np.full((len(shard.rows), columns), np.nan),
            errors=dict.fromkeys(range(len(shard.rows)), f"the grader's process failed twice: {reason}"),
        )

    def _show(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                self._warn(warning)

    async def _replace(self, rank: int) -> None:
        worker = self._group.workers[rank]
        with contextlib.suppress(WorkerDiedError):  # it may be dead already
            await self._workers.end_worker(worker)
        await self._workers.recover(worker.pool)


class RewardModelHandle:
    """A model that scores episodes."""

    def __init__(self, group: RoleGroup[RewardModel]) -> None:
        group.requires(RewardModel.score, RewardModel.hold)
        self._group = group.within(PHASE_S)

    async def score(self, rollouts: Rollouts) -> Floats:
        """One score for each episode."""
        parts = even_parts(rollouts.rows.lengths_N, self._group.mesh.shape.world)
        shards = [shard_of(rollouts, part) for part in parts]
        merged = await self._group.call_sharded(RewardModel.score, shards)
        scores = np.empty(len(rollouts))
        for result in merged.results:
            if len(result.ids):
                scores[rollouts.rows.ids.positions_of(result.ids)] = result.note
        return scores

    async def hold(self, residency: Residency) -> None:
        """Sets the residency on all ranks."""
        await self._group.call_all(RewardModel.hold, residency)


def shard_of(rollouts: Rollouts, rows: Ints, *, show: int = 0) -> GradeShard:
    """A shard of some rows of a batch, with their tasks."""
    taken = rollouts.rows.take(rows)
    prompt_indices = set(taken.ids.array_N4[:, 0].tolist())
    return GradeShard(
        rows=taken,
        tasks={prompt_index: rollouts.tasks[prompt_index] for prompt_index in prompt_indices},
        truncated_N=rollouts.truncated_N[rows],
        environment_N=rollouts.note.environment_N[rows],
        show=show,
    )


def group_parts(group_N: Ints, count: int) -> list[Ints]:
    """Rows for each of `count` graders: contiguous whole groups, about the same number for each grader."""
    prompt_indices, group = np.unique(group_N, return_inverse=True)
    owner: Sequence[int] | np.ndarray = np.arange(len(prompt_indices)) * count // max(1, len(prompt_indices))
    return [np.flatnonzero(np.asarray(owner)[group] == rank) for rank in range(count)]
