# SPDX-License-Identifier: Apache-2.0
"""Grades many samples: calls user code under a deadline, so that one bad sample does not affect the others.

The deadline works for Python code. A call that never releases the interpreter (a regular expression that backtracks for
hours) stops the whole process; hosted_grading.py kills it from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from podium.data.trajectories import TrajectoryId
from podium.environments.activity import Mark
from podium.environments.given_up import GIVEN_UP
from podium.environments.lanes import AsyncLane, SyncLane, Work
from podium.environments.rewards import Reward, RewardResult, Sample

CallId = tuple[int, int]
"""One call of a batch: position of the reward, and position among its calls."""

# Calls of one reward that may hang in one batch before the rest is given up: each costs a whole timeout and a thread.
MOST_HANGING = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grade:
    """The reward of one episode. It has either `total` or `error`.

    `values` and `failures` are by reward, in the order of the rewards; a reward with neither does not apply to this
    episode. The failure of a reward of weight 0, which is only logged, does not change the total."""

    id: TrajectoryId
    values: tuple[float | None, ...]
    total: float | None  # the environment's reward, if it gave one, and the weighted sum of the values
    error: str | None = None
    failures: tuple[str | None, ...] = ()
    extras: dict[str, float] = field(default_factory=dict)  # `reward name/key`: what functions returned with a score


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observer:
    """Watches a grading from outside, and carries over the results of an earlier attempt.

    `known`: results (or failures) that are not computed again. `mark`: the context of each call while it runs.
    `on_settled` gets each result, in any thread."""

    mark: Callable[[CallId], Mark]
    on_calls: Callable[[Sequence[int]], None]  # how many calls each reward has
    on_settled: Callable[[CallId, list[RewardResult]], None]
    known: Mapping[CallId, list[RewardResult] | str] = field(default_factory=dict)


class FunctionLocks:
    """A lock for each synchronous function: it has one call at a time, so that it need not be thread-safe. Graders that
    share the locks may have rewards with the same function."""

    def __init__(self) -> None:
        self._locks: list[tuple[Callable[..., Any], asyncio.Lock]] = []  # not every callable object can be hashed

    def of(self, function: Callable[..., Any]) -> asyncio.Lock:
        """The function's lock. It is fair: batches get it in the order in which they ask."""
        for known, lock in self._locks:
            if known is function:
                return lock
        self._locks.append((function, asyncio.Lock()))
        return self._locks[-1][1]


