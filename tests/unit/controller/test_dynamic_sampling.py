# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling at staleness 0 in every layout: which groups are replaced depends on their rewards alone, and not on
which of them ends first or where."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.simulated_runs import METHOD_COSTS, method, metrics_by_step, recipe_of, simulated
from podium.controller.simulation.costs import RunCosts

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "colocated": {"devices": 1},
    "colocated, 3 devices": {"devices": 3},
    "split": {"layout": "split", "devices": 3, "rollout_devices": 2},
    "elastic": {"layout": "elastic", "devices": 3, "rollout_devices": 1},
}
STEPS, PROMPTS, SAMPLES = 5, 4, 3
COSTS = replace(METHOD_COSTS, uniform_share=0.5)  # of groups
GROUPS = RunCosts(model=COSTS, lanes=8, samples=SAMPLES)


def expected() -> dict[int, dict[int, str | None]]:
    """Step -> prompt -> why its group is void, or None. A step takes prompts in their order until it has enough groups
    whose rewards differ."""
    steps: dict[int, dict[int, str | None]] = {}
    prompt = 0
    for step in range(1, STEPS + 1):
        taken: dict[int, str | None] = {}
        while list(taken.values()).count(None) < PROMPTS:
            taken[prompt] = "uniform" if GROUPS.group(prompt).is_uniform else None
            prompt += 1
        steps[step] = taken
    return steps


def ledger_of(run: Path) -> dict[int, dict[int, str | None]]:
    """The same of a run."""
    with closing(sqlite3.connect(run / "episodes.sqlite")) as ledger:
        rows = ledger.execute("SELECT step, prompt_index, void FROM groups ORDER BY 1, 2").fetchall()
    steps: dict[int, dict[int, str | None]] = {}
    for step, prompt, void in rows:
        steps.setdefault(step, {})[prompt] = void
    return steps


@pytest.mark.parametrize("name", ["grpo", "turns"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_replaces_the_groups_whose_rewards_are_equal(tmp_path: Path, layout: str, name: str) -> None:
    values = method(name, tmp_path)
    values |= {"algorithm": {"dynamic_sampling": True}, "placement": LAYOUTS[layout], "steps": STEPS}

    run = simulated(recipe_of(tmp_path, **values), COSTS)

    found = ledger_of(run.result.folder)
    assert found == expected()
    assert sum(len(groups) for groups in found.values()) > STEPS * PROMPTS + STEPS  # many are replaced
    if layout == "elastic":
        metrics = metrics_by_step(run.result.folder)
        assert sum(line["lending/times"] for line in metrics.values()) > 0
