# SPDX-License-Identifier: Apache-2.0
"""Where the time of workers went: by hand, and as a property that nothing is lost or counted twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.observe.timeline import TimelineSpan
from podium.runs.accounting import WorkerTime, segments, time_lines, worker_times

LEARNER, GENERATOR = "train[0]@here/cpu#0", "rollout[0]@here/cpu#0"


def by_worker(*spans: TimelineSpan) -> dict[str, dict[str, float]]:
    return {each.worker: dict(each.seconds) for each in worker_times(spans)}


def test_idle_time_belongs_to_what_the_controller_did_meanwhile() -> None:
    found = by_worker(
        TimelineSpan("controller", "launch", 100.0, 100.0),
        TimelineSpan("controller", "start-up", 100.0, 104.0),
        TimelineSpan("controller", "rollout", 104.0, 110.0),
        TimelineSpan("controller", "update", 110.0, 119.0),
        TimelineSpan(GENERATOR, "generator.stream > waiting for prompts", 106.0, 107.0),
        TimelineSpan(GENERATOR, "generator.stream", 105.0, 109.0),
        TimelineSpan(LEARNER, "policy.update > update", 112.0, 115.0),
        TimelineSpan(LEARNER, "policy.update", 111.0, 118.0),
        TimelineSpan("controller", "checkpoint", 119.5, 120.0),
    )
    assert found["controller"] == {"start-up": 4.0, "rollout": 6.0, "update": 9.0, "idle": 0.5, "checkpoint": 0.5}
    assert found[GENERATOR] == {
        "idle in start-up": 4.0, "idle in rollout": 2.0, "generator.stream": 3.0, "waiting for prompts": 1.0,
        "idle in update": 9.0, "idle": 0.5, "idle in checkpoint": 0.5,
    }  # fmt: skip
    assert found[LEARNER] == {
        "idle in start-up": 4.0, "idle in rollout": 6.0, "policy.update": 7.0, "idle in update": 2.0, "idle": 0.5,
        "idle in checkpoint": 0.5,
    }  # fmt: skip


def test_between_two_launches_nobody_has_time() -> None:
    found = by_worker(
        TimelineSpan("rank 0", "launch", 10.0, 10.0),
        TimelineSpan("rank 0", "compute", 11.0, 13.0),
        TimelineSpan("rank 0", "launch", 1_000.0, 1_000.0),
        TimelineSpan("rank 0", "compute", 1_002.0, 1_005.0),
    )
    assert found == {"rank 0": {"idle": 3.0, "compute": 5.0}}


def test_a_worker_that_was_replaced_has_time_until_its_last_span_and_its_successor_from_its_first() -> None:
    successor = "rollout[0]@here/cpu#1"
    found = by_worker(
        TimelineSpan("controller", "launch", 0.0, 0.0),
        TimelineSpan("controller", "wait", 0.0, 20.0),
        TimelineSpan(GENERATOR, "generator.stream", 1.0, 5.0),
        TimelineSpan(successor, "generator.stream", 9.0, 12.0),
    )
    assert found[GENERATOR] == {"idle in wait": 1.0, "generator.stream": 4.0}
    assert found[successor] == {"generator.stream": 3.0, "idle in wait": 8.0}


def test_of_calls_at_the_same_time_the_one_that_began_last_counts() -> None:
    calls = [TimelineSpan("graders[0]", "slow", 0.0, 10.0), TimelineSpan("graders[0]", "quick", 2.0, 3.0)]
    assert [(each.name, each.end_s - each.begin_s) for each in segments(calls, 0.0, 12.0)] == [
        ("slow", 2.0), ("quick", 1.0), ("slow", 7.0), (None, 2.0),
    ]  # fmt: skip


def test_a_line_for_each_kind_has_the_largest_shares() -> None:
    times = [
        WorkerTime(worker=f"train[{at}]@here/cpu#0", seconds={"update": 6.0, "idle": 3.0, "tiny": 0.01})
        for at in range(2)
    ]
    assert time_lines(times) == ["train: update 67%, idle 33%"]
    assert time_lines(times, most_causes=1) == ["train: update 67%, other 33%"]
    assert worker_times([]) == []


NAMES = st.sampled_from(("a", "b", "a > c", "a > waiting for prompts"))
WORKERS = st.sampled_from(("controller", LEARNER, GENERATOR, "rollout[0]@here/cpu#1"))


@given(st.lists(st.tuples(WORKERS, NAMES, st.integers(0, 40), st.integers(0, 15)), min_size=1))
def test_causes_add_up_to_the_time_of_a_worker(drawn: list[tuple[str, str, int, int]]) -> None:
    spans = [TimelineSpan(worker, name, float(begin), float(begin + length)) for worker, name, begin, length in drawn]
    begin, end = min(span.begin_s for span in spans), max(span.end_s for span in spans)
    for each in worker_times([TimelineSpan("controller", "launch", begin, begin), *spans]):
        mine = [span for span in spans if span.worker == each.worker]
        is_replaced = each.worker == GENERATOR and any("#1" in span.worker for span in spans)
        first = min(span.begin_s for span in mine) if "#1" in each.worker else begin
        last = max(span.end_s for span in mine) if is_replaced else end
        assert sum(each.seconds.values()) == pytest.approx(last - first)
        assert all(spent >= 0 for spent in each.seconds.values())
