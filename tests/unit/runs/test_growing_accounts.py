# SPDX-License-Identifier: Apache-2.0
"""Accounts of a timeline that comes in pieces are those of the whole timeline, after every piece."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.simulated_faults import Case, run_with
from helpers.simulated_runs import simulated, simulated_recipe
from podium.cluster.simulated_faults import SimulatedDeath, SimulatedDrain
from podium.observe.timeline import TimelineSpan, earlier_file, read_timeline, timeline_file
from podium.observe.timeline_growth import TimelineGrowth
from podium.observe.timing import JOINED, VACATED
from podium.runs import growing_accounts
from podium.runs.accounting import CausedSegment, caused_segments
from podium.runs.growing_accounts import GrowingAccounts

Account = list[tuple[float, float, str, str | None]]
ROLES = ["policy.update", "generator.stream", "generator.stream > tail", "grader.grade", "waiting for prompts"]


def merged(segments: Sequence[CausedSegment]) -> Account:
    """Neighbours with the same cause and span are one. Times are rounded: sums of floats differ in the last digit."""
    found: Account = []
    for each in segments:
        if each.end_s - each.begin_s < 1e-9:
            continue
        if found and found[-1][2:] == (each.cause, each.name) and abs(found[-1][1] - each.begin_s) < 1e-6:
            found[-1] = (found[-1][0], round(each.end_s, 6), *found[-1][2:])
        else:
            found.append((round(each.begin_s, 6), round(each.end_s, 6), each.cause, each.name))
    return found


def grown(pieces: Sequence[Sequence[TimelineSpan]]) -> tuple[dict[str, Account], int]:
    """The accounts after each piece are those of all spans so far. Returns the last, and how often all was accounted
    again."""
    so_far: list[TimelineSpan] = []
    accounts, known, anew = GrowingAccounts([]), dict[str, list[CausedSegment]](), 0
    for piece in pieces:
        so_far += piece
        change = accounts.add(piece)
        if change is None:
            accounts, known, anew = GrowingAccounts(list(so_far)), caused_segments(so_far), anew + 1
        else:
            assert change.is_exact
            known = continued(known, change.segments, change.since_s)
        whole = {worker: merged(parts) for worker, parts in caused_segments(so_far).items()}
        assert {worker: merged(parts) for worker, parts in known.items()} == whole
    return {worker: merged(parts) for worker, parts in known.items()}, anew


def continued(
    known: Mapping[str, Sequence[CausedSegment]], new: Mapping[str, Sequence[CausedSegment]], since_s: float
) -> dict[str, list[CausedSegment]]:
    found = {}
    for worker in {**known, **new}:
        before = [
            CausedSegment(
                worker=worker, begin_s=each.begin_s, end_s=min(each.end_s, since_s), cause=each.cause, name=each.name
            )
            for each in known.get(worker, ())
            if each.begin_s < since_s
        ]
        found[worker] = [*before, *new.get(worker, ())]
    return found


def in_pieces(spans: Sequence[TimelineSpan], size: int) -> list[Sequence[TimelineSpan]]:
    """As they are written: a span when it has ended."""
    ordered = sorted(spans, key=lambda span: span.end_s)
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"placement": {"layout": "split", "devices": 2}},
        {"placement": {"layout": "split", "devices": 2}, "rollout": {"staleness": 1}},
        {"placement": {"layout": "elastic", "devices": 2}, "rollout": {"staleness": 1}},
    ],
    ids=["colocated", "split", "stale", "elastic"],
)
def test_runs_of_the_simulated_cluster(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = simulated(simulated_recipe(tmp_path, **changes)).result.folder
    spans = list(read_timeline(run))
    for size in (1, 7, 40):
        pieces = in_pieces(spans, size)
        _, anew = grown(pieces)
        assert len(pieces) > anew, "nothing was added to what was known"


@pytest.mark.slow
def test_a_run_in_which_workers_die_and_leave(tmp_path: Path) -> None:
    case = Case(layout="split", staleness=1)
    faults = [
        SimulatedDeath(at_s=7.0, pool="rollout", slot=1),
        SimulatedDeath(at_s=10.0, pool="train", slot=0),
        SimulatedDrain(at_s=16.0, node=0, grace_s=1.0, seconds=1.0),
    ]
    spans = list(read_timeline(run_with(case.recipe(tmp_path), faults).result.folder))
    assert {"train[0]@simulated/cpu#1", "rollout[0]@node-0.1/cpu#0"} <= {span.worker for span in spans}
    for size in (1, 7, 40):
        grown(in_pieces(spans, size))


@st.composite
def timelines(draw: st.DrawFn) -> list[TimelineSpan]:
    """A controller in phases, and workers whose spans overlap in any way and may be as long as the run."""
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    spans = [TimelineSpan("controller", "launch", 0.0, 0.0), TimelineSpan("controller", "start-up", 0.0, 1.0)]
    at = 1.0
    for _ in range(draw(st.integers(2, 12))):
        for phase in ("rollout", "grade", "update", "publish"):
            length = chance.choice([0.0, 0.25, 1.0, 3.0])
            spans.append(TimelineSpan("controller", phase, at, at + length))
            at += length + chance.choice([0.0, 0.0, 0.5])
    workers = ("train[0]@a/0#0", "rollout[0]@a/1#0", "rollout[1]@a/2#0", "rollout[1]@a/2#1", "rollout[1]@a/2#2")
    workers = workers[: draw(st.integers(1, 5))]
    for worker in workers:
        if chance.random() < 0.2:
            moment = chance.uniform(0.0, at)
            spans.append(TimelineSpan("controller", f"{chance.choice([JOINED, VACATED])}{worker}", moment, moment))
        for _ in range(draw(st.integers(1, 12))):
            begin = chance.uniform(1.0, at)
            length = chance.choice([0.1, 1.0, at - begin])
            spans.append(TimelineSpan(worker, chance.choice(ROLES), begin, begin + length))
    return spans


@pytest.mark.slow
@given(spans=timelines(), size=st.integers(1, 9))
def test_whatever_workers_do(spans: list[TimelineSpan], size: int) -> None:
    grown(in_pieces(spans, size))


def test_ranks_that_wait_for_each_other() -> None:
    """The second rank begins each step 0.3 s later; its file is written after that of the first."""
    spans = []
    for step in range(6):
        for rank, late in ((0, 0.0), (1, 0.3)):
            spans.append(TimelineSpan(f"rank {rank}", "compute", step + late, step + 0.9))
            spans.append(TimelineSpan(f"rank {rank}", "data", step + 0.9, step + 1.0))
    last, anew = grown([spans[at : at + 2] for at in range(0, len(spans), 2)])

    assert anew == 2  # one for each rank
    waits = [(begin, end) for begin, end, cause, _ in last["rank 0"] if cause == "waiting for other ranks"]
    assert waits == [(step, step + 0.3) for step in range(6)]


def test_a_new_launch_and_a_new_worker_are_accounted_again() -> None:
    accounts = GrowingAccounts(
        [TimelineSpan("controller", "launch", 0.0, 0.0), TimelineSpan("controller", "rollout", 0, 2)]
    )

    assert accounts.add([TimelineSpan("controller", "update", 2, 3)]) is not None
    assert accounts.add([TimelineSpan("train[0]@a/0#0", "policy.update", 2, 3)]) is None
    assert accounts.add([TimelineSpan("controller", "launch", 9, 9)]) is None


def test_a_span_that_began_before_what_is_kept_is_said_to_be_inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_accounts, "_MOST_SPANS", 20)
    monkeypatch.setattr(growing_accounts, "_KEPT_SPANS", 10)
    train = "train[0]@a/0#0"
    begin = [TimelineSpan("controller", "launch", 0.0, 0.0), TimelineSpan(train, "policy.facts", 0.0, 0.5)]
    accounts = GrowingAccounts([*begin, TimelineSpan("controller", "rollout", 0.0, 1.0)])
    for second in range(1, 40):
        change = accounts.add([TimelineSpan("controller", "update", second, second + 1)])
        assert change is not None
        assert change.is_exact
        assert sum(map(len, change.segments.values())) <= 4  # not all that there was
    change = accounts.add([TimelineSpan(train, "policy.update", 1.0, 40.0)])

    assert change is not None
    assert not change.is_exact
    assert 10.0 < change.since_s < 40.0


class TestGrowth:
    def line(self, name: str, begin_s: float) -> str:
        return json.dumps({"worker": "controller", "spans": [[name, begin_s, 1.0]]}) + "\n"

    def test_only_what_is_new_is_read_and_half_a_line_waits(self, tmp_path: Path) -> None:
        file = timeline_file(tmp_path)
        growth = TimelineGrowth(tmp_path, most_bytes=1000)
        assert growth.read() == []
        file.write_text(self.line("a", 0.0) + self.line("b", 1.0)[:20])
        assert [span.name for span in growth.read() or []] == ["a"]
        file.write_text(self.line("a", 0.0) + self.line("b", 1.0) + "no JSON\n")
        assert [span.name for span in growth.read() or []] == ["b"]
        assert growth.read() == []
        timeline_file(tmp_path, 1).write_text(self.line("of another rank", 2.0))
        assert [span.name for span in growth.read() or []] == ["of another rank"]

    def test_a_full_file_is_read_to_its_end(self, tmp_path: Path) -> None:
        file = timeline_file(tmp_path)
        file.write_text(self.line("a", 0.0))
        growth = TimelineGrowth(tmp_path, most_bytes=1000)
        growth.read()
        with file.open("a") as more:
            more.write(self.line("b", 1.0))
        file.replace(earlier_file(file))
        file.write_text(self.line("c", 2.0))

        assert [span.name for span in growth.read() or []] == ["b", "c"]
        assert growth.was_rotated
        assert growth.read() == []
        assert not growth.was_rotated

    def test_a_file_of_another_run_is_noticed(self, tmp_path: Path) -> None:
        file = timeline_file(tmp_path)
        file.write_text(self.line("a", 0.0) * 3)
        growth = TimelineGrowth(tmp_path, most_bytes=1000)
        growth.read()
        file.write_text(self.line("a", 0.0))

        assert growth.read() is None

    def test_the_end_of_a_large_file_comes_first(self, tmp_path: Path) -> None:
        timeline_file(tmp_path).write_text("".join(self.line(str(at), at) for at in range(100)))
        growth = TimelineGrowth(tmp_path, most_bytes=200)
        names = [span.name for span in growth.read() or []]

        assert names == [str(at) for at in range(100 - len(names), 100)]
        assert 2 < len(names) < 5
        assert not growth.is_whole
