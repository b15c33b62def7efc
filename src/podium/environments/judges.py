# SPDX-License-Identifier: Apache-2.0
"""Rewards from a judge: a score of each answer, or the share of comparisons that it wins."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from podium.environments.judge_cache import JudgeCache, content_key
from podium.environments.judge_endpoint import JudgeEndpoint, JudgeError, JudgeTally, Waiting
from podium.environments.judge_prompts import (
    ChatMessages,
    UnreadableAnswerError,
    Verdict,
    answer_text,
    pair_messages,
    read_score,
    read_verdict,
    score_messages,
)
from podium.environments.reward_results import RewardResult
from podium.environments.signatures import Sample
from podium.recipe.judges import JudgeSection

JUDGED = "judge/"
"""Prefix of the numbers that a judge gives with a reward."""


class AskedModel(Protocol):
    """A model that judges: behind an endpoint, or in the run itself. For one event loop."""

    asking: dict[str, asyncio.Lock]
    """A lock for each content that is being judged."""

    @property
    def identity(self) -> str:
        """What an answer depends on beside the request."""

    def body(self, messages: ChatMessages) -> dict[str, Any]:
        """The request's content."""

    async def ask(self, body: Mapping[str, Any], read: Callable[[str], Any], tally: JudgeTally) -> str:
        """The judge's answer. Raises a JudgeError."""

    def close(self) -> None:
        """Nothing is asked any more."""


class Judge:
    """Asks a judge, or its cache. Endpoints belong to event loops: each loop that calls has one of its own."""

    def __init__(
        self, section: JudgeSection, key: str | None, *, share: int = 1, folder: Path | None = None,
        waiting: Waiting | None = None, make: Callable[[], AskedModel] | None = None,
    ) -> None:  # fmt: skip
        """`share`: the processes among which the limits are divided. `folder`: of the cache on disk. `make`: gives the
        model to ask; default: the section's endpoint."""
        self.section = section
        self._make: Callable[[], AskedModel]
        self._make = make or partial(JudgeEndpoint, section, key, share=share, waiting=waiting)
        self._endpoints: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AskedModel]
        self._endpoints = weakref.WeakKeyDictionary()
        self._cache = None if section.cache == "none" else JudgeCache(folder)

    async def ask(self, messages: ChatMessages, read: Callable[[str], Any], tally: JudgeTally) -> Any:
        """What `read` makes of the judge's answer. Raises a JudgeError or an UnreadableAnswerError."""
        loop = asyncio.get_running_loop()
        endpoint = self._endpoints.get(loop)
        if endpoint is None:
            endpoint = self._endpoints[loop] = self._make()
        body = endpoint.body(messages)
        if self._cache is None:
            return read(await endpoint.ask(body, read, tally))
        key = content_key(endpoint.identity, body)
        lock = endpoint.asking.setdefault(key, asyncio.Lock())  # the same content is asked once at a time
        try:
            async with lock:
                text = self._cache.get(key)
                if text is not None:
                    tally.cache_hits += 1
                    return read(text)
                text = await endpoint.ask(body, read, tally)
                value = read(text)  # what cannot be read is not kept
                self._cache.put(key, text)
                return value
        finally:
            if not lock.locked() and endpoint.asking.get(key) is lock:
                del endpoint.asking[key]

    def close(self) -> None:
        """Closes the endpoints and the cache."""
        for endpoint in self._endpoints.values():
            endpoint.close()
        if self._cache is not None:
            self._cache.close()


class ScoreReward:
    """The score of an answer by itself, from 0 to 1."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def __call__(self, sample: Sample) -> RewardResult:
        section, tally = self._judge.section, JudgeTally()
        try:
            score = await self._judge.ask(
                score_messages(section, sample), lambda text: read_score(section, text), tally
            )
        except (JudgeError, UnreadableAnswerError) as error:
            return RewardResult(None, _failure(self._judge.section, error), _numbers(section, tally))
        low, high = section.score_range
        return RewardResult((score - low) / (high - low), None, _numbers(section, tally))


class ReferenceReward:
    """1 if the judge prefers an answer to the row's reference, 0 if it prefers the reference, 0.5 for a tie; the mean
    of both orders."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def __call__(self, sample: Sample) -> RewardResult:
        if sample.reference is None:
            return RewardResult(None, "the row has no reference to compare the answer with")
        tally = JudgeTally()
        try:
            comparison = await _compare(self._judge, sample, answer_text(sample), sample.reference, tally)
        except (JudgeError, UnreadableAnswerError) as error:
            return RewardResult(None, _failure(self._judge.section, error), _numbers(self._judge.section, tally))
        return RewardResult(comparison.points, None, _numbers(self._judge.section, tally, [comparison]))


