# SPDX-License-Identifier: Apache-2.0
"""Other threads at the engine's door: random schedules end every request once, and no call is missed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from native_world import DEADLINE_S, Learner, ask, cache_gib, sequence

from podium.data.trajectories import TrajectoryId
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Completion

pytestmark = pytest.mark.serial  # waits for other threads or processes, by the clock


@contextmanager
def reading(engine: NativeEngine) -> Iterator[Future[list[Completion]]]:
    """Results are read in another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(lambda: list(engine.results(deadline_s=DEADLINE_S)))


def until(holds: Callable[[], bool]) -> None:
    """Something that the engine's thread brings about."""
    end, clock = time.monotonic() + DEADLINE_S, threading.Event()
    while not holds():
        assert time.monotonic() < end
        clock.wait(0.0005)


class Meddler:
    """Cancels, pauses, updates, naps and asks for more, in an order that a seed fixes."""

    def __init__(self, learner: Learner, engine: NativeEngine, seed: int) -> None:
        self.learner, self.engine, self.draw = learner, engine, random.Random(seed)
        self.submitted: set[TrajectoryId] = set()
        self.cancelled: set[TrajectoryId] = set()
        self.version = 0

    def ask(self, count: int) -> None:
        first = len(self.submitted)
        requests = [ask(first + i, self.draw.randint(1, 20), new=self.draw.randint(1, 20)) for i in range(count)]
        self.submitted |= {each.id for each in requests}
        self.engine.submit(requests)

    def once(self) -> None:
        match self.draw.randrange(5):
            case 0:
                ids = self.draw.sample(sorted(self.submitted), 3)
                self.cancelled |= set(ids)
                self.engine.cancel(ids)
            case 1:
                self.engine.pause()
                sampled = self.engine.load().generated_tokens
                assert self.engine.load().generated_tokens == sampled
                self.engine.resume()
            case 2:
                self.version += 1
                in_flight: Any = self.draw.choice(["recompute", "keep"])
                self.engine.install(self.learner.describe(self.version), None, in_flight=in_flight)
            case 3:
                self.engine.sleep()
                self.engine.wake()
            case 4:
                self.ask(2)


SIZES: dict[str, dict[str, Any]] = {
    "slots": {"max_running": 3},
    "little room": {"block_size": 4, "max_running": 5},
    "in parts": {"max_running": 3, "prefill_tokens": 6},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", list(SIZES))
def test_random_schedules_answer_every_request_once(own_learner: Learner, sizes: str, seed: int) -> None:
    """80 tokens of cache are little room for five answers of up to 40: some are put back besides."""
    tight = {"memory_gib": cache_gib(own_learner, 80, block_size=4)} if sizes == "little room" else {}
    engine = own_learner.engine(**SIZES[sizes], **tight)
    meddler = Meddler(own_learner, engine, seed)
    meddler.ask(12)
    engine.pause()  # so that the reader is there before the first request can end
    with reading(engine) as found:
        engine.resume()
        for _ in range(40):
            meddler.once()
        completions = found.result(DEADLINE_S)
    completions += engine.results(deadline_s=DEADLINE_S)  # what was submitted after the reader had found nothing left
    assert sorted(each.id for each in completions) == sorted(meddler.submitted)
    assert {each.finish for each in completions} <= {"length", "cancelled"}
    assert {each.id for each in completions if each.finish == "cancelled"} <= meddler.cancelled
    for each in completions:
        assert len(each.tokens_L) == len(each.logprobs_L) == len(each.versions_L)
        assert (each.versions_L[1:] >= each.versions_L[:-1]).all()
    load = engine.load()
    assert (load.waiting, load.running, load.cache_tokens_used, load.finished) == (0, 0, 0, len(meddler.submitted))


def test_a_call_from_another_thread_takes_effect_between_two_steps_of_a_busy_engine(learner: Learner) -> None:
    engine = learner.engine()
    long = ask(0, 5, new=240)
    engine.submit([long])
    with reading(engine) as found:
        until(lambda: engine.load().generated_tokens >= 3)
        engine.cancel([long.id])
        sampled = engine.load().generated_tokens
        (completion,) = found.result(DEADLINE_S)
    assert completion.finish == "cancelled"
    assert 3 <= completion.num_tokens == sampled < 240
    wanted = sequence(learner.engine(), ask(0, 5, new=240))
    assert completion.tokens_L.tolist() == wanted.tokens_L[:sampled].tolist()


def test_a_reader_that_is_about_to_wait_does_not_miss_who_comes_just_then(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine was found paused; `resume` comes before the wait begins. It would wait for the whole deadline."""
    engine = learner.engine()
    engine.submit([ask(0)])
    engine.pause()
    waits = engine._lock.wait_for_another

    def resumed_first(*how: Any, **more: Any) -> None:
        other = threading.Thread(target=engine.resume)
        other.start()
        other.join(DEADLINE_S)
        waits(*how, **more)

    monkeypatch.setattr(engine._lock, "wait_for_another", resumed_first)
    begun = time.monotonic()
    assert len(list(engine.results(deadline_s=2.0))) == 1
    assert time.monotonic() - begun < 1.5
