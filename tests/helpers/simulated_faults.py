# SPDX-License-Identifier: Apache-2.0
"""Simulated runs whose workers die at random moments, and what must hold for each. Torch-free."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from helpers.simulated_runs import COSTS, groups_by_step, simulated_recipe
from podium.controller.simulation.controlled import SimulatedDeath, SimulatedRun, simulate_run
from podium.controller.simulation.faults import random_deaths
from podium.programs.grpo import grpo
from podium.recipe import GrpoRecipe
from podium.runs.folder import RunFolder

LAYOUTS: dict[str, dict[str, Any]] = {
    "colocated": {"layout": "colocated", "devices": 2},
    "split": {"layout": "split", "devices": 3, "rollout_devices": 2},
    "elastic": {"layout": "elastic", "devices": 3, "rollout_devices": 2},
}
STEPS, PROMPTS = 5, 4


def fault_recipe(folder: Path, layout: str, staleness: int, **placement: Any) -> GrpoRecipe:
    """Five small steps in this layout; workers may die often."""
    return simulated_recipe(
        folder, steps=STEPS, placement={**LAYOUTS[layout], "restarts": 100, **placement},
        rollout={"staleness": staleness, "prompts_per_step": PROMPTS}, grading={"workers": 2},
    )  # fmt: skip


def run_with(recipe: GrpoRecipe, deaths: Sequence[SimulatedDeath] = (), *, seed: int = 0) -> SimulatedRun:
    """The run of the recipe in a new folder, with these deaths."""
    return simulate_run(grpo, recipe, RunFolder.create(recipe), COSTS, seed=seed, deaths=deaths)


def check_groups(run: SimulatedRun, staleness: int) -> None:
    """All steps were committed, every group is in one of them, and none was older than allowed."""
    steps = groups_by_step(run.result.folder)
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert all(len(groups) == PROMPTS for groups in steps.values())
    times = Counter(prompt for groups in steps.values() for prompt, _, _ in groups)
    assert set(times.values()) == {1}
    for groups in steps.values():
        for prompt, oldest, trained_from in groups:
            assert trained_from - oldest <= staleness, prompt


class Disturbance:
    """A random layout, staleness and course of deaths from a seed, and the run without them."""

    def __init__(self, folder: Path, seed: int) -> None:
        rng = Random(seed)
        self._folder, self._seed, self._numbers = folder, seed, itertools.count()
        self.layout = rng.choice(sorted(LAYOUTS))
        self.staleness = 0 if self.layout == "colocated" else rng.choice([0, 0, 1, 2, 4])
        self._calm = run_with(fault_recipe(folder / "calm", self.layout, self.staleness), seed=seed)
        recipe = fault_recipe(folder / "plan", self.layout, self.staleness)
        self.deaths = random_deaths(recipe, seconds=1.2 * self._calm.committed_s[-1], most=6, seed=seed)

    def check(self, deaths: Sequence[SimulatedDeath] | None = None) -> None:
        """Runs with these deaths (default: all), and checks what must hold."""
        folder = self._folder / f"disturbed-{next(self._numbers)}"
        recipe = fault_recipe(folder, self.layout, self.staleness)
        run = run_with(recipe, self.deaths if deaths is None else deaths, seed=self._seed)
        check_groups(run, self.staleness)
        if self.staleness == 0:
            assert run.weights == self._calm.weights

    def fails(self, deaths: Sequence[SimulatedDeath]) -> bool:
        """Whether something does not hold with these deaths."""
        try:
            self.check(deaths)
        except Exception:
            return True
        return False
