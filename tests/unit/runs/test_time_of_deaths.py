# SPDX-License-Identifier: Apache-2.0
"""Where the time of simulated runs went in which workers die, leave and join. Starts of workers take 1.5 s."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.simulated_faults import Case, run_with
from helpers.times import times_of
from podium.cluster.simulated_faults import (
    SimulatedDeath,
    SimulatedDrain,
    SimulatedJoin,
    SimulatedNodeLoss,
)
from podium.controller.simulation.faults import SimulatedFault
from podium.observe.causes import Cause
from podium.observe.timeline import TimelineSpan, read_timeline, slot_change
from podium.observe.timing import DIED, LOST, NESTED
from podium.runs.accounting import CausedSegment, caused_segments
from podium.runs.tracing import write_trace
from podium.ui.timeline_marks import span_marks

FOREVER_S = 1e6


def faulty(folder: Path, case: Case, *faults: SimulatedFault) -> list[TimelineSpan]:
    """The timeline of a run with these faults, whose causes add up."""
    run = run_with(case.recipe(folder), faults, slots_per_node=case.slots_per_node)
    times_of(run.result.folder)
    return list(read_timeline(run.result.folder))


def slot_marks(spans: list[TimelineSpan]) -> list[tuple[str, str, float]]:
    """What happened to which slot, and when."""
    changes = [(change, span.begin_s) for span in spans if (change := slot_change(span)) is not None]
    return [("joined" if each.has_joined else "vacated", each.worker[:10], at_s) for each, at_s in changes]


def of_slot(spans: list[TimelineSpan], slot: str, number: int) -> list[CausedSegment]:
    """What one worker of a slot did."""
    found = caused_segments(spans)
    return next(parts for worker, parts in found.items() if worker.startswith(slot) and worker.endswith(f"#{number}"))


def seconds(parts: list[CausedSegment], cause: Cause) -> float:
    return sum(part.end_s - part.begin_s for part in parts if part.cause == cause)


@pytest.mark.parametrize(
    ("fault", "lost", "cause"),
    [
        (SimulatedDeath(at_s=8.0, pool="rollout", slot=0), "generator.stream", "generation"),
        (SimulatedDeath(at_s=10.0, pool="train", slot=0), "policy.update", "update"),
        (SimulatedDeath(at_s=7.0, pool="graders", slot=1), "grader.grade", "grading"),
    ],
    ids=["generator", "learner", "grader"],
)
def test_a_worker_that_dies_in_a_call_is_in_it_until_then_and_its_slot_recovers_afterwards(
    tmp_path: Path, fault: SimulatedDeath, lost: str, cause: Cause
) -> None:
    slot = f"{fault.pool}[{fault.slot}]"
    spans = faulty(tmp_path, Case(layout="split", staleness=2), fault)

    (died,) = [span for span in spans if span.name == DIED and span.worker.startswith(slot)]
    assert died.begin_s == died.end_s == pytest.approx(fault.at_s, abs=0.02)
    call = [span for span in spans if span.name == f"{lost}{NESTED}{LOST}" and span.worker == died.worker]
    assert call[-1].end_s == died.end_s
    dead, successor = of_slot(spans, slot, 0), of_slot(spans, slot, 1)
    before = [part for part in dead if part.end_s <= died.end_s + 1e-6]
    assert (before[-1].cause, before[-1].end_s) == (cause, pytest.approx(died.end_s))
    assert [part.cause for part in dead[len(before) :]] == ["waiting for recovery"]
    assert dead[-1].end_s == successor[0].begin_s
    assert 1.5 <= seconds(dead, "waiting for recovery") < 2.5  # its start, and what the controller noticed late


def test_a_slot_that_nobody_takes_any_more_has_time_until_that_is_known(tmp_path: Path) -> None:
    """Its node dies in an update and no other comes: a generator that waits, and is noticed when it should generate."""
    fault = SimulatedNodeLoss(at_s=8.0, node=0, seconds=FOREVER_S)
    spans = faulty(tmp_path, Case(layout="split", staleness=0), fault)

    ((what, slot, at_s),) = slot_marks(spans)
    assert (what, slot) == ("vacated", "rollout[0]")
    assert fault.at_s <= at_s < fault.at_s + 2.0
    parts = of_slot(spans, "rollout[0]", 0)
    assert parts[-1].end_s == pytest.approx(at_s)
    assert parts[-1].end_s < max(span.end_s for span in spans) - 5.0
    assert seconds(parts, "waiting for recovery") == 0.0


def test_a_generator_that_leaves_and_comes_back_has_no_time_in_between(tmp_path: Path) -> None:
    fault = SimulatedDrain(at_s=6.0, node=0, grace_s=1.0, seconds=1.0)
    spans = faulty(tmp_path, Case(layout="split", staleness=1), fault)

    (left, joined) = slot_marks(spans)
    assert (left[:2], joined[:2]) == (("vacated", "rollout[0]"), ("joined", "rollout[0]"))
    before, after = of_slot(spans, "rollout[0]", 0), of_slot(spans, "rollout[0]", 1)
    assert before[-1].end_s == pytest.approx(left[2])
    assert after[0].begin_s - before[-1].end_s >= 1.5
    assert seconds([*before, *after], "waiting for recovery") == 0.0


def test_a_generator_that_joins_has_time_from_its_first_span_and_marks_of_slots_are_no_events(tmp_path: Path) -> None:
    """The page and traces have what joined and left from the run's events."""
    spans = faulty(tmp_path, Case(layout="split", staleness=1, variant=2), SimulatedJoin(at_s=4.0))

    ((what, slot, at_s),) = slot_marks(spans)
    assert (what, slot) == ("joined", "rollout[2]")
    parts = of_slot(spans, "rollout[2]", 0)
    assert 5.5 <= parts[0].begin_s == pytest.approx(at_s, abs=0.5)
    assert {mark.kind for mark in span_marks(spans)} == {"publish"}
    (run,) = (tmp_path / "runs").iterdir()
    write_trace(run, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert text.count("joined") == 1
    assert "joined: " not in text
