# SPDX-License-Identifier: Apache-2.0
"""The controller's typed handles of the roles: the methods that a program calls, and how work is split over workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from podium.algorithms.behavior_check import BehaviorCheck
from podium.algorithms.staleness import merge_ages
from podium.algorithms.statistics import EffectiveSampleSize, Moments, PolicyStatistics, ValueStatistics
from podium.cluster import CallResult, Metric, RoleGroup, RowRefs, WorkerId
from podium.data.prefix_splitting import share_in_micro_batches
from podium.data.prefixes import RowPrefixes
from podium.data.splitting import SplitPlan, split_rows
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock, ValueColumns
from podium.engine.checkpoint_files import SaveFailure, SaveState, joined_state
from podium.errors import ClusterError, WorkerDiedError
from podium.recipe import AlgorithmSection
from podium.roles.carriers import (
    DistanceNote,
    Floats,
    Residency,
    SamplingPlan,
    TurnRewards,
    UpdatePlan,
    UpdateShard,
    ValueShard,
)
from podium.roles.episode_stream import EpisodeStream, Lost, streaming
from podium.roles.interfaces import (
    Critic,
    CriticShard,
    Generator,
    GeneratorPart,
    GeneratorUsage,
    Learner,
    LearnerFacts,
    Scorer,
)
from podium.roles.mini_batches import (
    deal_mini_batches,
    even_parts,
    joined_distance,
    mini_batch_order,
    rank_batches,
    without_idle,
)
from podium.roles.stages import (
    Advantages,
    CriticReport,
    TeacherAdvantages,
    TokenAdvantages,
    TrainBatch,
    UpdateReport,
)
from podium.rollout.engine import InFlight
from podium.weights.canary import LogprobGap
from podium.weights.versions import WeightVersion
from podium.weights.weight_transfers import ByBroadcast, ByStore, Readable

# A phase may take hours. A worker that does not advance is ended (`Timeouts.hang_s`), and what it waits for has its own
# deadline: collectives, engines, environments.
PHASE_S = 24 * 3600.0
# How long it may take until a death is known that has made others fail.
DEATH_S = 10.0

LoseGenerator = Callable[[int, WorkerDiedError], None]
"""Lets a run go on without a generator that died, by its rank; raises an error if it cannot."""


class GeneratorHandle:
    """Generators on all generating devices."""

    def __init__(self, group: RoleGroup[Generator], parts: RoleGroup[GeneratorPart] | None = None) -> None:
        """`parts`: of generators that several learners' devices hold together."""
        group.requires(Generator.stream, Generator.install, Generator.share, Generator.hold, Generator.usage)
        self._group = group.within(PHASE_S, work_only=True)
        self._parts = None if parts is None else parts.within(PHASE_S, work_only=True)
        self._lose: LoseGenerator | None = None

    def report_lost_to(self, lose: LoseGenerator) -> None:
        """From now on `lose` is told of engines that die in a stream. The others go on, unless it raises an error."""
        self._lose = lose

    @property
    def num_engines(self) -> int:
        """Number of engines that are there now."""
        return len(self._group.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the engines that are there now."""
        return self._group.ranks

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Their workers."""
        return self._group.workers

    @asynccontextmanager
    async def streaming(self, plan: SamplingPlan) -> AsyncIterator[EpisodeStream]:
        """Streams of all engines."""
        async with self._accompanied() as following, streaming(self._group, plan) as stream:

            def look(task: asyncio.Future[Any]) -> None:
                """An engine would wait for a dead worker that follows it."""
                if not task.cancelled() and (error := task.exception()) is not None:
                    stream.fail(error)

            for each in following:
                each.add_done_callback(look)
            yield stream

    @asynccontextmanager
    async def _accompanied(self) -> AsyncIterator[Sequence[asyncio.Future[Any]]]:
        """Inside, workers that follow an engine do nothing else, as those with an engine do. Yields their calls."""
        if self._parts is None:
            yield ()
            return
        parts, leading = self._parts, set(self._group.workers)
        following = [rank for rank, worker in zip(parts.ranks, parts.workers, strict=True) if worker not in leading]
        calls = [asyncio.ensure_future(parts.call_one(rank, GeneratorPart.accompany)) for rank in following]
        try:
            yield calls
        finally:
            leaving = (parts.control_one(rank, GeneratorPart.leave) for rank in following)
            told = await asyncio.gather(*leaving, return_exceptions=True)
            untold = [each for each in told if isinstance(each, BaseException)]
            if untold:  # after a death all are replaced; none of these calls returns
                for each in calls:
                    each.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            failures = (*results, *(each for each in untold if not isinstance(each, WorkerDiedError)))
            failed = next((each for each in failures if isinstance(each, Exception)), None)
            if failed is not None:
                raise failed

    async def replace(self, stream: EpisodeStream, lost: Lost) -> None:
        """Lets the others go on. Raises the error if the run goes back to its last committed step instead."""
        if self._lose is None:
            raise lost.error
        self._lose(lost.rank, lost.error)
        stream.forget(lost.rank)

    async def lanes(self) -> Mapping[int, int]:
        """By rank: number of sequences that an engine generates at the same time."""
        ranks = self._group.ranks
        answers = await self._group.call_all(Generator.lanes)
        return {rank: answer.value for rank, answer in zip(ranks, answers, strict=True)}

    async def lanes_of(self, rank: int) -> int:
        """Like `lanes`, for one engine: the others may be busy."""
        return (await self._group.call_one(rank, Generator.lanes)).value

    @asynccontextmanager
    async def serving(
        self, *, keeps_answers: bool = False
    ) -> AsyncIterator[asyncio.Task[tuple[CallResult[tuple[Metric, ...]], ...]]]:
        """Generators answer episode runners inside this context; the task returns their metrics afterwards.
        `keeps_answers`: they have served streams before that still run, and runners may not have fetched all answers
        yet."""
        async with self._accompanied() as following:
            await self._group.call_all(Generator.begin_serving, keeps_answers)
            serving = asyncio.create_task(self._serve_with(following))
            try:
                yield serving
            finally:
                failures = await self._stop_serving(give_back=False)
                failed = next((each for each in failures if not isinstance(each, WorkerDiedError)), None)
                if failed is not None:  # that engine may never end
                    await asyncio.wait({serving}, timeout=DEATH_S)
                    if not serving.cancel():
                        await serving  # a death takes precedence
                    raise failed
                await serving

    async def _serve_with(self, following: Sequence[asyncio.Future[Any]]) -> tuple[CallResult[tuple[Metric, ...]], ...]:
        """Like `_serve`. Raises the death of a worker that follows an engine, which would wait for it."""
        serving = asyncio.ensure_future(self._serve())
        try:
            await asyncio.wait((serving, *following), return_when=asyncio.FIRST_COMPLETED)
            for each in following:
                if each.done():
                    each.result()
            return await serving
        finally:
            serving.cancel()

    async def _serve(self) -> tuple[CallResult[tuple[Metric, ...]], ...]:
        """All engines answer episode runners until they are told to stop. Those that died meanwhile have no metrics."""
        lose = self._lose
        if lose is None:
            return await self._group.call_all(Generator.serve)
        tasks = [asyncio.ensure_future(self._serve_on(rank, lose)) for rank in self.ranks]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return tuple(answer for answer in answers if answer is not None)

    async def _serve_on(self, rank: int, lose: LoseGenerator) -> CallResult[tuple[Metric, ...]] | None:
        try:
            return await self._group.call_one(rank, Generator.serve)
        except WorkerDiedError as error:
            lose(rank, error)
            return None

    async def stop_serving(self) -> None:
        """Gives all requests of episode runners back, with the tokens that they have. Ends `serving`. All engines are
        told, also if one fails; then its failure is raised, a death first."""
        failures = await self._stop_serving(give_back=True)
        if failures:
            raise next((each for each in failures if isinstance(each, WorkerDiedError)), failures[0])

    async def _stop_serving(self, *, give_back: bool) -> list[BaseException]:
        """Tells all engines. The failures of those that could not be told."""
        calls = (self._group.control_one(rank, Generator.stop_serving, give_back) for rank in self.ranks)
        results = await asyncio.gather(*calls, return_exceptions=True)
        return [each for each in results if isinstance(each, BaseException)]

    async def forget(self, runner: str) -> None:
        """Cancels the requests of a runner that died. An engine that is dead has none."""
        await asyncio.gather(*(self._forget(rank, runner) for rank in self.ranks))

    async def _forget(self, rank: int, runner: str) -> None:
        with suppress(WorkerDiedError):  # its own call reports it
            await self._group.control_one(rank, Generator.forget, runner)

    async def share(self, number: int) -> str:
        """Makes the current weights of the colocated learner version `number`."""
        if self._parts is not None:
            await self._parts.call_all(GeneratorPart.refill, number)
        return (await self._group.call_all(Generator.share, number))[0].value

    async def check_base(self, version: WeightVersion) -> None:
        """Raises an error unless every generator loaded the same base for its adapter as the learner."""
        await self._group.call_all(Generator.check_base, version)

    async def check_base_on(self, rank: int, version: WeightVersion) -> None:
        """Like `check_base`, for one generator: the others may be busy."""
        await self._group.call_one(rank, Generator.check_base, version)

    async def install(self, transfer: ByBroadcast) -> int:
        """Installs weights on all engines; returns the bytes received."""
        answers = await self._group.call_all(Generator.install, transfer)
        return sum(answer.value for answer in answers)

    async def install_in_flight(self, rank: int, transfer: ByStore, in_flight: InFlight) -> int:
        """Installs stored weights on one engine while it answers prompts; returns the bytes received."""
        return (await self._group.control_one(rank, Generator.install, transfer, in_flight)).value

    async def hold(self, residency: Residency) -> None:
        """Sets the residency on all ranks."""
        await self._group.call_all(Generator.hold, residency)

    async def usage(self) -> Mapping[WorkerId, GeneratorUsage]:
        """What each generator does and has done; those that are dead are left out."""
        workers, ranks = self.workers, self.ranks
        usages = await asyncio.gather(*(self._usage(rank) for rank in ranks))
        return {worker: usage for worker, usage in zip(workers, usages, strict=True) if usage is not None}

    async def _usage(self, rank: int) -> GeneratorUsage | None:
        with suppress(WorkerDiedError):
            return (await self._group.control_one(rank, Generator.usage)).value
        return None


class LearnerHandle:
    """The policy."""

    def __init__(self, group: RoleGroup[Learner], facts: LearnerFacts) -> None:
        group.requires(Learner.update, Learner.score, Learner.describe, Learner.send, Learner.hold, Learner.save)
        self._group, self.facts = group.within(PHASE_S, work_only=True), facts

    @classmethod
    async def open(cls, group: RoleGroup[Learner]) -> LearnerHandle:
        """Opens a handle with the learner's facts."""
        return cls(group, (await group.call_all(Learner.facts))[0].value)

    @property
    def num_ranks(self) -> int:
        """Number of ranks: devices that learn."""
        return self._group.mesh.shape.world

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or groups of them, that get different data."""
        return self._group.mesh.shape.data_ranks

    def split(self, lengths_N: Ints, mini_batch_N: Ints, prefixes: RowPrefixes | None = None) -> SplitPlan:
        """Splits episodes over ranks and micro-steps by cost, separately for each mini-batch. Those with one prompt
        share a micro-batch where that pays."""
        costs_N = self.facts.cost.of(lengths_N)
        plan = split_rows(
            lengths_N,
            costs_N,
            num_ranks=self.data_ranks,
            max_tokens=max(self.facts.max_tokens, int(lengths_N.max(initial=1))),
            mini_batch_N=mini_batch_N,
        )
        sharing = self.facts.prefixes
        if sharing is None or prefixes is None:
            return plan
        return share_in_micro_batches(plan, costs_N, prefixes, sharing, times=sharing.training)

    async def update(self, train_batch: TrainBatch, plan: UpdatePlan, *, seed: int) -> UpdateReport:
        """Runs every optimizer step of a batch in one call: epochs times mini-batches."""
        algorithm = plan.algorithm
        order = np.random.default_rng([seed, plan.step])
        mini_batch_N = deal_mini_batches(train_batch.rollouts.group_N, algorithm.mini_batches, order)
        kept_rows, absent = without_idle(train_batch, plan, mini_batch_N)
        train_batch, mini_batch_N = train_batch.take(kept_rows), mini_batch_N[kept_rows]
        rollouts = train_batch.rollouts
        split = self.split(rollouts.rows.lengths_N, mini_batch_N, rollouts.note.prefixes)
        sequence = mini_batch_order(len(split.micro_steps_B), algorithm.epochs, order)
        shards = [self._shard(train_batch, split, rank, sequence, absent) for rank in range(self.data_ranks)]
        merged = await self._group.call_sharded(Learner.update, shards, plan)
        notes = [result.note for result in merged.results]
        idle_tokens = sum(count for count, _ in absent)
        entropy = _mean([note.entropy for note in notes])
        lengths = rollouts.rows.lengths_N
        return UpdateReport(
            statistics=PolicyStatistics.merge([note.statistics for note in notes]),
            gap=LogprobGap.merge([note.gap for note in notes]),
            sampling=(
                EffectiveSampleSize.merge([note.sampling for note in notes]) if plan.correction is not None else None
            ),
            kept_mass=_mean([note.kept_mass for note in notes]),
            ages=merge_ages([note.ages for note in notes]),
            behavior=BehaviorCheck.merge([note.behavior for note in notes]),
            entropy=entropy or 0.0,
            kl_reference=_mean([note.kl_reference for note in notes]),
            advantages=Moments.merge([*(note.advantages for note in notes), Moments(float(idle_tokens), 0.0, 0.0)]),
            losses=notes[0].losses,
            grad_norms=notes[0].grad_norms,
            skipped=notes[0].skipped,
            num_tokens=sum(note.num_tokens for note in notes) + idle_tokens,
            num_sequences=sum(note.num_sequences for note in notes) + sum(count for _, count in absent),
            imbalance=split.imbalance,
            micro_steps=split.num_micro_steps,
            seconds=max(note.seconds for note in notes),
            proximal_s=max(note.proximal_s for note in notes),
            flops=float(self.facts.cost.of(lengths).sum()) * algorithm.epochs,
            routers=notes[0].routers,
        )

    async def score(
        self, rows: RowRefs[TrajectoryBlock], temperature: float, *, base: bool = False
    ) -> tuple[RowRefs[TokenColumn], DistanceNote]:
        """Scores like a scorer, with the policy itself, or with `base` without its adapter."""
        shards = [rows.take(part) for part in even_parts(rows.lengths_N, self.data_ranks)]
        merged = await self._group.call_sharded(Learner.score, shards, temperature, base)
        assert merged.rows is not None
        return merged.rows, joined_distance(merged.results, rows)

    async def has_stepped(self) -> bool:
        """Whether the last update, which may have failed, ran an optimizer step on any rank."""
        return any(answer.value for answer in await self._group.call_all(Learner.has_stepped))

    async def describe(self, number: int) -> WeightVersion:
        """The current weights as version `number`."""
        return (await self._group.call_all(Learner.describe, number))[0].value

    async def describe_base(self) -> WeightVersion:
        """The frozen weights under an adapter."""
        return (await self._group.call_all(Learner.describe_base))[0].value

    async def send(self, transfer: ByBroadcast) -> int:
        """Sends published weights; returns the bytes sent by all ranks."""
        return sum(answer.value for answer in await self._group.call_all(Learner.send, transfer))

    async def store(self, number: int) -> ByStore:
        """Puts the current weights into the object store as version `number`."""
        transfer = ByStore(version=await self.describe(number))
        by_rank = await asyncio.gather(*(self._buckets(rank, transfer) for rank in range(self.num_ranks)))
        return replace(transfer, stored=tuple(by_rank[0]))

    async def _buckets(self, rank: int, transfer: ByStore) -> list[Readable]:
        blocks = [block async for block in self._group.stream_open(rank, Learner.store, transfer)]
        return [block.stored for block in blocks if block.stored is not None]

    async def hold(self, residency: Residency) -> None:
        """Sets the residency on all ranks."""
        await self._group.call_all(Learner.hold, residency)

    async def save(self, step: int, values: Mapping[str, Any]) -> SaveState:
        """Begins to write a checkpoint on all ranks."""
        return await self._joined(_states(await self._group.call_all(Learner.save, step, values)))

    async def save_state(self) -> SaveState:
        """How far all ranks are with the checkpoint in flight. Does not wait, unless one has failed: then all end."""
        return await self._joined(_states(await self._group.control_all(Learner.save_state)))

    async def finish_saving(self) -> SaveState:
        """Waits until the checkpoint has ended on all ranks. Returns a fault of the disk."""
        return joined_state(_states(await self._group.call_all(Learner.finish_saving)))

    async def _joined(self, states: Sequence[SaveState]) -> SaveState:
        state = joined_state(states)
        if isinstance(state, SaveFailure):
            state = joined_state(_states(await self._group.call_all(Learner.finish_saving, give_up=True)))
        return state

    async def grade(self, step: int, loss: float) -> str | None:
        """Records the loss of a saved step; the lowest is the best. Returns why it cannot be recorded now."""
        return (await self._group.call_one(0, Learner.grade, step, loss)).value

    def _shard(
        self,
        train_batch: TrainBatch,
        split: SplitPlan,
        rank: int,
        sequence: Sequence[int],
        absent: Sequence[tuple[int, int]],
    ) -> UpdateShard:
        rollouts, reference = train_batch.rollouts, train_batch.reference
        mine, batches = rank_batches(split, rank, sequence)
        rows = rollouts.rows.take(mine)
        shard = UpdateShard(
            rows=rows,
            batches=batches,
            reference=None if reference is None else reference.logprobs.select(rows.ids),
            absent=tuple(absent[mini_batch] for mini_batch in sequence),
        )
        match train_batch.advantages:
            case Advantages(values_N=values_N) if values_N is not None:
                return replace(shard, advantages_N=values_N[mine])
            case Advantages(turns=turns) if turns is not None:
                return replace(shard, turn_advantages=turns.take(mine))
            case Advantages():
                # The KL in the reward is subtracted token by token there.
                return replace(
                    shard,
                    rewards_N=train_batch.graded.last_token_rewards_N[mine],
                    turn_rewards=train_batch.graded.token_turn_rewards.take(mine),
                )
            case TokenAdvantages(columns=columns):
                return replace(shard, advantages=columns.select(rows.ids))
            case TeacherAdvantages(logprobs=columns, weights=weights):
                return replace(
                    shard, teachers=tuple(zip((each.select(rows.ids) for each in columns), weights, strict=True))
                )


class ScorerHandle:
    """A reference or a teacher."""

    def __init__(self, group: RoleGroup[Scorer]) -> None:
        group.requires(Scorer.score, Scorer.hold, Scorer.copy_from)
        self._group = group.within(PHASE_S, work_only=True)

    async def score(
        self, rows: RowRefs[TrajectoryBlock], temperature: float
    ) -> tuple[RowRefs[TokenColumn], DistanceNote]:
        """Log-probs by reference, and the distance of each episode in the order of the rows."""
        ranks = self._group.mesh.shape.data_ranks
        shards = [rows.take(part) for part in even_parts(rows.lengths_N, ranks)]
        merged = await self._group.call_sharded(Scorer.score, shards, temperature)
        assert merged.rows is not None
        return merged.rows, joined_distance(merged.results, rows)

    async def copy_from(self, role: str) -> None:
        """Copies the weights of a colocated learner on all ranks."""
        await self._group.call_all(Scorer.copy_from, role)

    async def save(self, step: int) -> SaveState:
        """Writes the weights on all ranks."""
        return joined_state(_states(await self._group.call_all(Scorer.save, step)))

    async def hold(self, residency: Residency) -> None:
        """Sets the residency on all ranks."""
        await self._group.call_all(Scorer.hold, residency)


class CriticHandle:
    """PPO's value model."""

    def __init__(self, group: RoleGroup[Critic], policy: LearnerHandle) -> None:
        group.requires(Critic.estimate, Critic.update, Critic.hold, Critic.save)
        self._group, self._policy = group.within(PHASE_S, work_only=True), policy

    async def estimate(
        self,
        rows: RowRefs[TrajectoryBlock],
        rewards_N: Floats,
        turn_rewards: TurnRewards,
        reference: RowRefs[TokenColumn] | None,
        algorithm: AlgorithmSection,
        kl_coefficient: float,
    ) -> tuple[RowRefs[ValueColumns], Moments]:
        """Advantages and returns of each token by reference, and the moments of the advantages."""
        shards = [
            ValueShard(
                rows=rows.take(part),
                rewards_N=rewards_N[part],
                turn_rewards=turn_rewards.take(part),
                reference=None if reference is None else reference.select(rows.ids.take(part)),
            )
            for part in even_parts(rows.lengths_N, self._policy.data_ranks)
        ]
        merged = await self._group.call_sharded(Critic.estimate, shards, algorithm, kl_coefficient)
        assert merged.rows is not None
        return merged.rows, Moments.merge([result.note for result in merged.results])

    async def update(
        self,
        rows: RowRefs[TrajectoryBlock],
        columns: RowRefs[ValueColumns],
        algorithm: AlgorithmSection,
        *,
        lr: float,
        step: int,
        seed: int,
        prefixes: RowPrefixes | None = None,
    ) -> CriticReport:
        """All optimizer steps over one batch, split over the data ranks."""
        order = np.random.default_rng([seed, step, 1])
        dealt = deal_mini_batches(rows.ids.array_N4[:, 0], algorithm.mini_batches, order)
        split = self._policy.split(rows.lengths_N, dealt, prefixes)
        sequence = mini_batch_order(len(split.micro_steps_B), algorithm.epochs, order)
        shards = []
        for rank in range(self._policy.data_ranks):
            mine, batches = rank_batches(split, rank, sequence)
            taken = rows.take(mine)
            shards.append(CriticShard(rows=taken, columns=columns.select(taken.ids), batches=batches))
        merged = await self._group.call_sharded(Critic.update, shards, lr)
        notes = [result.note for result in merged.results]
        return CriticReport(
            statistics=ValueStatistics.merge([note.statistics for note in notes]),
            losses=notes[0].losses,
            grad_norms=notes[0].grad_norms,
        )

    async def has_stepped(self) -> bool:
        """Whether the last update, which may have failed, ran an optimizer step on any rank."""
        return any(answer.value for answer in await self._group.call_all(Critic.has_stepped))

    async def hold(self, residency: Residency) -> None:
        """Sets the residency on all ranks."""
        await self._group.call_all(Critic.hold, residency)

    async def save(self, step: int, values: Mapping[str, Any]) -> SaveState:
        """Writes a checkpoint on all ranks and waits until it is complete. Returns a fault of the disk."""
        await self._group.call_all(Critic.save, step, values)
        return joined_state(_states(await self._group.call_all(Critic.finish_saving)))


async def send_weights(policy: LearnerHandle, generator: GeneratorHandle, transfer: ByBroadcast) -> int:
    """Runs both ends of a broadcast at the same time; returns the bytes received. A death at one end takes precedence
    over the failure that it causes at the other, which may be known earlier. The end of learners that live is waited
    for: the next call would meet ranks that are still in this one, and collectives out of step."""
    sending, coming = asyncio.ensure_future(policy.send(transfer)), asyncio.ensure_future(generator.install(transfer))
    try:
        return (await asyncio.gather(sending, coming))[1]
    except ClusterError as error:
        if not isinstance(error, WorkerDiedError):
            await asyncio.wait((sending, coming), timeout=DEATH_S)
        if _death_of(coming) is not None:  # the learners' own call has a deadline, and ends when a rank of it fails
            await asyncio.wait((sending,))
        raise _death_of(sending) or _death_of(coming) or error from None


def _death_of(end: asyncio.Future[int]) -> WorkerDiedError | None:
    error = end.exception() if end.done() and not end.cancelled() else None
    return error if isinstance(error, WorkerDiedError) else None


def _states(answers: Sequence[CallResult[SaveState]]) -> list[SaveState]:
    return [answer.value for answer in answers]


def _mean(parts: Sequence[tuple[float, float]]) -> float | None:
    count = sum(part[1] for part in parts)
    return sum(part[0] for part in parts) / count if count else None
