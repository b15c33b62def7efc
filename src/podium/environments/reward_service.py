# SPDX-License-Identifier: Apache-2.0
"""The reward process: it grades batches with the recipe's rewards, and reports the result of every call."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.environments.activity import Activity, Mark
from podium.environments.grading import CallId, EpisodeGrader, Grade, Observer
from podium.environments.rewards import RewardResult, Sample, build_rewards
from podium.recipe import RewardSection

_TELL_EVERY_S = 0.05
_SENT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Rewards of the recipe, by purpose: the sections and their key."""

    sections: Mapping[str, tuple[tuple[RewardSection, ...], str]]
    timeout_s: float
    also_scored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeBatch:
    """A batch to grade; `known` and `alone` are an Observer's. `careful`: every result is sent before the next call."""

    purpose: str
    samples: Sequence[Sample]
    known: Mapping[CallId, list[RewardResult] | str] = field(default_factory=dict)
    alone: Sequence[CallId] = ()
    careful: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """Number of calls of each reward; sent first."""

    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """Results of calls since the last message."""

    results: tuple[tuple[CallId, list[RewardResult]], ...]


class RewardService:
    """Graders by purpose. The slot of a reward has the number of its call while that runs, counted from 1."""

    def __init__(self, activity: Activity, spec: RewardSpec) -> None:
        self._activity = activity
        self._graders = {
            purpose: EpisodeGrader(build_rewards(sections, key), timeout_s=spec.timeout_s, also_scored=spec.also_scored)
            for purpose, (sections, key) in spec.sections.items()
        }

    def describe(self) -> None:
        """Empty: the rewards are loaded."""

    async def answer(self, order: GradeBatch, tell: Callable[[Any], None]) -> tuple[list[Grade], int]:
        """Grades one batch, and reports results as they come. Returns the number of calls that outlived their deadline
        and still run."""
        grader, news = self._graders[order.purpose], _News(asyncio.get_running_loop(), tell, careful=order.careful)
        observer = Observer(
            mark=lambda call: Mark(self._activity, call[0], call[1] + 1),
            on_calls=lambda counts: tell(Calls(tuple(counts))),
            on_settled=news.add,
            known=order.known,
            alone=order.alone,
        )
        try:
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
        """Adds a result, from the thread of any lane."""
        self._waiting.append((call, outcomes))
        if self._careful and threading.current_thread() is not threading.main_thread():
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
