# SPDX-License-Identifier: Apache-2.0
"""Runs of the real controller on the simulated cluster whose workers die at random moments: every run comes to its end,
every group is trained once, and at staleness 0 the weights (a digest of all updates) are those of the run that nobody
disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.simulated_faults import LAYOUTS, Disturbance, check_groups, fault_recipe, run_with
from podium.controller.simulation.controlled import SimulatedDeath
from podium.controller.simulation.faults import random_deaths, shortest
from podium.errors import WorkerDiedError
from podium.runs.events import recoveries


@pytest.mark.parametrize("seed", range(6))
def test_a_run_whose_workers_die_comes_to_its_end(tmp_path: Path, seed: int) -> None:
    Disturbance(tmp_path, seed).check()


@pytest.mark.slow
def test_a_hundred_runs_whose_workers_die(tmp_path: Path) -> None:
    for seed in range(1000, 1100):
        Disturbance(tmp_path / str(seed), seed).check()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pool", ["train", "rollout", "graders"])
def test_every_moment_of_a_step(tmp_path: Path, layout: str, pool: str) -> None:
    """A worker dies at each of twelve moments of the third step."""
    if pool == "rollout" and layout == "colocated":
        pytest.skip("its generators are the learner's")
    calm = run_with(fault_recipe(tmp_path / "calm", layout, 0))
    begin, end = calm.committed_s[1:3]
    for number in range(12):
        death = SimulatedDeath(at_s=begin + (end - begin) * (number + 0.5) / 12, pool=pool, slot=0)

        run = run_with(fault_recipe(tmp_path / str(number), layout, 0), [death])

        check_groups(run, 0)
        assert run.weights == calm.weights, death


def test_deaths_in_a_row_are_survived_up_to_the_limit(tmp_path: Path) -> None:
    calm = run_with(fault_recipe(tmp_path / "calm", "colocated", 0))
    at_s = [calm.committed_s[1] + seconds for seconds in (0.5, 2.5, 4.5)]  # a step takes longer
    deaths = [SimulatedDeath(at_s=each, pool="train", slot=0) for each in at_s]

    run = run_with(fault_recipe(tmp_path / "three", "colocated", 0, restarts=3), deaths)

    assert [each.step for each in recoveries(run.result.folder)] == [2, 2, 2]
    with pytest.raises(WorkerDiedError):
        run_with(fault_recipe(tmp_path / "two", "colocated", 0, restarts=2), deaths)


def test_a_generator_that_dies_is_replaced_and_nothing_goes_back(tmp_path: Path) -> None:
    calm = run_with(fault_recipe(tmp_path / "calm", "split", 0))
    # Generation takes most of a step.
    death = SimulatedDeath(at_s=calm.committed_s[1] + 3.0, pool="rollout", slot=1)

    run = run_with(fault_recipe(tmp_path / "killed", "split", 0), [death])

    (recovery,) = recoveries(run.result.folder)
    assert (recovery.part, recovery.remedy, recovery.step) == ("generator", "respawn", 2)
    assert run.weights == calm.weights


def test_the_same_deaths_give_the_same_run(tmp_path: Path) -> None:
    recipes = [fault_recipe(tmp_path / name, "elastic", 2) for name in ("one", "other")]
    deaths = random_deaths(recipes[0], seconds=60.0, most=5, seed=7)

    one, other = (run_with(recipe, deaths) for recipe in recipes)

    assert one.committed_s == other.committed_s
    assert one.weights == other.weights


def test_the_shortest_part_of_deaths_that_fails() -> None:
    deaths = [SimulatedDeath(at_s=float(at), pool="train", slot=0) for at in range(6)]

    found = shortest(deaths, lambda some: deaths[1] in some and deaths[4] in some)

    assert found == (deaths[1], deaths[4])
