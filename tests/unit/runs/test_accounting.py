# SPDX-License-Identifier: Apache-2.0
"""Where the time of workers went: by hand for every cause, and as a property that nothing is lost or counted twice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.observe.causes import CAUSES, Cause, is_idle
from podium.observe.timeline import TimelineSpan, TimelineWorker
from podium.observe.timing import JOINED, LAUNCH, RESTART, VACATED
from podium.runs import accounting
from podium.runs.accounting import WorkerTime, caused_segments, idle_segments, segments, time_lines, worker_times

TRAIN, ROLLOUT, OTHER = "train[0]@here/cpu#0", "rollout[0]@here/cpu#0", "rollout[1]@here/cpu#0"
GRADER, RUNNER = "graders[0]@here/cpu#0", "runners[0]@here/cpu#0"
TAIL: Cause = "waiting for the tail of generation"


def timeline(**lanes: list[tuple[str, float, float]]) -> list[TimelineSpan]:
    """Spans by process: `controller`, `train`, `rollout`, `other`, `grader`, `runner`, from second 0 on."""
    names = {
        "controller": "controller", "train": TRAIN, "rollout": ROLLOUT, "other": OTHER, "grader": GRADER,
        "runner": RUNNER,
    }  # fmt: skip
    spans = [TimelineSpan(names[lane], *span) for lane, some in lanes.items() for span in some]
    return [TimelineSpan("controller", "launch", 0.0, 0.0), *spans]


def by_worker(spans: list[TimelineSpan]) -> dict[str, dict[Cause, float]]:
    return {each.worker: dict(each.seconds) for each in worker_times(spans)}


def test_computing_is_named_by_its_phase() -> None:
    found = by_worker(
        timeline(
            controller=[("start-up", 0, 3), ("publish", 3, 4), ("rollout", 4, 8), ("grade", 8, 9), ("residency", 9, 10),
                        ("score", 10, 11), ("update", 11, 14), ("checkpoint", 14, 15), ("evaluation", 15, 18)],
            train=[("build policy", 0, 2), ("policy.facts", 2, 3), ("generator.share", 3, 4),
                   ("generator.stream", 4, 8), ("reward-0.score", 8, 9), ("generator.hold", 9, 10),
                   ("reference.score", 10, 11), ("policy.update", 11, 14), ("policy.save", 14, 15),
                   ("generator.stream", 15, 18)],
            grader=[("grader.grade", 6, 8), ("decoding", 8, 8.5), ("rewards", 8.5, 9), ("grader.grade", 17, 18)],
        )
    )  # fmt: skip
    assert found[TRAIN] == {
        "start-up": 3, "weights": 1, "generation": 4, "scoring": 2, "residency": 1, "update": 3, "save": 1,
        "evaluation": 3,
    }  # fmt: skip
    assert found["controller"] == {
        "start-up": 3, "weights": 1, "generation": 4, "grading": 1, "residency": 1, "scoring": 1, "update": 3,
        "save": 1, "evaluation": 3,
    }  # fmt: skip
    assert found[GRADER] == {
        "waiting for start-up": 3, "waiting for weights": 1, "waiting for the other role": 6, "grading": 3,
        "residency": 1, "waiting for save": 1, "waiting for evaluation": 2, "evaluation": 1,
    }  # fmt: skip


def test_ranks_that_run_out_of_sequences_wait_for_the_tail() -> None:
    """Both roles are on each device: there is no other role to wait for."""
    second = "train[1]@here/cpu#0"
    spans = timeline(
        controller=[("rollout", 0, 10), ("update", 10, 14)],
        train=[("generator.stream", 0, 10), ("policy.update", 10, 14)],
    )
    spans += [TimelineSpan(second, "generator.stream", 0, 4), TimelineSpan(second, "policy.update", 10, 13)]
    found = by_worker(spans)
    assert found[TRAIN] == {"generation": 10, "update": 4}
    assert found[second] == {"generation": 4, TAIL: 6, "update": 3, "waiting for other ranks": 1}


def test_a_learner_waits_for_generators_then_for_their_tail_then_for_rewards() -> None:
    found = by_worker(
        timeline(
            controller=[("rollout", 0, 8), ("grade", 8, 12), ("update", 12, 15)],
            train=[("policy.update", 12, 15)],
            rollout=[("generator.stream > steps", 0, 5), ("generator.stream > tail", 5, 8), ("generator.stream", 0, 8)],
            grader=[("grader.grade", 5, 12)],
        )
    )
    assert found[TRAIN] == {"waiting for the other role": 5, TAIL: 3, "waiting for grading": 4, "update": 3}
    assert found[ROLLOUT] == {"generation": 8, "waiting for grading": 4, "waiting for the other role": 3}


def test_a_generator_without_prompts_waits_for_what_keeps_them_back() -> None:
    waiting = "generator.stream > waiting for prompts"
    found = by_worker(
        timeline(
            controller=[("wait > waiting for generation", 0, 4), ("wait > waiting for grading", 4, 6), ("wait", 0, 6),
                        ("update", 6, 9), ("publish", 9, 10), ("wait", 10, 12)],
            train=[("policy.update", 6, 9), ("policy.store", 9, 10)],
            rollout=[("generator.stream > steps", 0, 2), (waiting, 2, 12), ("generator.stream", 0, 12)],
            other=[("generator.stream > steps", 0, 4), (waiting, 4, 12), ("generator.stream", 0, 12)],
        )
    )  # fmt: skip
    assert found[ROLLOUT] == {
        "generation": 2, TAIL: 2, "waiting for grading": 2, "waiting for the other role": 3, "waiting for weights": 1,
        "waiting for prompts": 2,
    }  # fmt: skip
    assert found[TRAIN] == {
        "waiting for the other role": 2, TAIL: 2, "waiting for grading": 2, "update": 3, "weights": 1,
        "waiting for the controller": 2,
    }  # fmt: skip


def test_tools_are_waited_for_by_runners_generators_and_learners() -> None:
    found = by_worker(
        timeline(
            controller=[("rollout", 0, 10)],
            train=[("policy.describe", 0, 0.5)],
            rollout=[("generator.serve > steps", 0, 3), ("generator.serve > waiting for requests", 3, 7),
                     ("generator.serve > steps", 7, 10), ("generator.serve", 0, 10)],
            runner=[("runner.stream > waiting for generation", 0, 3), ("runner.stream > waiting for tools", 3, 7),
                    ("runner.stream > tail", 7, 9), ("runner.stream", 0, 10)],
        )
    )  # fmt: skip
    assert found[RUNNER] == {"waiting for the other role": 3, "waiting for tools": 4, TAIL: 2, "episodes": 1}
    assert found[ROLLOUT] == {"generation": 6, "waiting for tools": 4}
    assert found[TRAIN] == {"weights": 0.5, "waiting for the other role": 3.5, "waiting for tools": 4, TAIL: 2}


def test_an_install_beside_a_stream_is_time_of_the_weights() -> None:
    found = by_worker(
        timeline(
            controller=[("wait", 0, 10)],
            rollout=[("generator.stream > steps", 0, 10), ("installing weights", 4, 5), ("generator.stream", 0, 10)],
        )
    )
    assert found[ROLLOUT] == {"generation": 9, "weights": 1}


def test_everything_in_a_recovery_is_recovery() -> None:
    found = by_worker(
        timeline(
            controller=[("recovery", 0, 6), ("rollout", 6, 8)],
            train=[("build policy", 1, 3), ("policy.restore", 3, 4), ("generator.stream", 6, 8)],
        )
    )
    assert found[TRAIN] == {"waiting for recovery": 6, "generation": 2}


def test_between_phases_workers_wait_for_the_controller_and_outside_of_them_nothing_is_known() -> None:
    found = by_worker(
        timeline(
            controller=[("rollout", 1, 4), ("update", 6, 8), ("my phase", 8, 9)],
            train=[("generator.stream", 1, 4), ("policy.update", 6, 8), ("policy.mystery", 9, 10)],
        )
    )
    assert found["controller"] == {"unknown": 3, "generation": 3, "control": 2, "update": 2}
    assert found[TRAIN] == {"unknown": 3, "generation": 3, "waiting for the controller": 2, "update": 2}


def test_a_device_that_is_lent_generates_and_changes_sides() -> None:
    found = by_worker(
        timeline(
            controller=[("lend", 0, 2), ("wait", 2, 8), ("update", 8, 9)],
            train=[("lent-generator.hold", 0, 1), ("lent-generator.stream", 2, 7), ("policy.update", 8, 9)],
            rollout=[("generator.stream", 0, 9)],
        )
    )
    assert found[TRAIN] == {"residency": 2, "generation": 5, "waiting for the other role": 1, "update": 1}


def test_ranks_compute_and_wait_for_data_and_each_other() -> None:
    spans = [
        TimelineSpan("rank 0", "launch", 10.0, 10.0),
        TimelineSpan("rank 0", "start-up", 10.0, 12.0),
        TimelineSpan("rank 0", "data", 12.0, 13.0),
        TimelineSpan("rank 0", "compute > waiting for other ranks", 14.0, 14.5),
        TimelineSpan("rank 0", "compute > checkpoint", 15.0, 16.0),
        TimelineSpan("rank 0", "compute > evaluation", 16.0, 18.0),
        TimelineSpan("rank 0", "compute", 13.0, 18.0),
        TimelineSpan("rank 0", "snapshot", 18.5, 19.0),
    ]
    assert by_worker(spans)["rank 0"] == {
        "start-up": 2, "waiting for data": 1, "update": 1.5, "waiting for other ranks": 0.5, "save": 1.5,
        "evaluation": 2, "unknown": 0.5,
    }  # fmt: skip


def test_a_rank_that_begins_a_step_early_waits_for_the_last_one() -> None:
    """Nobody gets past the first collective of a step alone. Rank 1 has lost its first step."""
    spans = [TimelineSpan("rank 0", "launch", 0.0, 0.0)]
    for worker, begins in (("rank 0", (1.0, 6.0, 12.0)), ("rank 1", (8.0, 11.5))):
        for begin in begins:
            end = {1.0: 5.0, 6.0: 10.0, 8.0: 10.0}.get(begin, 15.0)
            spans += [TimelineSpan(worker, "data", begin - 0.5, begin), TimelineSpan(worker, "compute", begin, end)]
    found = by_worker(spans)
    assert found["rank 0"] == {"waiting for data": 1.5, "update": 9.0, "waiting for other ranks": 2.0, "unknown": 2.5}
    assert found["rank 1"]["waiting for other ranks"] == 0.5


def test_between_two_launches_nobody_has_time() -> None:
    found = by_worker(
        [
            TimelineSpan("rank 0", "launch", 10.0, 10.0),
            TimelineSpan("rank 0", "compute", 11.0, 13.0),
            TimelineSpan("rank 0", "launch", 1_000.0, 1_000.0),
            TimelineSpan("rank 0", "compute", 1_002.0, 1_005.0),
        ]
    )
    assert found == {"rank 0": {"unknown": 3.0, "update": 5.0}}


SUCCESSOR, THIRD = "rollout[0]@here/cpu#1", "rollout[0]@there/cpu#2"


def test_a_slot_whose_worker_died_waits_for_recovery_from_its_last_span_until_the_first_of_its_successor() -> None:
    """From 5 until 9, whatever the controller does then. The slot has the whole 20 seconds of the run."""
    spans = timeline(
        controller=[("wait", 0, 6), ("recovery", 6, 8), ("wait", 8, 20)], rollout=[("generator.stream", 1, 5)]
    )
    found = by_worker([*spans, TimelineSpan(SUCCESSOR, "generator.stream", 9.0, 12.0)])
    assert found[ROLLOUT] == {"waiting for the controller": 1.0, "generation": 4.0, "waiting for recovery": 4.0}
    assert found[SUCCESSOR] == {"generation": 3.0, "waiting for the controller": 8.0}
    assert sum(found[ROLLOUT].values()) + sum(found[SUCCESSOR].values()) == 20.0


def test_a_worker_that_is_being_replaced_is_not_seen_by_the_others() -> None:
    """A generator without sequences makes the rest a tail; one that is dead does not."""
    spans = timeline(controller=[("wait", 0, 10)], train=[("policy.facts", 0, 1)], other=[("generator.stream", 0, 10)])
    spans += [
        TimelineSpan(ROLLOUT, "generator.stream", 0.0, 5.0),
        TimelineSpan(SUCCESSOR, "generator.stream", 8.0, 10.0),
    ]
    assert by_worker(spans)[TRAIN] == {"control": 1.0, "waiting for the other role": 9.0}


def test_two_deaths_in_a_row_and_one_before_the_first_span() -> None:
    """The worker with number 0 of the grader died before it did anything: its slot has time from the launch on."""
    second_grader = "graders[0]@here/cpu#1"
    spans = timeline(controller=[("rollout", 0, 20)], rollout=[("generator.stream", 0, 4)])
    spans += [TimelineSpan(SUCCESSOR, "build generator", 5.0, 6.0), TimelineSpan(THIRD, "generator.stream", 9.0, 20.0)]
    spans += [TimelineSpan(second_grader, "grader.grade", 10.0, 20.0)]
    found = by_worker(spans)
    assert found[ROLLOUT] == {"generation": 4.0, "waiting for recovery": 1.0}
    assert found[SUCCESSOR] == {"start-up": 1.0, "waiting for recovery": 3.0}
    assert found[THIRD] == {"generation": 11.0}
    assert found[second_grader] == {"waiting for the other role": 10.0, "grading": 10.0}


def test_a_slot_has_time_until_its_generator_has_left_and_from_the_first_span_of_one_that_joins() -> None:
    """It is vacant from 8 until 14, and a slot that was vacant at the start until 3."""
    spans = timeline(
        controller=[("wait", 0, 20), (f"{VACATED}{ROLLOUT}", 8, 8), (f"{JOINED}{SUCCESSOR}", 15, 15),
                    (f"{JOINED}{OTHER}", 5, 5)],
        rollout=[("generator.stream", 0, 7)],
        other=[("build generator", 3, 4), ("generator.stream", 6, 20)],
    )  # fmt: skip
    spans += [
        TimelineSpan(SUCCESSOR, "build generator", 14.0, 15.0),
        TimelineSpan(SUCCESSOR, "generator.stream", 15, 20),
    ]
    found = by_worker(spans)
    assert found[ROLLOUT] == {"generation": 7.0, TAIL: 1.0}
    assert found[SUCCESSOR] == {"start-up": 1.0, "generation": 5.0}
    assert sum(found[OTHER].values()) == 17.0


def test_a_slot_that_stays_vacant_has_time_until_then() -> None:
    controller = [("wait", 0.0, 20.0), (f"{VACATED}{ROLLOUT}", 8.0, 8.0)]
    found = by_worker(timeline(controller=controller, rollout=[("generator.stream", 0, 8)]))
    assert found == {"controller": {"generation": 20.0}, ROLLOUT: {"generation": 8.0}}


def test_ranks_that_are_restarted_wait_for_recovery_from_their_last_span_until_their_next_launch() -> None:
    """The death is noticed at 7, when rank 1 has no span yet: what it began is lost. Then both are new at 9."""
    spans = []
    for rank, last_s in (("rank 0", 6.5), ("rank 1", 0.0)):
        spans += [TimelineSpan(rank, LAUNCH, 0.0, 0.0), TimelineSpan(rank, "start-up", 0.0, 2.0)] if last_s else []
        spans += [TimelineSpan(rank, "compute", 2.0, last_s)] if last_s else []
        spans += [TimelineSpan(rank, RESTART, 7.0, 9.0), TimelineSpan(rank, LAUNCH, 9.0, 9.0)]
        spans += [TimelineSpan(rank, "start-up", 9.0, 10.0), TimelineSpan(rank, "compute", 10.0, 14.0)]
    found = by_worker(spans)
    assert found["rank 0"] == {"start-up": 3.0, "update": 8.5, "waiting for recovery": 2.5}
    assert found["rank 1"] == {"start-up": 1.0, "update": 4.0, "waiting for recovery": 9.0}


def test_while_a_controller_is_replaced_all_wait_for_recovery() -> None:
    """It died at 6, in an update that nobody has heard of; its successor attaches to the learner, which is number 1 for
    it."""
    spans = timeline(
        controller=[("rollout", 0, 5), (RESTART, 6, 8), ("launch", 8, 8), ("recovery", 8, 9), ("update", 9, 12)],
        train=[("generator.stream", 0, 5)],
    )
    spans += [TimelineSpan("train[0]@here/cpu#1", "policy.update", 9.0, 12.0)]
    found = by_worker(spans)
    assert found["controller"] == {"generation": 5.0, "waiting for recovery": 4.0, "update": 3.0}
    assert found[TRAIN] == {"generation": 5.0, "waiting for recovery": 3.0}
    assert found["train[0]@here/cpu#1"] == {"waiting for recovery": 1.0, "update": 3.0}


def test_of_calls_at_the_same_time_the_one_that_began_last_counts() -> None:
    calls = [TimelineSpan("graders[0]", "slow", 0.0, 10.0), TimelineSpan("graders[0]", "quick", 2.0, 3.0)]
    assert [(each.name, each.end_s - each.begin_s) for each in segments(calls, 0.0, 12.0)] == [
        ("slow", 2.0), ("quick", 1.0), ("slow", 7.0), (None, 2.0),
    ]  # fmt: skip


def test_idle_segments_are_joined_where_the_cause_stays() -> None:
    spans = timeline(
        controller=[("rollout", 0, 8), ("grade", 8, 9)],
        train=[("policy.describe", 0, 1)],
        rollout=[("generator.stream > steps", 0, 2), ("generator.stream > steps", 2, 4), ("generator.stream", 0, 8)],
    )
    found = [(each.begin_s, each.end_s, each.cause) for each in idle_segments(spans) if each.worker == TRAIN]
    assert found == [(1, 8, "waiting for the other role"), (8, 9, "waiting for grading")]


def test_a_line_for_each_kind_has_the_largest_shares() -> None:
    times = [
        WorkerTime(worker=f"train[{at}]@here/cpu#0", seconds={"update": 6.0, "unknown": 3.0, "save": 0.01})
        for at in range(2)
    ]
    assert time_lines(times) == ["train: update 67%, unknown 33%"]
    assert time_lines(times, most_causes=1) == ["train: update 67%, other 33%"]
    assert worker_times([]) == []


def test_only_computing_is_not_idle() -> None:
    assert {cause for cause in CAUSES if not is_idle(cause)} == {
        "generation", "episodes", "grading", "scoring", "update", "weights", "save", "evaluation", "start-up",
        "control",
    }  # fmt: skip


NAMES = st.sampled_from(
    ("generator.stream", "generator.stream > tail", "generator.stream > waiting for prompts", "policy.update",
     "policy.save", "grader.grade", "rewards", "a", "start-up", "wait", "wait > waiting for grading", "rollout",
     "evaluation", "update", "recovery")
)  # fmt: skip
SLOT = (ROLLOUT, SUCCESSOR, THIRD)
WORKERS = st.sampled_from(("controller", TRAIN, *SLOT, GRADER, RUNNER))


@given(st.lists(st.tuples(WORKERS, NAMES, st.integers(0, 40), st.integers(0, 15)), min_size=1))
def test_causes_add_up_to_the_time_of_a_slot(drawn: list[tuple[str, str, int, int]]) -> None:
    """Of all its workers together: from the launch to the last span of the run, without gaps and overlaps."""
    spans = [TimelineSpan(worker, name, float(begin), float(begin + length)) for worker, name, begin, length in drawn]
    begin, end = min(span.begin_s for span in spans), max(span.end_s for span in spans)
    launched = [TimelineSpan("controller", "launch", begin, begin), *spans]
    slots: dict[tuple[str, int], float] = {}
    for each in worker_times(launched):
        name = TimelineWorker.of(each.worker)
        slots[name.kind, name.slot] = slots.get((name.kind, name.slot), 0.0) + each.total_s
        assert all(spent >= 0 for spent in each.seconds.values())
        assert each.seconds.keys() <= CAUSES.keys()
    assert all(spent == pytest.approx(end - begin) for spent in slots.values())
    found = caused_segments(launched)
    for parts in ([part for worker in SLOT for part in found.get(worker, ())], *found.values()):
        assert all(before.end_s == after.begin_s for before, after in pairwise(parts))
        assert all(part.begin_s < part.end_s for part in parts)


MOMENTS = st.integers(0, 40)


@given(
    st.lists(st.tuples(st.sampled_from(SLOT), MOMENTS, st.integers(0, 15)), min_size=1),
    st.dictionaries(st.sampled_from(SLOT), MOMENTS),
    st.dictionaries(st.sampled_from(SLOT), MOMENTS),
)
def test_no_second_of_a_slot_counts_twice_whoever_leaves_and_joins(
    drawn: list[tuple[str, int, int]], left: dict[str, int], joined: dict[str, int]
) -> None:
    spans = [TimelineSpan("controller", "launch", 0.0, 0.0), TimelineSpan("controller", "wait", 0.0, 60.0)]
    spans += [TimelineSpan(worker, "generator.stream", at, at + length) for worker, at, length in drawn]
    marks = [(f"{VACATED}{worker}", at) for worker, at in left.items()]
    marks += [(f"{JOINED}{worker}", at) for worker, at in joined.items()]
    spans += [TimelineSpan("controller", name, float(at), float(at)) for name, at in marks]
    found = caused_segments(spans)
    parts = [part for worker in SLOT for part in found.get(worker, ())]
    assert all(before.end_s <= after.begin_s for before, after in pairwise(parts))
    assert all(0.0 <= part.begin_s < part.end_s <= 60.0 for part in parts)
    vacancies = sum(after.begin_s > before.end_s for before, after in pairwise(parts))
    assert vacancies <= len(left)


def test_ranks_may_start_in_any_order() -> None:
    """Rank 1 was a millisecond earlier, at both launches of the run."""
    spans = []
    for at in (100.0, 200.0):
        for worker, early_s in (("rank 0", 0.0), ("rank 1", 0.001)):
            begin_s = at - early_s
            spans += [
                TimelineSpan(worker, LAUNCH, begin_s, begin_s),
                TimelineSpan(worker, "start-up", begin_s, at + 5.0),
                TimelineSpan(worker, "compute", at + 5.0, at + 10.0),
            ]

    for each in worker_times(spans):
        assert "unknown" not in each.seconds or each.seconds["unknown"] < 0.01
        assert each.seconds["start-up"] == pytest.approx(10.0, abs=0.01)
        assert each.total_s == pytest.approx(20.0, abs=0.01)


def test_time_that_the_accounting_loses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The causes of a worker are compared with the time from the launch to the end of the run, and not with themselves:
    here what a worker did last is lost."""
    spans = [TimelineSpan("rank 0", LAUNCH, 0.0, 0.0), TimelineSpan("rank 0", "compute", 0.0, 6.0)]
    spans += [TimelineSpan("rank 0", "data", 6.0, 10.0)]
    assert caused_segments(spans)
    whole = accounting.segments
    monkeypatch.setattr(accounting, "segments", lambda *args: list(whole(*args))[:-1])
    with pytest.raises(AssertionError, match=r"rank 0: causes of 6.0 s in 10.0 s"):
        caused_segments(spans)


def test_time_between_a_death_and_its_successor_that_the_accounting_loses_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole is that of the slot, and not of the times of its workers: here they are as they were once, until the
    last span of one and from the first of the other."""
    spans = timeline(controller=[("wait", 0, 10)], rollout=[("generator.stream", 0, 3)])
    spans += [TimelineSpan(SUCCESSOR, "generator.stream", 7.0, 10.0)]
    whole = accounting.lives
    monkeypatch.setattr(accounting, "lives", lambda *args: (replace(life, end_s=life.gone_s) for life in whole(*args)))
    with pytest.raises(AssertionError, match=r"rollout\[0\]@here/cpu#0 and .*#1: causes of 6.0 s in 10.0 s"):
        caused_segments(spans)