class EpisodeGrader:
    """Grades batches, several at a time if it is asked to; all in one event loop. Asynchronous functions keep their
    own event loop between batches. Close it in the end.

    `also_scored`: other rewards (a reward model's) are added to the total elsewhere, so that a sample to which no
    reward here applies is worth 0 and not an error."""

    def __init__(
        self, rewards: Sequence[Reward], *, timeout_s: float, also_scored: bool = False,
        most_hanging: int = MOST_HANGING, locks: FunctionLocks | None = None,
    ) -> None:  # fmt: skip
        self._rewards = tuple(rewards)
        self._locks = locks or FunctionLocks()
        self._timeout_s = timeout_s
        self._also_scored = also_scored
        self._most_hanging = most_hanging
        self._lanes: list[SyncLane | AsyncLane] = []  # abandoned with a call in them
        self._loops: dict[int, AsyncLane] = {}  # by position of the reward

    @property
    def num_stuck(self) -> int:
        """Number of calls that were given up and still run, in threads or as tasks that ignore cancellation. They
        cannot be stopped from here: a worker that has some should be replaced."""
        self._lanes = [lane for lane in self._lanes if lane.num_stuck]
        return sum(lane.num_stuck for lane in (*self._lanes, *self._loops.values()))

    async def grade(self, samples: Sequence[Sample], observer: Observer | None = None) -> list[Grade]:
        """One grade for each sample, in order. Rewards run in parallel. Waits for user code, for at most `timeout_s` a
        call, and for the batches before this one:

        - A synchronous reward makes all calls for one batch and then those for the next, in the order of arrival. It
          has one call at a time over all batches, so that it need not be thread-safe; only a call that was given up
          may still run beside it.
        - Calls of an asynchronous reward wait together, whatever their batch."""
        calls, works = self._works(samples, observer)
        if observer is not None:
            observer.on_calls([len(each) for each in calls])
        await asyncio.gather(*(self._run(at, works[at]) for at in self._all))
        by_reward = [_spread(calls[at], works[at], len(samples)) for at in self._all]
        return [self._graded(sample, [outcomes[at] for outcomes in by_reward]) for at, sample in enumerate(samples)]

    async def call_alone(self, samples: Sequence[Sample], calls: Sequence[CallId], observer: Observer) -> None:
        """Makes only these calls of the batch, one at a time. Their results go to the observer."""
        _, works = self._works(samples, observer)
        for at, call in calls:
            await self._run(at, works[at].only(call))

    async def aclose(self) -> None:
        """Ends the event loops of asynchronous functions; calls that hang in them are abandoned."""
        loops, self._loops = list(self._loops.values()), {}
        for lane in loops:
            await asyncio.to_thread(lane.close)
            self._lanes.append(lane)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    @property
    def _all(self) -> range:
        return range(len(self._rewards))

    def _works(self, samples: Sequence[Sample], observer: Observer | None) -> tuple[list[list[list[int]]], list[Work]]:
        """The calls of each reward, as positions of their samples, and the work that makes them."""
        calls = [reward.calls(samples) for reward in self._rewards]
        works = [self._work(at, [[samples[each] for each in call] for call in calls[at]], observer) for at in self._all]
        return calls, works

    def _work(self, at: int, batches: Sequence[Sequence[Sample]], observer: Observer | None) -> Work:
        if observer is None:
            return Work(self._rewards[at], batches)
        work = Work(
            self._rewards[at],
            batches,
            marks=lambda call: observer.mark((at, call)),
            on_settled=lambda call, outcomes: observer.on_settled((at, call), outcomes),
        )
        for (reward, call), result in observer.known.items():
            if reward == at:
                count = len(batches[call])
                work.results[call] = [RewardResult(None, result)] * count if isinstance(result, str) else result
        return work

    async def _run(self, at: int, work: Work) -> None:
        if self._rewards[at].is_async:
            await self._run_async(at, work)
        else:
            async with self._locks.of(self._rewards[at].function):
                await self._run_sync(work)

    async def _run_sync(self, work: Work) -> None:
        """One thread makes the calls for one sample after the other. When a call outlives its deadline, its thread is
        abandoned, and a new one continues with the next sample."""
        begin, num_hanging = 0, 0
        while begin < len(work.batches):
            if num_hanging >= self._most_hanging:
                return work.fail_rest(self._gave_up(num_hanging))
            lane = SyncLane(work, begin, asyncio.get_running_loop())
            try:
                hanging = await lane.run(self._timeout_s)
            except asyncio.CancelledError:
                lane.leave()
                self._lanes.append(lane)
                raise
            if hanging is None:
                return None
            self._lanes.append(lane)
            num_hanging += 1
            work.fail(hanging, GIVEN_UP.noted(self._too_slow()))
            work.tell(hanging)
            begin = hanging + 1
        return None

    async def _run_async(self, at: int, work: Work) -> None:
        """All calls of all batches share one event loop. A call that blocks the loop is abandoned with it, and the
        delayed calls run again in a new loop. If nobody knows which call it is, each batch continues in a loop of its
        own, so that a batch fails no calls of another."""
        num_hanging, is_apart = 0, False
        lane: AsyncLane | None = None
        try:
            while not work.is_done:
                if num_hanging >= self._most_hanging:
                    return work.fail_rest(self._gave_up(num_hanging))
                lane = AsyncLane(self._rewards[at].most_at_once) if is_apart else self._shared_lane(at)
                timeout_s = self._rewards[at].timeout_s or self._timeout_s
                abandoned = await lane.run(work, timeout_s, self._too_slow(timeout_s))
                if abandoned is None:
                    return None
                self._abandon(at, lane)
                is_apart = is_apart or abandoned.is_unknown
                num_hanging += bool(abandoned.culprits)
                for position in abandoned.culprits:
                    why = f"{self._too_slow(timeout_s)}: it blocks the event loop; await what waits, or write `def`"
                    work.fail(position, GIVEN_UP.noted(why))
                    work.tell(position)
        finally:
            if is_apart and lane is not None and lane not in self._lanes:
                lane.stop()
                self._lanes.append(lane)
        return None

    def _shared_lane(self, at: int) -> AsyncLane:
        if at not in self._loops:
            self._loops[at] = AsyncLane(self._rewards[at].most_at_once)
        return self._loops[at]

    def _abandon(self, at: int, lane: AsyncLane) -> None:
        if lane not in self._lanes:  # another batch was faster
            self._lanes.append(lane)
        if self._loops.get(at) is lane:
            del self._loops[at]

    def _too_slow(self, timeout_s: float | None = None) -> str:
        return f"did not return in {timeout_s or self._timeout_s:g} s (grading.timeout_s)"

    def _gave_up(self, count: int) -> str:
        return f"was not called, after {count} calls of this batch that {self._too_slow()}"

    def _graded(self, sample: Sample, outcomes: Sequence[RewardResult]) -> Grade:
        values = tuple(outcome.value for outcome in outcomes)
        failures = tuple(outcome.failure for outcome in outcomes)
        total, error = self._total(sample, outcomes)
        return Grade(
            id=sample.id,
            values=values,
            total=total,
            error=error,
            failures=failures,
            extras={
                f"{reward.name}/{name}": value
                for reward, outcome in zip(self._rewards, outcomes, strict=True)
                if outcome.extras
                for name, value in outcome.extras.items()
            },
        )

    def _total(self, sample: Sample, outcomes: Sequence[RewardResult]) -> tuple[float | None, str | None]:
        own, terms, failed = sample.environment_reward, [], []
        for reward, (value, failure, _) in zip(self._rewards, outcomes, strict=True):
            if value is not None:
                terms.append(reward.weight * value)
            elif failure is not None and reward.weight != 0:
                failed.append(f"{reward.name} {failure}")
        if failed:
            return None, "; ".join(failed)
        if self._rewards and not terms and own is None and not self._also_scored:
            return None, "no reward applies: every function returned None for this episode"
        if own is not None:
            terms.append(own)
        total = _sum(terms)
        if not math.isfinite(total):
            return None, f"the sum of the rewards is {total}"
        return total, None


def _spread(calls: Sequence[Sequence[int]], work: Work, count: int) -> list[RewardResult]:
    """The outcome of each sample, from those of the calls."""
    by_sample: list[RewardResult] = [RewardResult(None)] * count
    for call, outcomes in zip(calls, work.results, strict=True):
        assert outcomes is not None
        for position, outcome in zip(call, outcomes, strict=True):
            by_sample[position] = outcome
    return by_sample


def overlong_penalty(num_tokens: int, *, max_new_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """DAPO's soft length penalty: 0 until the last `buffer_tokens`, then linearly down to -`penalty`."""
    over = num_tokens - (max_new_tokens - buffer_tokens)
    return -penalty * min(1.0, over / buffer_tokens) if over > 0 else 0.0


def _sum(terms: Sequence[float]) -> float:
    with contextlib.suppress(OverflowError, ValueError):  # fsum of huge numbers, or of infinities of both signs
        return math.fsum(terms)
    return math.nan
