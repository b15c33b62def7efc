# SPDX-License-Identifier: Apache-2.0
"""Predictions by hand, and the winners of costs that leave no doubt."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from podium.controller.simulation.costs import CostModel, GenerationCost, LogNormal, UpdateCost
from podium.errors import RecipeError
from podium.planning.plans import device_numbers
from podium.planning.prediction import (
    WHOLE,
    Configuration,
    Part,
    Prediction,
    RecordedCosts,
    Workload,
    part_of,
    predict,
)  # fmt: skip
from podium.planning.search import search, why

# 10 tokens a second in every lane, answers of 100 tokens, and 8 s for an update of all 8 answers.
PLAIN = CostModel(
    generation=GenerationCost(weights_s=0.1), answer_tokens=LogNormal(median=100.0), update=UpdateCost(token_s=0.01)
)
WORKLOAD = Workload(groups_per_step=4, samples=2, steps=360)
ONE = Configuration(layout="colocated", devices=1, lanes=8)
SPLIT = Configuration(layout="split", devices=2, rollout_devices=1, lanes=8)


def test_a_colocated_step_is_generation_grading_switches_and_update() -> None:
    costs = replace(PLAIN, grading_s=LogNormal(median=3.0), switch_s=0.5)

    found = predict(costs, replace(WORKLOAD, start_s=60.0, outside_s=0.5), ONE)

    assert found.step_s == pytest.approx(10.0 + 3.0 + 8.0 + 1.0)
    assert found.phases == pytest.approx({"generation": 10.0, "grading": 3.0, "switching": 1.0, "update": 8.0})
    assert sum(found.phases.values()) == pytest.approx(found.step_s)
    assert found.spread_s == pytest.approx(0.0)
    assert found.tokens_s == pytest.approx(800 / 22)
    assert found.gpu_hours == pytest.approx((60 + 360 * 22.5) / 3600)
    assert found.largest_idle == ("generators", "grading", pytest.approx(3 / 22))


def test_staleness_hides_the_shorter_of_generation_and_update() -> None:
    fresh, stale = (predict(PLAIN, WORKLOAD, replace(SPLIT, staleness=each)) for each in (0, 1))

    assert fresh.step_s == pytest.approx(18.0)
    assert stale.step_s == pytest.approx(10.0)
    assert stale.phases == pytest.approx({"generation": 2.0, "update": 8.0})
    assert stale.staleness_mean == pytest.approx(0.8)  # new weights arrive after 8 s of 10


def test_a_part_of_a_large_batch_takes_as_long_as_all_of_it() -> None:
    costs = replace(
        PLAIN, generation=GenerationCost(weights_s=0.1, lane_s=0.01), answer_tokens=LogNormal(median=100.0, sigma=0.2),
        grading_s=LogNormal(median=0.2), graders=1,
    )  # fmt: skip
    workload = replace(WORKLOAD, groups_per_step=256)
    large = Configuration(layout="split", devices=64, rollout_devices=32, staleness=1, lanes=8, graders=32)

    whole = predict(costs, workload, large, seeds=(1,), steps=4)
    part = predict(costs, workload, large, seeds=(1, 2), steps=4, most_episodes=64)

    assert part.step_s == pytest.approx(whole.step_s, rel=0.1)
    assert part.tokens_s == pytest.approx(whole.tokens_s, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "large",
    [
        Configuration(layout="colocated", devices=2, lanes=64, graders=8),
        Configuration(layout="split", devices=2, rollout_devices=1, lanes=32, graders=8),
        Configuration(layout="split", devices=2, rollout_devices=1, staleness=1, lanes=64, graders=8),
        Configuration(layout="elastic", devices=4, rollout_devices=2, staleness=1, lanes=32, graders=8),
    ],
    ids=lambda one: one.name,
)
def test_a_quarter_of_a_batch_with_a_quarter_of_the_lanes_takes_as_long(large: Configuration) -> None:
    costs = replace(
        PLAIN, generation=GenerationCost(weights_s=0.1, lane_s=0.01), answer_tokens=LogNormal(median=100.0, sigma=0.2),
        grading_s=LogNormal(median=0.5), graders=1, update=UpdateCost(token_s=0.001, constant_s=1.0), publish_s=2.0,
    )  # fmt: skip
    workload = replace(WORKLOAD, groups_per_step=128)
    part = part_of(workload, large, 64)
    assert part is not None
    assert part.groups == 4

    whole, found = (predict(costs, workload, large, seeds=(1,), steps=4, part=each) for each in (WHOLE, part))

    assert found.step_s == pytest.approx(whole.step_s, rel=0.1)
    assert found.tokens_s == pytest.approx(whole.tokens_s, rel=0.1)
    assert sum(found.phases.values()) == pytest.approx(found.step_s)
    for phase, seconds in whole.phases.items():
        assert found.phases.get(phase, 0.0) == pytest.approx(seconds, abs=0.1 * whole.step_s)


def test_a_part_has_devices_that_divide_and_enough_lanes() -> None:
    workload = replace(WORKLOAD, groups_per_step=512, samples=8)
    eight = Configuration(layout="split", devices=8, rollout_devices=4, lanes=64)
    assert part_of(replace(workload, groups_per_step=32), eight, 256) == WHOLE
    assert part_of(workload, eight, 512) == Part(groups=8, devices=1)  # 8 lanes for 64
    assert part_of(workload, eight, 256) == Part(groups=16, devices=2)
    assert part_of(workload, eight, 64) is None  # 64 times fewer: 4 devices fewer, and 4 lanes
    assert part_of(replace(workload, groups_per_step=509), eight, 256) is None  # a prime
    assert not Part(groups=4, devices=4).can_have(replace(eight, rollout_devices=5))


def test_few_devices_take_longer_for_more_groups_by_a_line() -> None:
    workload = replace(WORKLOAD, groups_per_step=128)
    whole = predict(PLAIN, workload, ONE, seeds=(1,), steps=2)
    small = predict(PLAIN, workload, ONE, seeds=(1,), steps=2, most_episodes=32)
    assert small.step_s == pytest.approx(whole.step_s, rel=0.02)
    assert small.tokens_s == pytest.approx(whole.tokens_s, rel=0.02)


def test_recorded_groups_are_repeated_or_drawn() -> None:
    costs = RecordedCosts(
        generation=PLAIN.generation, answer_tokens=PLAIN.answer_tokens, update=PLAIN.update,
        groups=((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)),
    )  # fmt: skip
    assert [costs.group(number, 2, seed=0).tokens for number in range(4)] == [(1, 2), (3, 4), (5, 6), (1, 2)]
    drawn = [costs.group(number, 2, seed=1).tokens for number in range(200)]
    assert drawn == [costs.group(number, 2, seed=1).tokens for number in range(200)]
    assert set(drawn) == set(costs.groups)


# --- the search ---


def best_of(costs: CostModel, devices: int = 4, staleness: tuple[int, ...] = (0, 1), **changes: int) -> Prediction:
    base = replace(ONE, devices=devices, **changes)
    return search(costs, WORKLOAD, base, devices=[devices], stalenesses=staleness).choices[0].best


def test_colocated_wins_where_everything_divides_and_switching_is_free() -> None:
    """Synchronous: all devices generate, then all learn. A split would leave a part idle in both."""
    costs = replace(PLAIN, generation=GenerationCost(weights_s=0.001, lane_s=0.1), publish_s=1.0)
    assert best_of(costs, staleness=(0,)).configuration.layout == "colocated"


def test_split_wins_where_changing_sides_is_dear() -> None:
    costs = replace(PLAIN, switch_s=30.0)
    assert best_of(costs).configuration.layout == "split"
    assert best_of(costs).configuration.staleness == 1


def test_the_slower_part_gets_more_devices() -> None:
    generation = replace(PLAIN, generation=GenerationCost(weights_s=0.0, lane_s=0.1), switch_s=99.0)
    update = replace(PLAIN, update=UpdateCost(token_s=0.1), switch_s=99.0)
    assert best_of(generation, devices=8).configuration.rollout_devices == 7
    assert best_of(update, devices=8).configuration.rollout_devices == 1


def test_more_graders_are_taken_until_they_are_enough() -> None:
    """8 gradings of 10 s: 80 s with one grader, and 10 s with 8. Generation and update take 20 s."""
    costs = replace(PLAIN, grading_s=LogNormal(median=10.0), graders=1)
    found = best_of(costs, devices=1, graders=1)
    assert found.configuration.graders == 8
    assert found.step_s == pytest.approx(28.0)


@pytest.mark.slow
def test_a_thousand_devices_are_searched_and_the_cheapest_is_told() -> None:
    found = search(PLAIN, WORKLOAD, ONE, devices=device_numbers("1-1024"), stalenesses=(0, 1))
    assert [choice.devices for choice in found.choices] == [2**power for power in range(11)]
    assert found.is_complete
    assert found.cheapest.configuration.devices == 1
    assert found.fastest.step_s < found.choices[0].best.step_s
    steps = [choice.best.step_s for choice in found.choices]
    assert all(later <= sooner * 1.02 for sooner, later in itertools.pairwise(steps))


def test_a_search_ends_with_its_budget() -> None:
    times = iter(range(0, 1000, 20))
    found = search(PLAIN, WORKLOAD, ONE, devices=(1, 2, 4, 8), budget_s=30.0, clock=lambda: float(next(times)))
    assert not found.is_complete
    assert [choice.devices for choice in found.choices] == [1, 2]


def test_the_reason_names_what_devices_wait_for_and_the_age_of_tokens() -> None:
    costs = replace(PLAIN, grading_s=LogNormal(median=30.0))
    slow, fast = predict(costs, WORKLOAD, SPLIT), predict(costs, WORKLOAD, replace(SPLIT, staleness=1))
    text = why(fast, slow)
    assert "split 1:1, staleness 1, 2.00 times as fast" in text
    assert "wait for grading" in text
    assert "off-policy" in text
    assert "Nothing that was looked at is faster" in why(slow, slow)


def test_a_recipe_with_limits_is_searched_within_them() -> None:
    limited = replace(WORKLOAD, layouts=("split",), most_staleness=0)
    found = search(PLAIN, limited, ONE, devices=[4]).choices[0]
    assert {(each.configuration.layout, each.configuration.staleness) for each in found.predictions} == {("split", 0)}


@pytest.mark.parametrize(
    ("text", "numbers"), [("8", (8,)), ("2,4", (2, 4)), ("3-20", (3, 4, 8, 16, 20)), ("4-4", (4,))]
)
def test_numbers_of_devices(text: str, numbers: tuple[int, ...]) -> None:
    assert device_numbers(text) == numbers


@pytest.mark.parametrize("text", ["0", "many", "1-2000", "1-2-3", ""])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="--devices"):
        device_numbers(text)
