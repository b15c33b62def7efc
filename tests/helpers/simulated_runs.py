# SPDX-License-Identifier: Apache-2.0
"""Simulated runs of tiny recipes, and what their folders have. Torch-free."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

from podium.controller.simulation.controlled import SimulatedRun, simulate_run
from podium.controller.simulation.costs import CostModel, EnvironmentCost, GenerationCost, LogNormal, UpdateCost
from podium.observe import read_metrics
from podium.programs.controlled import load_program
from podium.recipe import GrpoRecipe, OnPolicyRecipe, parse_recipe
from podium.runs.folder import RunFolder

COSTS = CostModel(
    generation=GenerationCost(weights_s=0.01, lane_s=0.002, prefill_tokens_s=500.0),
    answer_tokens=LogNormal(median=60.0, sigma=1.0, cap=400.0),
    update=UpdateCost(token_s=0.004, constant_s=0.5),
    publish_s=0.25,
    switch_s=0.75,
)


def method(name: str, folder: Path) -> dict[str, Any]:
    """Changes of a recipe for one of the METHODS, with the models and files that it needs."""
    models = {role: folder / role for role in ("teacher", "judge", "reward")}
    for model in models.values():
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text("{}")
    kl, (game, score) = {"coefficient": 0.1}, (folder / "game.py", [{"model": str(models["reward"])}])
    game.write_text("class Game:\n    async def reset(self, task): ...\n    async def step(self, turn): ...\n")
    turns = {"environment": f"{game}:Game", "max_turns": 4, "runners": 2}
    critic = {"warmup_steps": 2}
    changes: dict[str, dict[str, Any]] = {
        "grpo": {},
        "kl": {"algorithm": {"kl": kl}},
        "kl, adaptive": {"algorithm": {"kl": {**kl, "where": "reward", "target": 0.01, "horizon": 50.0}}},
        "kl, refreshed": {"algorithm": {"kl": {**kl, "refresh_every": 2}}},
        "ppo": {"program": "ppo"},
        "ppo, epochs": {"program": "ppo", "critic": critic, "algorithm": {"epochs": 2, "mini_batches": 2}},
        "ppo, kl": {"program": "ppo", "algorithm": {"lam": 0.9, "kl": {**kl, "where": "reward", "refresh_every": 2}}},
        "distill": {
            "program": "on_policy_distill",
            "teachers": [{"path": str(models["teacher"])}, {"path": str(models["judge"]), "weight": 2.0}],
        },
        "reward model": {"reward": [{"verifier": "exact_match"}, *score]},
        "turns": {"environment": turns},
        "turns, environment's rewards": {"environment": {**turns, "runners": 1}, "reward": []},
        "turns, ppo": {"program": "ppo", "environment": turns, "critic": critic, "reward": score},
    }
    return changes[name]


METHODS = (
    "grpo", "kl", "kl, adaptive", "kl, refreshed", "ppo", "ppo, epochs", "ppo, kl", "distill", "reward model", "turns",
    "turns, environment's rewards", "turns, ppo",
)  # fmt: skip
# Scoring, a critic's updates and an environment take time too. Some of its calls take longer than others.
METHOD_COSTS = replace(
    COSTS, score_token_s=0.001, critic=UpdateCost(token_s=0.002, constant_s=0.25),
    environment=EnvironmentCost(
        turns=LogNormal(median=2.0, sigma=0.5), call_s=LogNormal(median=0.5, sigma=1.0, cap=10.0),
        reply_tokens=LogNormal(median=5.0, sigma=0.5),
    ),
)  # fmt: skip


def simulated_recipe(folder: Path, **changes: Any) -> GrpoRecipe:
    """Six steps of four prompts with three samples each; a change replaces keys of its section."""
    recipe = recipe_of(folder, **changes)
    assert isinstance(recipe, GrpoRecipe)
    return recipe


def recipe_of(folder: Path, **changes: Any) -> OnPolicyRecipe:
    """The same with any program."""
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
    assert isinstance(recipe, OnPolicyRecipe)
    return recipe


def simulated(
    recipe: OnPolicyRecipe, costs: CostModel = COSTS, *, seed: int = 0, resume_step: int | None = None
) -> SimulatedRun:
    """Runs it in its own folder, which exists already where the run is resumed."""
    folder = RunFolder.create(recipe) if resume_step is None else RunFolder.of(recipe)
    program = load_program(recipe.program)
    return simulate_run(program, recipe, folder, costs, seed=seed, resume_step=resume_step)


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


def updates_behind(steps: dict[int, list[tuple[int, int, int]]]) -> list[int]:
    """For each group of `groups_by_step`, how many updates there were between its oldest version and the one that it
    was trained from. A version has the number of its step, and a step that only warms a critic up makes none."""
    versions = sorted({trained for groups in steps.values() for _, _, trained in groups})
    place = {version: number for number, version in enumerate(versions)}
    return [place[trained] - place[oldest] for groups in steps.values() for _, oldest, trained in groups]


def metrics_by_step(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> all of its metrics."""
    return {line.step: dict(line.values) for line in read_metrics(folder / "metrics.jsonl")}
