# SPDX-License-Identifier: Apache-2.0
"""Simulated runs of tiny recipes, and what their folders have. Torch-free."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from podium.controller.simulation.controlled import SimulatedRun, simulate_run
from podium.controller.simulation.costs import CostModel, GenerationCost, LogNormal, UpdateCost
from podium.observe import read_metrics
from podium.programs.grpo import grpo
from podium.recipe import GrpoRecipe, parse_recipe
from podium.runs.folder import RunFolder

COSTS = CostModel(
    generation=GenerationCost(weights_s=0.01, lane_s=0.002, prefill_tokens_s=500.0),
    answer_tokens=LogNormal(median=60.0, sigma=1.0, cap=400.0),
    update=UpdateCost(token_s=0.004, constant_s=0.5),
    publish_s=0.25,
    switch_s=0.75,
)


def simulated_recipe(folder: Path, **changes: Any) -> GrpoRecipe:
    """Six steps of four prompts with three samples each; a change replaces keys of its section."""
    model, train = folder / "model", folder / "train.jsonl"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    train.write_text("".join(json.dumps({"prompt": f"{n} + 1 = ", "answer": str(n + 1)}) + "\n" for n in range(64)))
    values: dict[str, Any] = {
        "program": "grpo",
        "model": {"path": str(model)},
        "data": {"train": [{"path": str(train)}], "max_length": 1024, "shuffle": False},
        "reward": [{"verifier": "exact_match"}],
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 3, "max_new_tokens": 500, "max_running": 8},
        "grading": {"workers": 8},
        "optimizer": {"lr": 1e-3},
        "placement": {"device": "cpu"},
        "steps": 6,
        "run": {"name": "simulated", "folder": str(folder / "runs")},
    }
    for key, change in changes.items():
        values[key] = {**values.get(key, {}), **change} if isinstance(change, dict) else change
    recipe = parse_recipe(values)
    assert isinstance(recipe, GrpoRecipe)
    return recipe


def simulated(
    recipe: GrpoRecipe, costs: CostModel = COSTS, *, seed: int = 0, resume_step: int | None = None
) -> SimulatedRun:
    """Runs it in its own folder, which exists already where the run is resumed."""
    folder = RunFolder.create(recipe) if resume_step is None else RunFolder.of(recipe)
    return simulate_run(grpo, recipe, folder, costs, seed=seed, resume_step=resume_step)


def groups_by_step(folder: Path) -> dict[int, list[tuple[int, int, int]]]:
    """Step -> (prompt index, oldest version, version that it was trained from) of its groups."""
    file = sqlite3.connect(folder / "episodes.sqlite")
    try:
        rows = file.execute(
            "SELECT step, prompt_index, oldest_version, trained_version FROM groups WHERE void IS NULL ORDER BY 1, 2"
        ).fetchall()
    finally:
        file.close()
    steps: dict[int, list[tuple[int, int, int]]] = {}
    for step, *group in rows:
        steps.setdefault(step, []).append(tuple(group))
    return steps


def metrics_by_step(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> all of its metrics."""
    return {line.step: dict(line.values) for line in read_metrics(folder / "metrics.jsonl")}
