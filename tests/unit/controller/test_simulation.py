# SPDX-License-Identifier: Apache-2.0
"""Simulated schedules: seconds that can be computed by hand, and bounds that hold for any costs."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Literal

import pytest

from podium.controller.scheduling import ScheduleSettings
from podium.controller.simulation.costs import CostModel, DeviceLayout, GenerationCost, LogNormal, UpdateCost
from podium.controller.simulation.generator import Generator, Sequence
from podium.controller.simulation.report import SimulationReport
from podium.controller.simulation.run import simulate
from podium.errors import PlacementError

# One token a second in each of up to any number of lanes, answers of 10 tokens, one second for an update of 10 tokens.
PLAIN = CostModel(
    generation=GenerationCost(weights_s=1.0),
    answer_tokens=LogNormal(median=10.0),
    update=UpdateCost(token_s=0.1),
)
SPLIT = DeviceLayout(devices=2, rollout_devices=1, lanes=1)
ONE = ScheduleSettings(steps=4, groups_per_step=1, samples=1)


def _steps_s(costs: CostModel = PLAIN, layout: DeviceLayout = SPLIT, **schedule: int) -> float:
    return simulate(replace(ONE, **schedule), costs, layout).seconds


# --- by hand ---


def test_one_lane_with_fixed_lengths() -> None:
    report = simulate(ONE, PLAIN, SPLIT)
    assert report.step_s == pytest.approx(10 + 1)
    assert report.tokens_s == pytest.approx(10 / 11)
    assert report.generator_idle_s == pytest.approx({"update": 4.0})
    assert report.learner_idle_s == pytest.approx({"generation": 40.0})
    assert report.lanes_in_use == pytest.approx(10 / 11)
    assert report.in_flight_s == pytest.approx(10)
    assert report.queue_s == 0


def test_one_lane_runs_the_samples_of_a_group_one_after_the_other() -> None:
    assert _steps_s(samples=3) == pytest.approx(4 * (3 * 10 + 3 * 1))


def test_lanes_share_a_device() -> None:
    """With three lanes a token takes 1 + 3 * 0.5 seconds."""
    costs = replace(PLAIN, generation=GenerationCost(weights_s=1.0, lane_s=0.5))
    assert _steps_s(costs, replace(SPLIT, lanes=3), samples=3) == pytest.approx(4 * (10 * 2.5 + 3))


def test_the_devices_of_the_learner_divide_an_update() -> None:
    costs = replace(PLAIN, update=UpdateCost(token_s=0.1, constant_s=2.0))
    layout = DeviceLayout(devices=5, rollout_devices=1, lanes=1)
    assert _steps_s(costs, layout) == pytest.approx(4 * (10 + 2 + 1 / 4))


def test_grading_and_publishing_add_to_a_synchronous_step() -> None:
    costs = replace(PLAIN, grading_s=LogNormal(median=3.0), publish_s=0.5)
    report = simulate(ONE, costs, SPLIT)
    assert report.seconds == pytest.approx(4 * (10 + 3 + 1) + 3 * 0.5)
    assert report.generator_idle_s == pytest.approx({"grading": 12.0, "update": 4.0, "publish": 1.5})


def test_grading_of_early_episodes_hides_behind_late_ones() -> None:
    """One lane: the first episode is graded while the second is generated, and only the last one's 3 s remain."""
    costs = replace(PLAIN, grading_s=LogNormal(median=3.0))
    assert _steps_s(costs, samples=2) == pytest.approx(4 * (20 + 3 + 2))


def test_a_colocated_step_is_the_sum_of_its_phases() -> None:
    costs = replace(PLAIN, grading_s=LogNormal(median=3.0), publish_s=99.0, switch_s=0.25)
    report = simulate(ONE, costs, DeviceLayout(devices=1, lanes=1))
    assert report.seconds == pytest.approx(4 * (10 + 3 + 0.25 + 1) + 3 * 0.25)
    assert report.generator_idle_s == pytest.approx({"grading": 12.0, "switching": 1.75})
    assert report.learner_idle_s == {}
    assert report.idle_share == pytest.approx(13.75 / report.seconds)


