# SPDX-License-Identifier: Apache-2.0
"""What is decided about deaths of workers, by value."""

from __future__ import annotations

import pytest

from podium.controller.recovery import Abort, Death, Part, RecoveryPlan, Remedy, Respawn, Retry, Rewind


def death(part: Part, *, serves_runners: bool = False) -> Death:
    return Death(part=part, cause="it was killed", serves_runners=serves_runners)


@pytest.mark.parametrize(
    ("died", "remedy"),
    [
        (death("grader"), Retry()),
        (death("runner"), Respawn()),
        (death("generator"), Respawn()),
        (death("generator", serves_runners=True), Rewind()),
        (death("learner"), Rewind()),
    ],
)
def test_each_part_has_its_remedy(died: Death, remedy: Remedy) -> None:
    assert RecoveryPlan(1).decide(died) == remedy


def test_a_death_of_the_cluster_ends_the_run() -> None:
    remedy = RecoveryPlan(100).decide(death("cluster"))

    assert isinstance(remedy, Abort)
    assert "Ray itself is gone" in remedy.reason


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
    assert plan.num_recoveries == 50


def test_parts_have_budgets_of_their_own() -> None:
    plan = RecoveryPlan(1)

    assert plan.decide(death("learner")) == Rewind()
    assert plan.decide(death("generator")) == Respawn()
    assert isinstance(plan.decide(death("generator")), Abort)


def test_without_restarts_the_first_death_ends_the_run() -> None:
    remedy = RecoveryPlan(0).decide(death("learner"))

    assert remedy == Abort(reason="placement.restarts is 0")
