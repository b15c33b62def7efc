# SPDX-License-Identifier: Apache-2.0
"""What is said of runs with one problem each, by values that the tests know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.simulated_runs import COSTS, simulated, simulated_recipe
from podium.controller.simulation.costs import LogNormal, UpdateCost
from podium.observe.causes import Cause
from podium.observe.timeline import TimelineSpan
from podium.planning.alarms import alarms_of
from podium.planning.findings import age_texts, findings_of, slow_generators, wait_texts
from podium.runs.accounting import WorkerTime

A, B, C = (f"rollout[{rank}]@node/cpu#0" for rank in range(3))


def engine(worker: str, *, seconds: float, steps: int, tokens: int, name: str = "steps") -> TimelineSpan:
    values = {"steps": float(steps), "generated_tokens": float(tokens)}
    return TimelineSpan(
        worker=worker, name=f"generator.stream > {name}", begin_s=100.0, end_s=100.0 + seconds, values=values
    )


def test_a_slow_generator_is_named_with_its_speed() -> None:
    spans = [
        engine(A, seconds=1.0, steps=50, tokens=800), engine(B, seconds=2.0, steps=50, tokens=800),
        engine(B.replace("#0", "#1"), seconds=1.0, steps=10, tokens=40, name="tail"),
        engine(C, seconds=1.0, steps=50, tokens=840),
    ]  # fmt: skip
    (text,) = slow_generators(spans)
    # B: 840 tokens and 60 steps in 3 s. The median of the others is between 800 and 840 tokens, and 50 steps, in 1 s.
    assert text == (
        "rollout[1] is slow: it generates 280 tokens/s while it has work, and the others 820 (a step of its engine "
        "takes 50 ms instead of 20 ms)"
    )


@pytest.mark.parametrize(
    "other",
    [
        engine(B, seconds=1.4, steps=50, tokens=800),  # not by that much
        engine(
            B, seconds=2.0, steps=50, tokens=1600
        ),  # more sequences at once: the steps are longer, the engine is not
        engine(B, seconds=2.0, steps=100, tokens=800),  # fewer sequences at once
        engine(B, seconds=2.0, steps=19, tokens=300),  # too few to tell
    ],
)
def test_a_generator_with_other_work_is_not_slow(other: TimelineSpan) -> None:
    assert list(slow_generators([engine(A, seconds=1.0, steps=50, tokens=800), other])) == []
    assert list(slow_generators([other])) == []


def spent(worker: str, **seconds: float) -> WorkerTime:
    causes: dict[str, Cause] = {
        "start": "waiting for start-up", "grading": "waiting for grading", "busy": "generation", "update": "update",
        "grade": "grading", "other": "waiting for the other role", "unknown": "unknown",
    }  # fmt: skip
    return WorkerTime(worker=worker, seconds={causes[name]: value for name, value in seconds.items()})


def test_waits_are_shares_of_the_time_after_start_up() -> None:
    found = list(
        wait_texts(
            [
                spent("controller", busy=10.0),
                spent("train[0]@node/cpu#0", start=90.0, grading=6.0, update=4.0),
                spent(A, start=90.0, grading=5.0, busy=5.0),
                spent("graders[0]@node/cpu#0", start=90.0, grade=7.0, other=3.0),
            ]
        )
    )
    assert found[0].startswith("graders are busy 70% of the time after start-up")
    assert found[1].startswith("learners and generators wait for grading 60% and 50% of the time after start-up: ")
    assert "grading.workers" in found[1]
    assert len(found) == 2


def test_short_waits_and_idle_graders_are_nothing_to_say() -> None:
    times = [
        spent("train[0]@node/cpu#0", grading=1.0, update=5.0, unknown=4.0),
        spent("graders[0]@node/cpu#0", grade=1.0, other=9.0),
    ]
    assert list(wait_texts(times)) == []


def test_whom_a_role_waits_for_says_what_to_change() -> None:
    (learners,) = wait_texts([spent("train[0]@node/cpu#0", other=5.0, update=5.0)])
    (generators,) = wait_texts([spent(A, other=5.0, busy=5.0)])
    assert "more placement.rollout_devices" in learners
    assert "fewer placement.rollout_devices" in generators


def evaluations(*solved: float) -> list[tuple[int, dict[str, float]]]:
    return [(4 * at, {"heldout/solved": value}) for at, value in enumerate(solved)]


def test_fewer_solved_held_out_answers_are_an_alarm_when_it_is_more_than_chance(tmp_path: Path) -> None:
    recipe = simulated_recipe(tmp_path)  # does not say how many prompts: 64 are assumed
    steps = [(step, {"reward/mean": 0.1 * step, "grad_norm": 1.0, "loss": 0.1 * step}) for step in range(1, 9)]

    (text,) = alarms_of(recipe, steps, evaluations(0.29, 0.02, 0.0))
    assert text.startswith("29% of the held-out answers were solved at step 0, and 0% are at step 8, while the reward")
    assert "0.15 to 0.75" in text
    # 3 standard errors of the difference of 64 answers each: 21.6% between 30% and 14%, 19.0% between 30% and 5%.
    assert list(alarms_of(recipe, steps, evaluations(0.30, 0.14))) == []
    assert len(list(alarms_of(recipe, steps, evaluations(0.30, 0.05)))) == 1
    assert list(alarms_of(recipe, steps, evaluations(0.0, 0.3))) == []
    assert list(alarms_of(recipe, steps, evaluations(0.3))) == []
    assert list(alarms_of(recipe, steps, evaluations(0.3, float("nan")))) == []
    falling = [(step, {**values, "reward/mean": -values["reward/mean"]}) for step, values in steps]
    assert "reward" not in next(alarms_of(recipe, falling, evaluations(0.3, 0.0)))


def test_answers_that_grow_are_said_with_the_reward_that_grows_and_cut_held_out_answers_beside(tmp_path: Path) -> None:
    recipe = simulated_recipe(tmp_path)
    steps = [
        (step, {"response/mean": 10.0 * step, "reward/mean": 0.1 * step, "grad_norm": 1.0, "loss": 0.1 * step})
        for step in range(1, 9)
    ]
    cut = [(0, {"heldout/truncated": 0.0}), (8, {"heldout/truncated": 1.0})]

    assert list(alarms_of(recipe, steps, cut)) == [
        "answers have grown from 15 to 75 tokens (medians of response/mean), and the reward from 0.15 to 0.75: it may "
        "pay for length",
        "100% of the held-out answers are cut off at step 8, and 0% were at step 0",
    ]
    worse = [(step, {**values, "reward/mean": -0.1 * step}) for step, values in steps]
    assert next(alarms_of(recipe, worse, cut)).endswith("75 tokens (medians of response/mean)")
    assert list(alarms_of(recipe, steps[:1], cut[1:])) == []


def test_old_answers_are_said_and_an_alarm_only_where_the_weights_moved(tmp_path: Path) -> None:
    recipe = simulated_recipe(
        tmp_path, placement={"layout": "split", "devices": 2}, rollout={"staleness": 4},
        algorithm={"correction": "none"},
    )  # fmt: skip
    near = {"staleness/mean": 2.5, "staleness/kl": 0.01, "staleness/ess": 0.95, "grad_norm": 1.0}
    far = near | {"staleness/kl": 0.2}

    (text,) = age_texts(recipe, [(step, near) for step in range(8)])
    assert text.startswith("trained answers are 2.5 versions old on average")
    assert "rollout.staleness is 4" in text
    assert "algorithm.correction: none" in text
    assert list(age_texts(recipe, [(step, near | {"staleness/mean": 1.0}) for step in range(8)])) == []
    assert list(alarms_of(recipe, [(step, near) for step in range(8)])) == []
    (alarm,) = alarms_of(recipe, [(step, far) for step in range(8)])
    assert alarm.startswith("trained answers are 2.5 versions old on average, and the weights have moved far since")
    assert "Lower rollout.staleness" in alarm
    assert "staleness/kl 0.2" in alarm


def test_a_run_with_slow_graders(tmp_path: Path) -> None:
    costs = replace(
        COSTS, update=UpdateCost(token_s=0.0005, constant_s=0.1), grading_s=LogNormal(median=4.0), graders=2
    )
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_running": 16}
    run = simulated(simulated_recipe(tmp_path, rollout=rollout, steps=12, grading={"workers": 2}), costs).result.folder

    texts = [each.text for each in findings_of(run) if each.about == "time"]
    assert any("wait for grading" in text and "grading.workers" in text for text in texts), texts