@pytest.mark.parametrize("update_s", [10.0, 4.0])
def test_with_staleness_1_a_step_takes_the_longer_phase_and_not_the_sum(update_s: float) -> None:
    costs = replace(PLAIN, update=UpdateCost(token_s=update_s / 10))
    synchronous = simulate(replace(ONE, steps=10), costs, SPLIT, warm_up=2, cool_down=2)
    overlapped = simulate(replace(ONE, steps=10, staleness=1), costs, SPLIT, warm_up=2, cool_down=2)
    assert synchronous.step_s == pytest.approx(10 + update_s)
    assert overlapped.step_s == pytest.approx(max(10, update_s))
    assert overlapped.staleness_max == 1


def test_a_token_has_the_version_that_sampled_it() -> None:
    """Two lanes: two groups begin on version 0 and end at 10 s. Step 1 trains one of them for 4 s, step 2 the other,
    which is one version old then, and has waited for 4 s."""
    costs = replace(PLAIN, update=UpdateCost(token_s=0.4))
    report = simulate(replace(ONE, steps=2, staleness=1), costs, replace(SPLIT, lanes=2))
    assert report.seconds == pytest.approx(10 + 4 + 4)
    assert report.staleness_mean == pytest.approx(0.5)
    assert report.queue_s == pytest.approx((0 + 4) / 2)


def test_the_tokens_of_one_sequence_have_several_versions() -> None:
    """One lane, updates of 4 s. At 10 s group 0 is trained on and group 1 begins, both on version 0. Version 1 comes at
    14 s: group 1 has 4 tokens of version 0 and 6 of version 1 when step 2 takes it at 20 s, from version 1."""
    costs = replace(PLAIN, update=UpdateCost(token_s=0.4))
    report = simulate(replace(ONE, steps=2, staleness=1), costs, SPLIT)
    assert report.seconds == pytest.approx(24)
    assert report.staleness_mean == pytest.approx((10 * 0 + 4 * 1 + 6 * 0) / 20)


def test_recompute_pauses_for_the_tokens_so_far_and_keep_does_not() -> None:
    generation = GenerationCost(weights_s=1.0, prefill_tokens_s=8.0)
    costs = replace(PLAIN, generation=generation, answer_tokens=LogNormal(median=10.0, sigma=1.0, cap=80.0))
    schedule = replace(ONE, steps=30, staleness=2, groups_per_step=2)
    layout = replace(SPLIT, lanes=4)
    keep = simulate(replace(schedule, on_new_weights="keep"), costs, layout)
    recompute = simulate(replace(schedule, on_new_weights="recompute"), costs, layout)
    finish = simulate(replace(schedule, on_new_weights="finish"), costs, layout)
    assert "recompute" not in keep.generator_idle_s
    assert recompute.generator_idle_s["recompute"] > 0
    assert keep.seconds < recompute.seconds
    assert keep.seconds < finish.seconds


def test_a_generator_shares_its_time_evenly() -> None:
    """Alone at 1 s a token, together at 2 s: b joins when a has 4 of its 10 tokens. b's 3 tokens take 6 s, in which a
    gets 3 too; a's last 3 take 3 s."""
    generator = Generator(name="g", lanes=2, cost=GenerationCost(weights_s=0.0, lane_s=1.0))
    generator.add([Sequence(group=0, attempt=0, sample=0, tokens=10)])
    generator.advance(4.0)
    generator.version = 5
    generator.add([Sequence(group=1, attempt=0, sample=0, tokens=3)])
    assert generator.next_end_s() == pytest.approx(10.0)
    generator.advance(10.0)
    ended = generator.end_next()
    assert (ended.sequence.group, ended.oldest, ended.newest) == (1, 5, 5)
    assert ended.version_sum == pytest.approx(3 * 5)
    assert generator.recompute_s == 0  # a prefill without end to its speed
    assert generator.next_end_s() == pytest.approx(13.0)
    generator.advance(13.0)
    ended = generator.end_next()
    assert (ended.sequence.group, ended.oldest, ended.newest) == (0, 0, 5)
    assert ended.version_sum == pytest.approx(4 * 0 + 6 * 5)
    assert generator.next_end_s() is None


def test_the_speed_of_a_device_saturates() -> None:
    cost = GenerationCost(weights_s=0.006, lane_s=0.0001)
    assert cost.tokens_s(1) == pytest.approx(1 / 0.0061)
    assert cost.tokens_s(60) == pytest.approx(5_000)
    assert cost.tokens_s(10**6) < 1 / 0.0001


