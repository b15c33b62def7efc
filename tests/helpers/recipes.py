# SPDX-License-Identifier: Apache-2.0
"""The shortest valid recipe, and ways to vary it."""

from __future__ import annotations

from typing import Any

from podium.recipe import Recipe, apply_overrides, parse_recipe


def recipe_values(*overrides: str) -> dict[str, Any]:
    """Plain values of a valid recipe, with `key.path=value` overrides on top."""
    values = {
        "program": "sft",
        "model": {"path": "models/base"},
        "data": {"train": [{"path": "data/train.jsonl"}]},
        "optimizer": {"lr": 1e-3},
        "steps": 100,
        "run": {"name": "sums"},
    }
    return apply_overrides(values, overrides)


def make_recipe(*overrides: str) -> Recipe:
    return parse_recipe(recipe_values(*overrides))
