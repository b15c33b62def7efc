# SPDX-License-Identifier: Apache-2.0
"""Costs from records: regressions by hand, and the known costs of simulated runs from what they wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.simulated_runs import COSTS, simulated, simulated_recipe
from podium.controller.simulation.costs import CostModel, GenerationCost, LogNormal, UpdateCost
from podium.errors import RunFolderError
from podium.observe.timeline import EngineSteps
from podium.planning.prediction import predict
from podium.planning.run_costs import RunCosts, estimate_costs, fit_line
from podium.planning.run_records import read_records

SPLIT = {"layout": "split", "devices": 2}
ROLLOUT = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_running": 16}
TRUTH = replace(
    COSTS, generation=GenerationCost(weights_s=0.01, lane_s=0.001), update=UpdateCost(token_s=0.004, constant_s=0.5)
)


def estimated(folder: Path, costs: CostModel, **changes: Any) -> RunCosts:
    recipe = simulated_recipe(folder, **{"rollout": ROLLOUT, "steps": 14, **changes})
    return estimate_costs(read_records(simulated(recipe, costs).result.folder))


# --- by hand ---


def test_a_line_is_the_median_of_all_slopes() -> None:
    """One of six steps took 50 s for another reason: 2 + 3 x is what the others say."""
    line = fit_line([1, 2, 3, 4, 5, 6], [5, 8, 11, 50, 17, 20])
    assert (line.constant, line.slope) == (pytest.approx(2.0), pytest.approx(3.0))
    assert line.error == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("x", "y", "slope"),
    [
        ([1, 2], [2, 4], 2.0),
        ([10, 10.1, 10, 10.1, 10], [30, 30.3, 30, 30.3, 30], 3.0),
        # The median ratio is 5/3; to that, all are 0.6, 0.9, 1, 1.05 and 1.08: without extremes 0.98333 on average.
        ([1, 2, 3, 4, 5], [1, 3, 5, 7, 9], 0.983333 * 5 / 3),
    ],
    ids=["few points", "one x", "a negative constant"],
)
def test_lines_through_the_origin(x: list[float], y: list[float], slope: float) -> None:
    line = fit_line(x, y)
    assert (line.constant, line.slope) == (0.0, pytest.approx(slope, rel=1e-5))


def test_a_constant_explains_no_more_than_a_part() -> None:
    line = fit_line([1, 2, 3, 4, 5], [10, 10, 10, 10, 10.0], most_constant=0.5)
    # 5 + 5/3 x, times the mean of 10 over that, without extremes: 1.2, 1 and 0.857143.
    assert line.constant == pytest.approx(1.0190476 * 5.0)
    assert line.slope == pytest.approx(1.0190476 * 5 / 3)


def test_a_line_is_right_on_average() -> None:
    # Half of the steps take a third longer: the median of all would not know of it.
    x = [float(at) for at in range(10, 30)]
    y = [2 * each * (4 / 3 if at % 2 else 1) for at, each in enumerate(x)]
    line = fit_line(x, y)
    predicted = [line.constant + line.slope * each for each in x]
    assert sum(predicted) == pytest.approx(sum(y), rel=0.02)


# --- known costs of simulated runs ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement", [{"devices": 1}, {"devices": 2}, SPLIT], ids=["colocated", "colocated on two", "split"]
)
def test_costs_of_a_synchronous_run_are_found_again(tmp_path: Path, placement: dict[str, Any]) -> None:
    found = estimated(tmp_path, TRUTH, placement=placement)

    generation, update = found.costs.generation, found.costs.update
    assert generation.weights_s == pytest.approx(TRUTH.generation.weights_s, rel=0.05)
    assert generation.lane_s == pytest.approx(TRUTH.generation.lane_s, rel=0.15)
    assert generation.token_s(8) == pytest.approx(TRUTH.generation.token_s(8), rel=0.03)
    assert update.token_s == pytest.approx(TRUTH.update.token_s, rel=0.06)
    assert update.constant_s == pytest.approx(TRUTH.update.constant_s, rel=0.15)
    transfer = found.costs.switch_s if placement is not SPLIT else found.costs.publish_s
    assert transfer == pytest.approx(TRUTH.switch_s if placement is not SPLIT else TRUTH.publish_s, rel=0.1)
    assert found.error == pytest.approx(0.0, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_an_overlapped_run_is_reproduced(tmp_path: Path, staleness: int) -> None:
    found = estimated(tmp_path, TRUTH, placement=SPLIT, rollout={**ROLLOUT, "staleness": staleness}, steps=20)

    assert found.costs.generation.token_s(6) == pytest.approx(TRUTH.generation.token_s(6), rel=0.2)
    assert found.costs.update.token_s == pytest.approx(TRUTH.update.token_s, rel=0.06)
    assert found.costs.publish_s == pytest.approx(TRUTH.publish_s, rel=0.1)
    assert found.error == pytest.approx(0.0, abs=0.03)
    assert "assumed" in {each.quality for each in found.estimates if each.name == "generation, a lane"}


@pytest.mark.slow
def test_graders_that_are_short_are_found_again(tmp_path: Path) -> None:
    """16 gradings of 2 s take two graders 16 s, which the generation of some seconds does not hide."""
    costs = replace(TRUTH, grading_s=LogNormal(median=2.0), graders=2)
    found = estimated(tmp_path, costs, grading={"workers": 2})

    assert found.costs.graders == 2
    assert found.costs.grading_s.median == pytest.approx(2.0, rel=0.03)
    assert found.error == pytest.approx(0.0, abs=0.1)


@pytest.mark.slow
def test_graders_that_wait_are_never_short(tmp_path: Path) -> None:
    costs = replace(TRUTH, grading_s=LogNormal(median=2.0, sigma=0.3))
    found = estimated(tmp_path, costs, grading={"workers": 2})

    assert found.costs.graders is None
    assert found.costs.grading_s.median == pytest.approx(2.0, rel=0.3)


@pytest.mark.slow
def test_one_run_predicts_the_other_layouts(tmp_path: Path) -> None:
    """Costs of the colocated run, and the seconds that the others take on the simulated cluster."""
    costs = replace(TRUTH, publish_s=0.4, switch_s=0.4)
    found = estimated(tmp_path / "one", costs, placement={"devices": 2}, steps=20)
    for name, layout, staleness in (("b", "split", 0), ("c", "split", 1), ("d", "elastic", 1)):
        placement = {"layout": layout, "devices": 2}
        recipe = simulated_recipe(
            tmp_path / name, rollout={**ROLLOUT, "staleness": staleness}, placement=placement, steps=20
        )
        records = read_records(simulated(recipe, costs).result.folder)

        predicted = predict(found.costs, found.workload, records.configuration(), steps=12)

        assert predicted.step_s == pytest.approx(records.step_s, rel=0.12), (layout, staleness)


def test_a_run_that_is_too_short_says_how_long_it_has_to_be(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"has 3 steps, and a plan needs 4"):
        estimated(tmp_path, TRUTH, steps=3)
    with pytest.raises(RunFolderError, match="there is no run folder"):
        read_records(tmp_path / "nothing")


def test_the_engines_own_summaries_tell_what_a_lane_costs(tmp_path: Path) -> None:
    """Steps of 10 ms and 0.5 ms a lane, half of what simulated generators take for one: the summaries are believed."""
    recipe = simulated_recipe(tmp_path, rollout=ROLLOUT, steps=14)
    records = read_records(simulated(recipe, TRUTH).result.folder)
    seen = tuple(
        EngineSteps(
            worker="rollout[0]@node/0#0", begin_s=float(lanes), end_s=lanes + 10 * (0.010 + 0.0005 * lanes), steps=10,
            lanes=float(lanes), generated_tokens=10 * lanes, prefilled_tokens=0, prefill_s=0.0, is_tail=False,
        )
        for lanes in range(1, 17)
    )  # fmt: skip

    found = estimate_costs(replace(records, engine_steps=seen)).costs.generation

    assert found.lane_s / found.weights_s == pytest.approx(0.05, rel=0.01)
    assert found.token_s(6) == pytest.approx(TRUTH.generation.token_s(6), rel=0.1)  # the run's own speed


@pytest.mark.slow
def test_a_layout_has_the_costs_of_the_run_that_had_it(tmp_path: Path) -> None:
    """The machine of the split run takes twice as long for an update."""
    slower = replace(TRUTH, update=UpdateCost(token_s=0.008, constant_s=1.0))
    recipes = [
        (simulated_recipe(tmp_path / "colocated", rollout=ROLLOUT, steps=14, placement={"devices": 2}), TRUTH),
        (simulated_recipe(tmp_path / "split", rollout=ROLLOUT, steps=14, placement=SPLIT), slower),
    ]
    first, second = (read_records(simulated(recipe, costs).result.folder) for recipe, costs in recipes)
    run = estimate_costs(first, others=[second])

    shared, apart = run.configuration, second.configuration()
    assert run.costs_of(shared) is run.costs
    assert run.costs_of(shared).update.token_s == pytest.approx(0.004, rel=0.06)
    for layout in (apart, replace(apart, layout="elastic")):
        assert run.costs_of(layout).update.token_s == pytest.approx(0.008, rel=0.06)
        assert run.costs_of(layout).switch_s == pytest.approx(run.costs.switch_s, rel=0.3)  # the other run tells it
    assert estimate_costs(first).costs_of(apart).update.token_s == pytest.approx(0.004, rel=0.06)