def test_lengths_are_cut_at_the_cap() -> None:
    lengths = LogNormal(median=4_000, sigma=1.0, cap=32_000)
    sampled = sorted(lengths.sample(random.Random(seed)) for seed in range(2_001))
    assert sampled[1_000] == pytest.approx(4_000, rel=0.1)
    assert sampled[-1] == 32_000
    assert math.isinf(LogNormal(median=1.0).cap)


@pytest.mark.parametrize("rollout_devices", [0, 2, 3])
def test_both_sides_of_a_split_need_a_device(rollout_devices: int) -> None:
    with pytest.raises(PlacementError):
        DeviceLayout(devices=2, rollout_devices=rollout_devices, lanes=1)


# --- for any costs ---


def _random_run(seed: int, *, audited: bool = True) -> tuple[ScheduleSettings, SimulationReport]:
    """Every size and cost is random."""
    rng = random.Random(seed)
    policies: tuple[Literal["finish", "keep", "recompute"], ...] = ("finish", "keep", "recompute")
    schedule = ScheduleSettings(
        steps=rng.randint(1, 8),
        groups_per_step=rng.randint(1, 6),
        samples=rng.randint(1, 4),
        staleness=rng.choice([0, 1, 2, 4]),
        on_new_weights=rng.choice(policies),
        replaces_uniform=rng.random() < 0.3,
        max_replaced=rng.randint(0, 8),
    )
    costs = CostModel(
        generation=GenerationCost(weights_s=0.01, lane_s=rng.choice([0.0, 0.01]), prefill_tokens_s=1_000.0),
        answer_tokens=LogNormal(median=100.0, sigma=rng.choice([0.0, 1.0]), cap=1_600.0),
        update=UpdateCost(token_s=rng.choice([0.0001, 0.001, 0.01]), constant_s=rng.choice([0.0, 0.5])),
        grading_s=LogNormal(median=rng.choice([0.0, 0.5]), sigma=1.0),
        publish_s=rng.choice([0.0, 0.1, 3.0]),
        switch_s=rng.choice([0.0, 0.3]),
        uniform_share=rng.choice([0.0, 0.4]),
    )
    devices = rng.randint(2, 6)
    split = rng.random() < 0.7
    layout = DeviceLayout(
        devices=devices, rollout_devices=rng.randint(1, devices - 1) if split else None, lanes=rng.randint(1, 8)
    )
    return schedule, simulate(schedule, costs, layout, seed=seed, audited=audited)


def test_the_bound_holds_and_every_admitted_group_is_trained_once() -> None:
    for seed in range(400):
        schedule, report = _random_run(seed)
        trained = [number for step in report.trained_groups for number in step]
        assert report.staleness_max <= schedule.staleness, seed
        assert report.staleness_mean <= report.staleness_max + 1e-9, seed
        assert len(report.trained_groups) == schedule.steps, seed
        assert len(set(trained)) == len(trained), seed
        assert report.counts.get("trained", 0) == len(trained), seed
        assert report.num_admitted == len(trained) + report.counts.get("void", 0), seed
        if not schedule.replaces_uniform:
            assert report.num_admitted == schedule.steps * schedule.groups_per_step, seed
        assert 0 <= report.generator_idle_share <= 1 + 1e-9, seed
        assert 0 <= report.learner_idle_share <= 1 + 1e-9, seed
        assert min([report.in_flight_s, report.queue_s]) >= 0, seed


def test_the_same_seed_gives_the_same_report_with_and_without_the_audit() -> None:
    for seed in range(20):
        first, second = _random_run(seed)[1], _random_run(seed)[1]
        assert first == second
        assert replace(first, counts={}) == _random_run(seed, audited=False)[1]
    assert _random_run(0)[1].seconds != _random_run(1)[1].seconds


def test_steps_after_the_cool_down_are_not_simulated() -> None:
    report = simulate(replace(ONE, steps=10, staleness=1), PLAIN, SPLIT, warm_up=3, cool_down=2)
    assert report.steps == 5
    assert 8 <= len(report.trained_groups) <= 9  # the ninth may begin when the eighth ends
    assert report.trained_tokens == pytest.approx(50)
