# SPDX-License-Identifier: Apache-2.0
"""What is decided about deaths of workers, by value."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.controller.recovery import Abort, Death, GiveUp, Part, Rebuild, RecoveryPlan, Respawn, Retry, Rewind


def death(part: Part, *slots: int, others_go_on: bool = False, failures: int = 0, hangs: int = 0) -> Death:
    return Death(
        part=part, cause="it was killed", slots=slots, others_go_on=others_go_on, failures=failures, hangs=hangs
    )


def test_a_generator_whose_work_others_take_over_is_replaced_alone() -> None:
    assert RecoveryPlan(1).decide(death("generator", 0, others_go_on=True)) == Respawn()


@pytest.mark.parametrize("part", ["grader", "runner"])
def test_the_work_of_a_grader_or_a_runner_is_tried_again(part: Part) -> None:
    assert RecoveryPlan(1).decide(death(part, 0, others_go_on=True)) == Retry()


@pytest.mark.parametrize("part", ["generator", "runner", "grader", "controller"])
def test_else_the_run_goes_back_to_its_last_committed_step(part: Part) -> None:
    assert RecoveryPlan(1).decide(death(part)) == Rewind()


@pytest.mark.parametrize("others_go_on", [True, False])
def test_learners_are_built_again_because_they_hold_the_weights(others_go_on: bool) -> None:
    assert RecoveryPlan(1).decide(death("learner", others_go_on=others_go_on)) == Rebuild()


def test_a_run_that_cannot_go_back_ends_where_it_would_have_to() -> None:
    for part in ("learner", "generator"):
        remedy = RecoveryPlan(3, goes_back=False).decide(death(part))
        assert remedy == Abort(reason="this run cannot go back to an earlier step")
    assert RecoveryPlan(3, goes_back=False).decide(death("grader", 0, others_go_on=True)) == Retry()


def test_deaths_without_progress_end_the_run() -> None:
    plan = RecoveryPlan(2)

    assert [plan.decide(death("learner")) for _ in range(2)] == [Rebuild(), Rebuild()]
    last = plan.decide(death("learner"))

    assert isinstance(last, Abort)
    assert "the learner was replaced 2 times since the last committed step" in last.reason
    assert "placement.restarts" in last.reason


def test_a_node_may_die_with_any_number_of_generators() -> None:
    plan = RecoveryPlan(3)

    assert [plan.decide(death("generator", slot, others_go_on=True)) for slot in range(64)] == [Respawn()] * 64
    assert plan.decide(death("generator", *range(64))) == Rewind()


def test_a_generator_whose_successors_die_too_ends_the_run() -> None:
    plan = RecoveryPlan(2)

    remedies = [plan.decide(death("generator", slot, others_go_on=True)) for slot in (4, 5, 4, 5, 6, 5)]

    assert remedies[:-1] == [Respawn()] * 5
    assert remedies[-1] == Abort(
        reason="generator 5 was replaced 2 times since the last committed step, as often as placement.restarts allows"
    )


def test_a_runner_that_has_ended_an_episode_may_die_again() -> None:
    plan, died = RecoveryPlan(1), death("runner", 0, others_go_on=True)

    for _ in range(50):
        assert plan.decide(died) == Retry()
        plan.note_work_done("runner", 0)
    assert plan.decide(died) == Retry()
    plan.note_work_done("runner", 1)  # that of another one does not count
    last = plan.decide(died)

    assert isinstance(last, Abort)
    assert last.reason.startswith("runner 0 was replaced once since the last committed step, without an episode that")


@pytest.mark.parametrize(
    ("failures", "hangs", "remedy"),
    [(1, 0, Retry()), (3, 0, Retry()), (4, 0, GiveUp()), (1, 1, Retry()), (3, 1, Retry()), (2, 2, GiveUp())],
)
def test_a_batch_of_which_graders_die_is_given_up(failures: int, hangs: int, remedy: object) -> None:
    """The run does not end: the batch is what graders die of."""
    died = death("grader", 0, others_go_on=True, failures=failures, hangs=hangs)

    assert RecoveryPlan(3).decide(died) == remedy


def test_a_run_that_makes_progress_may_lose_workers_for_ever() -> None:
    plan = RecoveryPlan(1)

    for _ in range(50):
        assert plan.decide(death("learner")) == Rebuild()
        plan.note_progress()


def test_parts_have_budgets_of_their_own() -> None:
    plan = RecoveryPlan(1)

    assert plan.decide(death("learner")) == Rebuild()
    assert plan.decide(death("generator")) == Rewind()
    assert isinstance(plan.decide(death("generator")), Abort)


@pytest.mark.parametrize("part", ["learner", "generator", "grader", "runner", "controller"])
@pytest.mark.parametrize("others_go_on", [True, False])
def test_without_restarts_the_first_death_ends_the_run(part: Part, others_go_on: bool) -> None:
    failures = 1 if part == "grader" and others_go_on else 0

    remedy = RecoveryPlan(0).decide(death(part, 0, others_go_on=others_go_on, failures=failures))

    assert remedy == Abort(reason="placement.restarts is 0")


def test_a_run_that_is_to_end_is_not_continued_because_of_another_death() -> None:
    plan = RecoveryPlan(1)
    plan.decide(death("generator", 0, others_go_on=True))
    last = plan.decide(death("generator", 0, others_go_on=True))

    assert isinstance(last, Abort)
    assert plan.decide(death("learner")) == last


Happening = tuple[Literal["generator", "runner"], int] | Literal["commit"]


@given(
    st.integers(1, 4),
    st.lists(st.one_of(st.just("commit"), st.tuples(st.sampled_from(["generator", "runner"]), st.integers(0, 3)))),
)
def test_a_run_ends_exactly_when_one_worker_dies_too_often_without_progress(
    most: int, happenings: list[Happening]
) -> None:
    plan, num_deaths, is_over = RecoveryPlan(most), Counter[Happening](), False

    for each in happenings:
        if each == "commit":
            plan.note_progress()
            num_deaths.clear()
            continue
        num_deaths[each] += 1
        part, slot = each
        is_over = is_over or num_deaths[each] > most
        remedy = plan.decide(death(part, slot, others_go_on=True))
        assert isinstance(remedy, Abort) == is_over
        assert is_over or remedy == (Respawn() if part == "generator" else Retry())
