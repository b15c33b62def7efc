# SPDX-License-Identifier: Apache-2.0
"""Recipes of tiny runs, and what their metrics say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from podium.observe import read_metrics
from podium.recipe import Recipe, dump_recipe, parse_recipe

STEPS = 8


def tiny_recipe(model: Path, data: Path, runs: Path, name: str, /, **changes: Any) -> Recipe:
    """Eight steps of about 300 tokens, saved every 3; threads and oneDNN fixed, because they change the order of sums.

    `changes` has whole sections, merged key by key, or plain keys.
    """
    values: dict[str, Any] = {
        "program": "sft",
        "model": {"path": str(model)},
        "data": {"train": [{"path": str(data)}]},
        "optimizer": {"lr": 3e-3, "warmup_steps": 2, "weight_decay": 0.1},
        "steps": STEPS,
        "tokens_per_step": 300,
        "placement": {"device": "cpu", "threads": 1, "onednn": False, "timeout_s": 100},
        "checkpoint": {"every": 3, "keep": 2, "background": False},
        "run": {"folder": str(runs), "name": name},
    }
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_recipe(values)


def write_recipe(recipe: Recipe, path: Path) -> str:
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    return str(path)


def losses(run: Path) -> dict[int, float]:
    """Step -> training loss, exactly as recorded; a step recorded twice is an error."""
    found: dict[int, float] = {}
    for metrics in read_metrics(run / "metrics.jsonl"):
        if "loss" in metrics.values:
            assert metrics.step not in found, f"step {metrics.step} is recorded twice"
            found[metrics.step] = metrics.values["loss"]
    return found
