# SPDX-License-Identifier: Apache-2.0
"""The reward process: it grades batches with the recipe's rewards, and reports the result of every call."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podium.environments.activity import Activity, Mark
from podium.environments.grading import CallId, EpisodeGrader, FunctionLocks, Grade, Observer
from podium.environments.rewards import JudgingPlace, RewardResult, Sample, build_rewards
from podium.environments.sandbox.pool import use_recipe_sandbox
from podium.environments.signatures import Per
from podium.recipe import RewardSection
from podium.recipe.on_policy import SandboxSection

_TELL_EVERY_S = 0.05
_SENT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Rewards of the recipe, by purpose: the sections and their key."""

    sections: Mapping[str, tuple[tuple[RewardSection, ...], str]]
    timeout_s: float
    also_scored: bool
    memory_gib: float | None = None  # of one process and all that it starts; None: no limit
    judging: JudgingPlace = field(default_factory=JudgingPlace)
    sandbox: SandboxSection = field(default_factory=SandboxSection)
    stacks: Path | None = None  # the file for stacks of what hangs

    @property
    def num_slots(self) -> int:
        """Slots of the process's activity: one for each reward, because all of them may run at the same time."""
        return max(1, sum(len(sections) for sections, _ in self.sections.values()))

    def first_slot(self, purpose: str) -> int:
        """The slot of the first reward for this purpose; the others follow."""
        first = 0
        for each, (sections, _) in self.sections.items():
            if each == purpose:
                return first
            first += len(sections)
        raise KeyError(purpose)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeBatch:
    """A batch to grade, beside the other open ones; `known` is an Observer's.

    `alone`: only these calls are made, one at a time, and their results are sent; there are no grades. `careful`: every
    result is sent before the next call."""

    purpose: str
    samples: Sequence[Sample]
    first_call: int = 0  # added to call numbers in the activity slots: each open batch has numbers of its own
    known: Mapping[CallId, list[RewardResult] | str] = field(default_factory=dict)
    alone: Sequence[CallId] = ()
    careful: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFacts:
    """The input of one call, and whether calls wait together."""

    per: Per
    is_async: bool


@dataclass(frozen=True, slots=True)
class Calls:
    """Number of calls of each reward; sent first."""

    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """Results of calls since the last message."""

    results: tuple[tuple[CallId, list[RewardResult]], ...]


class RewardService:
    """Graders by purpose, which grade any number of batches at a time. The slot of a reward has the number of its call
    while that runs, counted from the batch's `first_call` + 1."""

    def __init__(self, activity: Activity, spec: RewardSpec) -> None:
        self._activity, self._spec = activity, spec
        use_recipe_sandbox(spec.sandbox)
        self._rewards = {
            purpose: build_rewards(sections, key, judging=spec.judging, timeout_s=spec.timeout_s)
            for purpose, (sections, key) in spec.sections.items()
        }
        locks = FunctionLocks()  # a function may both be a reward and score held-out answers
        self._graders = {
            purpose: EpisodeGrader(rewards, timeout_s=spec.timeout_s, also_scored=spec.also_scored, locks=locks)
            for purpose, rewards in self._rewards.items()
        }

    def describe(self) -> dict[str, tuple[RewardFacts, ...]]:
        """How each reward is called, by purpose."""
        return {
            purpose: tuple(RewardFacts(per=reward.per, is_async=reward.is_async) for reward in rewards)
            for purpose, rewards in self._rewards.items()
        }

    async def answer(self, order: GradeBatch, tell: Callable[[Any], None]) -> tuple[list[Grade], int]:
        """Grades one batch, and reports results as they come. Returns the number of calls that outlived their deadline
        and still run, over all batches."""
        grader, news = self._graders[order.purpose], _News(asyncio.get_running_loop(), tell, careful=order.careful)
        first_slot = self._spec.first_slot(order.purpose)
        observer = Observer(
            mark=lambda call: Mark(self._activity, first_slot + call[0], order.first_call + call[1] + 1),
            on_calls=lambda counts: tell(Calls(tuple(counts))),
            on_settled=news.add,
            known=order.known,
        )
        try:
            if order.alone:
                await grader.call_alone(order.samples, order.alone, observer)
                return [], grader.num_stuck
            return await grader.grade(order.samples, observer), grader.num_stuck
        finally:
            news.stop()


class _News:
    """Sends results to the parent: in batches, or each one at once where `careful`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Callable[[Any], None], *, careful: bool) -> None:
        self._loop, self._tell, self._careful = loop, tell, careful
        self._waiting: deque[tuple[CallId, list[RewardResult]]] = deque()
        self._timer = loop.call_later(_TELL_EVERY_S, self._tick)

    def add(self, call: CallId, outcomes: list[RewardResult]) -> None:
        """Adds a result, from any thread."""
        self._waiting.append((call, outcomes))
        if not self._careful:
            return
        if threading.current_thread() is threading.main_thread():  # which has the event loop
            self._send()
        else:
            sent = threading.Event()
            self._loop.call_soon_threadsafe(self._send, sent)
            sent.wait(_SENT_S)

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._send()
        self._timer = self._loop.call_later(_TELL_EVERY_S, self._tick)

    def _send(self, sent: threading.Event | None = None) -> None:
        results = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if results:
            self._tell(Settled(tuple(results)))
        if sent is not None:
            sent.set()
