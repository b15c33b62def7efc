# SPDX-License-Identifier: Apache-2.0
"""Summaries of engine steps: about one a second, and the tail apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from podium.cluster import WorkerContext
from podium.roles.engine_summaries import EngineSummaries
from podium.roles.episode_states import EpisodeStates
from podium.rollout.engine import Load

EMPTY = Load(
    waiting=0, running=0, cache_tokens=0, cache_tokens_used=0, cache_tokens_kept=0, finished=0, generated_tokens=0,
    prefilled_tokens=0, reused_tokens=0, preemptions=0,
)  # fmt: skip


@dataclass
class Worker:
    """A clock, an engine, and the spans that were added."""

    now_s: float = 100.0
    engine: Load = EMPTY
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    values: list[Mapping[str, float]] = field(default_factory=list)

    def add_span(self, name: str, begin_s: float, end_s: float, values: Mapping[str, float] | None = None) -> None:
        self.spans.append((name, begin_s, end_s))
        self.values.append(values or {})

    def step(self, *, running: int, waiting: int = 0, seconds: float = 0.25, prefilled: int = 0) -> None:
        before = self.engine
        self.engine = replace(
            before, running=running, waiting=waiting, steps=before.steps + 1, lane_steps=before.lane_steps + running,
            generated_tokens=before.generated_tokens + running, prefilled_tokens=before.prefilled_tokens + prefilled,
            prefill_s=before.prefill_s + (seconds if prefilled else 0.0),
        )  # fmt: skip
        self.now_s += seconds

    @property
    def context(self) -> WorkerContext:
        return cast(WorkerContext, self)


def summaries(worker: Worker) -> EngineSummaries:
    return EngineSummaries(worker.context, lambda: worker.engine, clock=lambda: worker.now_s)


def test_a_second_of_steps_is_one_span_with_their_sums() -> None:
    worker = Worker()
    watched = summaries(worker)
    watched.begin()
    worker.step(running=8, waiting=4, prefilled=80)
    watched.look()
    for running in (8, 8, 6):
        worker.step(running=running, waiting=2)
        watched.look()
    assert worker.spans == [("steps", 100.0, 101.0)]
    assert worker.values == [
        {"steps": 4, "lanes": 7.5, "generated_tokens": 30, "prefilled_tokens": 80, "prefill_s": 0.25}
    ]
    watched.end()
    watched.end()  # nothing is left
    assert worker.spans == [("steps", 100.0, 101.0), ("steps", 101.0, 101.0)]


def test_the_tail_begins_when_half_of_the_sequences_are_left_and_none_waits() -> None:
    worker = Worker()
    watched = summaries(worker)
    watched.begin()
    for running, waiting in ((8, 2), (4, 2), (5, 0), (4, 0), (1, 0), (8, 3)):
        worker.step(running=running, waiting=waiting, seconds=0.1)
        watched.look()
    watched.end()
    assert [(name, round(begin, 1), round(end, 1)) for name, begin, end in worker.spans] == [
        ("steps", 100.0, 100.4), ("tail", 100.4, 100.6), ("steps", 100.6, 100.6),
    ]  # fmt: skip


def test_a_single_sequence_has_no_tail_and_a_stream_forgets_the_one_before() -> None:
    worker = Worker()
    watched = summaries(worker)
    for running in (8, 1):
        watched.begin_stream()
        watched.begin()
        worker.step(running=running, seconds=0.5)
        watched.look()
        worker.step(running=running, seconds=0.5)
        watched.look()
        watched.end()
    assert {name for name, _, _ in worker.spans} == {"steps"}


def test_many_looks_write_no_more_than_a_span_a_second() -> None:
    worker = Worker()
    watched = summaries(worker)
    watched.begin()
    for _ in range(10_000):
        worker.step(running=4, seconds=0.001)
        watched.look()
    assert len(worker.spans) == 10


@pytest.fixture
def states() -> tuple[Worker, EpisodeStates]:
    worker = Worker()
    found = EpisodeStates(worker.context, clock=lambda: worker.now_s)
    found.begin_stream()
    return worker, found


def test_a_runner_says_what_its_episodes_wait_for(states: tuple[Worker, EpisodeStates]) -> None:
    worker, runner = states
    worker.now_s = 101.0
    runner.begin_episode()
    runner.begin_episode()
    with runner.generating():
        worker.now_s = 103.0
        runner.end_episode()  # the other one is over, and half are left
        worker.now_s = 104.0
    worker.now_s = 107.0
    runner.end_episode()
    worker.now_s = 108.0
    runner.end_stream()
    assert worker.spans == [
        ("waiting for prompts", 100.0, 101.0), ("waiting for generation", 101.0, 103.0), ("tail", 103.0, 104.0),
        ("waiting for tools", 104.0, 107.0), ("waiting for prompts", 107.0, 108.0),
    ]  # fmt: skip


def test_short_turns_do_not_write_a_span_each(states: tuple[Worker, EpisodeStates]) -> None:
    worker, runner = states
    runner.begin_episode()
    for _ in range(1_000):
        with runner.generating():
            worker.now_s += 0.001
        worker.now_s += 0.001
    runner.end_stream()
    assert len(worker.spans) <= 101
    ends: list[Any] = [100.0, *(end for _, _, end in worker.spans)]
    assert [begin for _, begin, _ in worker.spans] == ends[:-1]
