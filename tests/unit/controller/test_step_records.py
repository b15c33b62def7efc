# SPDX-License-Identifier: Apache-2.0
"""The numbers of a step by hand: rewards, groups, episodes, updates, speed, idleness, and pass@k by brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.made_batches import WORKER, make_answer, make_graded, make_report
from podium.algorithms.statistics import EffectiveSampleSize, Moments, PolicyStatistics, ValueStatistics
from podium.cluster.results import Metric, Span
from podium.controller.ledger import GroupRecord
from podium.controller.records import (
    StepRecord,
    idle_seconds,
    ledger_records,
    pass_at_k,
    powers_up_to,
    step_metrics,
)
from podium.data.trajectories import TrajectoryId
from podium.recipe.solving import Solving
from podium.roles.carriers import DistanceNote
from podium.roles.stages import CriticReport, GradedRollouts
from podium.weights.canary import LogprobGap

REWARDS, GROUPS = [1.0, 0.0, 1.0, 1.0, 0.5, 0.5], [3, 3, 5, 5, 8, 8]


def _record(graded: GradedRollouts, used: GradedRollouts | None = None, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": 4, "lr": 1e-3, "graded": graded, "used": graded if used is None else used, "distance": None,
        "report": None, "critic": None, "kl_coefficient": None, "seconds": {}, "step_s": 2.0, "idle_s": 0.5,
        "peak_flops": 1e6, "solving": Solving(reward=None, at=1.0), "versions": range(10),
    }  # fmt: skip
    return StepRecord(**(values | changes))


def _values(record: StepRecord, *names: str) -> tuple[float, ...]:
    found = step_metrics(record)
    return tuple(found[name] for name in names)


def test_rewards_are_of_everything_that_was_graded() -> None:
    record = _record(make_graded(REWARDS, GROUPS))

    names = ("reward/mean", "reward/std", "reward/max", "reward/min", "lr")
    assert _values(record, *names) == pytest.approx((4 / 6, np.std(REWARDS), 1.0, 0.0, 1e-3))


def test_groups_are_solved_by_all_by_some_or_by_none_of_their_episodes() -> None:
    record = _record(make_graded(REWARDS, GROUPS))

    names = ("groups", "groups/solved_all", "groups/solved_some", "groups/solved_none", "groups/uniform")
    # 3: one of two; 5: both; 8: neither, and equal as 5 is.
    assert _values(record, *names) == pytest.approx((3, 1 / 3, 1 / 3, 1 / 3, 2 / 3))
    assert _values(record, "groups/solve_rate") == (0.5,)


def test_what_counts_as_solved_is_the_recipes_to_say() -> None:
    record = _record(make_graded(REWARDS, GROUPS), solving=Solving(reward=None, at=0.5))

    assert _values(record, "groups/solved_all", "groups/solved_none") == pytest.approx((2 / 3, 0.0))


def test_a_reward_that_does_not_apply_is_left_out_of_its_own_numbers() -> None:
    values_NR = np.array([[1.0, np.nan], [3.0, 4.0]])
    record = _record(make_graded([1.0, 7.0], [0, 0], values_NR=values_NR, names=("a", "b")))

    assert _values(record, "reward/a/mean", "reward/b/mean", "reward/b/std") == (2.0, 4.0, 0.0)


def test_a_reward_that_never_applies_has_no_numbers() -> None:
    values_NR = np.array([[1.0, np.nan], [3.0, np.nan]])
    found = step_metrics(_record(make_graded([1.0, 3.0], [0, 0], values_NR=values_NR, names=("a", "b"))))

    assert "reward/a/mean" in found
    assert "reward/b/mean" not in found


def test_several_sources_have_a_mean_each_and_one_has_none() -> None:
    several = step_metrics(_record(make_graded(REWARDS, GROUPS, sources={3: "easy", 5: "hard", 8: "hard"})))

    assert several["reward/source/easy/mean"] == 0.5
    assert several["reward/source/hard/mean"] == 0.75
    assert not [name for name in step_metrics(_record(make_graded(REWARDS, GROUPS))) if "source" in name]


def test_extras_are_means_over_those_who_said_something() -> None:
    record = _record(make_graded(REWARDS, GROUPS, extras={"f/steps": (9.0, 6.0), "f/never": (0.0, 0.0)}))

    assert _values(record, "reward/extra/f/steps", "reward/extra/f/never") == (1.5, 0.0)


def test_shaping_is_reported_where_there_is_any() -> None:
    shaped = step_metrics(_record(make_graded([1.0, 0.0], [0, 0], shaping_N=np.array([0.0, -0.5]))))

    assert shaped["reward/shaping/mean"] == -0.25
    assert "reward/shaping/mean" not in step_metrics(_record(make_graded([1.0, 0.0], [0, 0])))


def test_episodes_are_counted_with_what_became_of_them() -> None:
    graded = make_graded(REWARDS, GROUPS, num_failed=1, num_dropped=2)
    record = _record(graded, graded.take(np.array([0, 1])))

    names = ("episodes", "episodes/failed", "episodes/dropped", "episodes/learned_from")
    assert _values(record, *names) == (8, 1, 2, 2)


def test_lengths_are_of_answers_and_prompts_apart() -> None:
    answers = [
        make_answer(0, 0, tokens=[1, 1, 1], prompt=[4] * 5, version=7, finish="length"),
        make_answer(0, 1, tokens=[1], prompt=[4] * 5, version=9),
        make_answer(1, 0, tokens=[], prompt=[4] * 2, finish="error"),
        make_answer(1, 1, tokens=[1, 1], prompt=[4] * 2, version=8, finish="cancelled"),
    ]
    record = _record(make_graded([0.0] * 4, [0, 0, 1, 1], answers=answers, version=9))

    names = ("response/mean", "response/max", "response/min", "prompt/mean", "episodes/truncated", "tokens")
    assert _values(record, *names) == (1.5, 3, 0, 3.5, 0.5, 20)
    # Versions 7, 9 and 8 beside 9; the answer without a token was drawn by none.
    assert _values(record, "staleness/mean", "staleness/max") == (1.0, 2.0)


def test_lengths_of_generated_and_of_trained_answers_are_quantiles_apart() -> None:
    """Those that a failure left out were generated too: if they are the long ones, it shows."""
    graded = make_graded([0.0] * 4, [0, 0, 1, 1], lengths=[1, 3, 5, 7])
    left_out = make_graded([0.0], [2], lengths=[9]).rollouts
    graded = replace(graded, left_out=(left_out,))
    record = _record(graded, graded.take(np.array([0, 1])), overlaps=True)

    # Of 1, 3, 5, 7, 9: at 0.4, 2, 3.6 and 3.96 of the way from the first (0) to the last (4).
    offered = _values(record, *(f"response/offered_p{quantile}" for quantile in (10, 50, 90, 99)))
    assert offered == pytest.approx((1.8, 5.0, 8.2, 8.92))
    trained = _values(record, *(f"response/trained_p{quantile}" for quantile in (10, 50, 90, 99)))
    assert trained == pytest.approx((1.2, 2.0, 2.8, 2.98))

    nothing = step_metrics(_record(graded, graded.take(np.empty(0, np.int64)), overlaps=True))
    assert nothing["response/offered_p50"] == 5.0
    assert not [name for name in nothing if name.startswith("response/trained_")]
    # A synchronous step trains on what it generates: `response/mean` and its neighbours say it.
    assert not [name for name in step_metrics(replace(record, overlaps=False)) if "_p" in name.partition("/")[2]]


def test_a_group_without_tokens_has_no_age() -> None:
    """Its versions are -1: its environment failed before the first token."""
    group = GroupRecord(
        prompt_index=0, step=9, attempts=1, admitted_version=6, oldest_version=6, newest_version=7, trained_version=8,
        void=None,
    )  # fmt: skip
    empty = replace(group, prompt_index=1, oldest_version=-1, newest_version=-1)
    record = _record(make_graded(REWARDS, GROUPS), groups=[group, empty], overlaps=True)
    assert _values(record, "staleness/in_flight", "staleness/queue") == (1.0, 1.0)
    # Steps 7 and 8 made no version.
    assert _values(replace(record, versions=[5, 6, 8]), "staleness/in_flight", "staleness/queue") == (0.0, 1.0)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_step_in_which_no_token_was_sampled_has_numbers() -> None:
    answers = [make_answer(0, sample, tokens=[], finish="error", error="no") for sample in range(2)]

    assert _values(_record(make_graded([0.0, 0.0], [0, 0], answers=answers)), "staleness/mean") == (0.0,)


def test_a_step_of_which_nothing_is_left_has_numbers_too() -> None:
    everything = make_graded(REWARDS, GROUPS, num_failed=3, num_dropped=6)
    found = step_metrics(_record(everything.take(np.empty(0, np.int64))))

    assert (found["episodes"], found["groups"], found["tokens"], found["episodes/learned_from"]) == (6, 0, 0, 0)
    assert "reward/mean" not in found
    assert np.isfinite(list(found.values())).all()


def test_an_update_is_reported_as_means_over_its_optimizer_steps() -> None:
    statistics = PolicyStatistics(
        count=8, clipped_high=2, clipped_low=1, clipped_dual=4, above=0, below=0, sum_ratio=10, sum_ratio_squared=20,
        max_ratio=3, sum_kl_k1=4, sum_kl_k3=2,
    )  # fmt: skip
    report = make_report(
        statistics=statistics, losses=(1.0, 3.0), grad_norms=(2.0, 6.0), skipped=1, advantages=Moments(3, 6, 14),
        gap=LogprobGap(count=4, sum_abs=2.0, sum_ratio=4.0, largest=0.9), kl_reference=0.3,
        sampling=EffectiveSampleSize(count=4, kept=3, sum=6, sum_squares=18),
    )  # fmt: skip

    found = step_metrics(_record(make_graded(REWARDS, GROUPS), report=report))

    wanted = {
        "loss": 2.0, "grad_norm": 4.0, "skipped": 1, "optimizer_steps": 2, "clip/high": 0.25, "clip/low": 0.125,
        "clip/dual": 0.5, "clip/fraction": 0.375, "ratio/mean": 1.25, "ratio/max": 3, "ratio/ess": 100 / 160,
        "kl/behavior": 0.25, "kl/behavior_k1": 0.5, "advantage/mean": 2.0, "advantage/std": 1.0, "gap/mean": 0.5,
        "gap/max": 0.9, "kl/reference": 0.3, "correction/mean": 1.5, "correction/ess": 0.5, "correction/dropped": 0.25,
        "entropy": 0.7, "imbalance": 1.0, "micro_steps": 1, "trained_tokens": 16,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_a_critic_is_reported_beside_the_policy() -> None:
    statistics = ValueStatistics(
        count=4, sum_values=2, sum_returns=4, sum_returns_squared=8, sum_errors=2, sum_errors_squared=2, clipped=1
    )
    critic = CriticReport(statistics=statistics, losses=(0.2, 0.4), grad_norms=(1.0, 3.0))

    found = step_metrics(_record(make_graded(REWARDS, GROUPS), critic=critic))

    # Variances: returns (8 - 4) / 3, errors (2 - 1) / 3.
    wanted = {
        "value/loss": 0.3, "value/grad_norm": 2.0, "value/explained_variance": 0.75, "value/clip_fraction": 0.25,
        "value/mean": 0.5, "value/return_mean": 1.0,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_the_distance_to_the_reference_is_per_token() -> None:
    graded = make_graded([1.0, 0.0], [0, 0])
    distance = DistanceNote(
        k1_N=np.zeros(2), k2_N=np.zeros(2), k3_N=np.array([0.5, 1.0]), tokens_N=np.array([2, 4], np.int64)
    )
    record = _record(graded, distance=distance, kl_coefficient=0.2)

    assert _values(record, "kl/rollout_reference", "kl/reference", "kl/coefficient") == pytest.approx((0.25, 0.25, 0.2))


def test_the_learners_own_distance_goes_before_that_of_the_rollouts() -> None:
    graded = make_graded([1.0], [0])
    distance = DistanceNote(k1_N=np.zeros(1), k2_N=np.zeros(1), k3_N=np.ones(1), tokens_N=np.ones(1, np.int64))
    record = _record(graded, distance=distance, report=make_report(kl_reference=0.4))

    assert _values(record, "kl/rollout_reference", "kl/reference") == (1.0, 0.4)


def test_speeds_are_over_the_time_of_their_phase() -> None:
    sampled = Metric(name="generated_tokens", value=12.0, reduction="sum")
    graded = make_graded(REWARDS, GROUPS, lengths=[2] * 6, metrics=(sampled,))  # 6 rows of 4 tokens
    record = _record(
        graded, graded.take(np.array([0, 1])), report=make_report(flops=4e6), seconds={"rollout": 0.5, "update": 0.25}
    )

    wanted = {
        "step_s": 2.0, "idle_s": 0.5, "tokens": 24, "tokens_per_s": 12, "rollout/generated_tokens": 12,
        "rollout/tokens_per_s": 24, "update/tokens_per_s": 32, "mfu": 2.0, "update/mfu": 16.0, "time/rollout_s": 0.5,
        "time/update_s": 0.25,
    }  # fmt: skip
    found = step_metrics(record)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_ledger_records_say_which_episodes_were_consumed() -> None:
    answers = [make_answer(draw, sample, version=draw) for draw in (3, 5) for sample in (0, 1)]
    answers[1] = make_answer(3, 1, tokens=[], finish="error", error="no")
    graded = make_graded([1.0, 0.0, 0.5, 0.5], [3, 3, 5, 5], answers=answers, sources={5: "hard"})

    found = ledger_records(graded, graded.take(np.array([0, 1])), step=9)

    message = [
        (tuple(each.id), each.step, each.source, each.state, each.finish, each.version, each.tokens) for each in found
    ]
    assert message == [
        ((3, 0, 0, 0), 9, "sums", "consumed", "stop", 3, 1),
        ((3, 1, 0, 0), 9, "sums", "consumed", "unanswered", -1, 0),
        ((5, 0, 0, 0), 9, "hard", "uninformative", "stop", 5, 1),
        ((5, 1, 0, 0), 9, "hard", "uninformative", "stop", 5, 1),
    ]
    assert [each.reward for each in found] == [1.0, 0.0, 0.5, 0.5]


def test_ledger_records_have_what_was_dropped_with_a_failure() -> None:
    graded = make_graded([1.0, 0.0], [3, 3])
    dropped = make_graded([0.0, 0.0], [5, 5]).rollouts
    graded = replace(graded, left_out=(dropped,), failed=frozenset({TrajectoryId(5, 1)}))

    found = ledger_records(graded, graded, step=2)

    message = [(each.id.prompt_index, each.id.sample, each.state, each.reward) for each in found]
    assert message == [
        (3, 0, "consumed", 1.0),
        (3, 1, "consumed", 0.0),
        (5, 0, "dropped", None),
        (5, 1, "failed", None),
    ]


# --- idleness ---


def _spans(*stretches: tuple[float, float]) -> list[Span]:
    return [Span("work", begin, end, WORKER) for begin, end in stretches]


@pytest.mark.parametrize(
    ("stretches", "idle"),
    [
        ((), 10.0),
        (((10, 20),), 0.0),
        (((12, 14),), 8.0),
        (((12, 16), (14, 18)), 4.0),  # they overlap
        (((12, 18), (13, 14)), 4.0),  # one inside the other
        (((16, 18), (11, 12), (11, 13)), 6.0),  # in any order
        (((5, 12), (19, 30)), 7.0),  # cut at both ends
        (((1, 9),), 10.0),  # before
    ],
)
def test_idle_is_when_no_worker_was_at_work(stretches: tuple[tuple[float, float], ...], idle: float) -> None:
    assert idle_seconds(_spans(*stretches), 10.0, 20.0) == pytest.approx(idle)


def test_a_span_after_the_stretch_changes_nothing() -> None:
    assert idle_seconds(_spans((12, 14), (25, 30)), 10.0, 20.0) == pytest.approx(8.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=8))
def test_idle_seconds_agree_with_counting_them_one_by_one(stretches: list[tuple[int, int]]) -> None:
    spans = _spans(*((begin, min(begin + length, 20)) for begin, length in stretches))
    busy = {second for span in spans for second in range(int(span.begin_s), int(span.end_s))}

    assert idle_seconds(spans, 0.0, 20.0) == pytest.approx(20 - len(busy))


# --- pass@k ---


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_choices_with_a_solved_one(samples: int) -> None:
    for solved in range(samples + 1):
        outcomes = [True] * solved + [False] * (samples - solved)
        for k in range(1, samples + 1):
            choices = list(combinations(outcomes, k))
            assert pass_at_k(solved, samples, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("samples", "powers"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_pass_is_reported_at_powers_of_two_and_at_all(samples: int, powers: list[int]) -> None:
    assert list(powers_up_to(samples)) == powers
