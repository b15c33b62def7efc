# SPDX-License-Identifier: Apache-2.0
"""What is decided about deaths of workers, by value."""

from __future__ import annotations

import pytest

from podium.controller.recovery import Abort, Death, Part, RecoveryPlan, Respawn, Rewind


def death(part: Part, *, others_go_on: bool = False) -> Death:
    return Death(part=part, cause="it was killed", others_go_on=others_go_on)


def test_a_worker_whose_work_others_take_over_is_replaced_alone() -> None:
    assert RecoveryPlan(1).decide(death("generator", others_go_on=True)) == Respawn()


@pytest.mark.parametrize("part", ["learner", "generator", "runner"])
def test_else_the_run_goes_back_to_its_last_committed_step(part: Part) -> None:
    assert RecoveryPlan(1).decide(death(part)) == Rewind()


def test_deaths_without_progress_end_the_run() -> None:
    plan = RecoveryPlan(2)

    assert [plan.decide(death("learner")) for _ in range(2)] == [Rewind(), Rewind()]
    last = plan.decide(death("learner"))

    assert isinstance(last, Abort)
    assert "replaced 2 times since the last committed step" in last.reason
    assert "placement.restarts" in last.reason


def test_a_run_that_makes_progress_may_lose_workers_for_ever() -> None:
    plan = RecoveryPlan(1)

    for _ in range(50):
        assert plan.decide(death("learner")) == Rewind()
        plan.note_progress()


def test_parts_have_budgets_of_their_own() -> None:
    plan = RecoveryPlan(1)

    assert plan.decide(death("learner")) == Rewind()
    assert plan.decide(death("generator")) == Rewind()
    assert isinstance(plan.decide(death("generator")), Abort)


def test_without_restarts_the_first_death_ends_the_run() -> None:
    remedy = RecoveryPlan(0).decide(death("learner"))

    assert remedy == Abort(reason="placement.restarts is 0")