def judge_reward(judge: Judge) -> ScoreReward | ReferenceReward | GroupReward:
    """What the judge's section says: scores, or comparisons. One of groups is called with all samples of a group."""
    match judge.section.compare:
        case "group":
            return GroupReward(judge)
        case "reference":
            return ReferenceReward(judge)
        case None:
            return ScoreReward(judge)


class GroupReward:
    """The share of an answer's comparisons with others of its group that it wins; ties count one half."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        if len(samples) < 2:
            return [RewardResult(None, "the group has no other answer to compare with")] * len(samples)
        section, texts = self._judge.section, [answer_text(sample) for sample in samples]
        pairs = pairs_of(len(samples), section.opponents)
        tallies = [JudgeTally() for _ in pairs]
        results = await asyncio.gather(
            *(
                _compare(self._judge, samples[first], texts[first], texts[second], tally)
                for (first, second), tally in zip(pairs, tallies, strict=True)
            ),
            return_exceptions=True,
        )
        points: list[list[float]] = [[] for _ in samples]
        failures: list[str | None] = [None] * len(samples)
        of_first: list[list[Comparison]] = [[] for _ in samples]  # what a comparison says of itself is counted once
        costs = [JudgeTally() for _ in samples]
        for (first, second), result, tally in zip(pairs, results, tallies, strict=True):
            costs[first] += tally
            if isinstance(result, JudgeError | UnreadableAnswerError):
                failures[first] = failures[second] = _failure(section, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                points[first].append(result.points)
                points[second].append(1.0 - result.points)
                of_first[first].append(result)
        return [
            RewardResult(
                None if failures[at] is not None else math.fsum(points[at]) / len(points[at]),
                failures[at],
                _numbers(section, costs[at], of_first[at]),
            )
            for at in range(len(samples))
        ]


class Comparison:
    """Two answers compared in both orders: what the first one gets, and whether the orders agree. Equal texts tie
    without being judged."""

    def __init__(self, in_order: Verdict | None, swapped: Verdict | None) -> None:
        self.agrees: bool | None = None
        self.points = 0.5
        if in_order is not None and swapped is not None:
            first, second = {"A": 1.0, "B": 0.0, "tie": 0.5}[in_order], {"A": 0.0, "B": 1.0, "tie": 0.5}[swapped]
            self.agrees, self.points = first == second, (first + second) / 2


def pairs_of(count: int, opponents: int | None) -> list[tuple[int, int]]:
    """The pairs of a group's answers that are compared. With fewer opponents than all others, each answer has so many:
    its neighbours in a circle."""
    if opponents is None or opponents >= count - 1:
        return [(first, second) for first in range(count) for second in range(first + 1, count)]
    return [(first, (first + step) % count) for step in range(1, opponents // 2 + 1) for first in range(count)]


async def _compare(judge: Judge, sample: Sample, first: str, second: str, tally: JudgeTally) -> Comparison:
    if first == second:
        return Comparison(None, None)
    section, tallies = judge.section, (JudgeTally(), JudgeTally())
    results: list[Any]
    try:
        results = await asyncio.gather(
            *(
                judge.ask(pair_messages(section, sample, *texts), lambda text: read_verdict(section, text), tallies[at])
                for at, texts in enumerate(((first, second), (second, first)))
            ),
            return_exceptions=True,  # the other order is paid for: it is counted
        )
    finally:
        for each in tallies:
            tally += each
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return Comparison(*results)


def _failure(section: JudgeSection, error: Exception) -> str:
    if isinstance(error, UnreadableAnswerError):
        return f"the judge's answer{'' if section.is_local else ', asked for twice,'} cannot be read: {error}"
    return str(error)


def _numbers(section: JudgeSection, tally: JudgeTally, comparisons: Sequence[Comparison] = ()) -> dict[str, float]:
    numbers = {name: float(getattr(tally, name)) for name in JudgeTally.__dataclass_fields__}
    if section.price is not None:
        numbers["cost"] = (
            tally.tokens_in * section.price.tokens_in + tally.tokens_out * section.price.tokens_out
        ) / 1e6
    if section.compare is not None:
        judged = [comparison.agrees for comparison in comparisons if comparison.agrees is not None]
        numbers |= {"comparisons": float(len(judged)), "agreeing": float(sum(judged))}
    return {JUDGED + name: value for name, value in numbers.items()}
