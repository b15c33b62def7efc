# SPDX-License-Identifier: Apache-2.0
"""Graders that grade one episode at a time, by hand, in both simulations."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.simulated_runs import simulated, simulated_recipe
from podium.controller.scheduling import ScheduleSettings
from podium.controller.simulation.costs import CostModel, DeviceLayout, GenerationCost, LogNormal, UpdateCost
from podium.controller.simulation.run import simulate


def costs(graders: int | None) -> CostModel:
    """Four answers of 10 tokens end after 10 s, a grading takes 3 s, and an update of them 4 s."""
    return CostModel(
        generation=GenerationCost(weights_s=1.0), answer_tokens=LogNormal(median=10.0),
        update=UpdateCost(token_s=0.1), grading_s=LogNormal(median=3.0), graders=graders,
    )  # fmt: skip


@pytest.mark.parametrize(("graders", "grading_s"), [(None, 3.0), (1, 12.0), (2, 6.0), (3, 6.0), (4, 3.0), (9, 3.0)])
def test_episodes_wait_for_a_free_grader(graders: int | None, grading_s: float) -> None:
    schedule = ScheduleSettings(steps=3, groups_per_step=2, samples=2)
    report = simulate(schedule, costs(graders), DeviceLayout(devices=1, lanes=4))

    step_s = 10.0 + grading_s + 4.0
    assert report.committed_s == pytest.approx([step_s, 2 * step_s, 3 * step_s])
    assert report.generator_idle_s["grading"] == pytest.approx(3 * grading_s)


def test_a_simulated_grader_takes_its_batches_one_after_the_other(tmp_path: Path) -> None:
    recipe = simulated_recipe(
        tmp_path, rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_running": 4}, grading={"workers": 2},
        steps=2,
    )  # fmt: skip
    assert simulated(recipe, costs(2)).committed_s == pytest.approx([20.0, 40.0])
