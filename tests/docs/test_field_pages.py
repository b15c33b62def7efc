# SPDX-License-Identifier: Apache-2.0
"""Recipes on the pages about environments of other packages, and their examples, are valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from podium.recipe import OnPolicyRecipe, parse_recipe
from podium.recipe.loading import load_recipe

ROOT = Path(__file__).parents[2]
PAGES = ("gymnasium", "openenv", "verifiers")
RECIPE: dict[str, Any] = {
    "program": "grpo", "model": {"path": "model"}, "data": {"train": [{"path": "train.jsonl"}]},
    "optimizer": {"lr": 1e-3}, "steps": 2, "run": {"name": "page"},
}  # fmt: skip


def parts_of(page: str) -> list[dict[str, Any]]:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)]


@pytest.mark.parametrize("page", PAGES)
def test_recipes_of_the_page_are_valid(page: str) -> None:
    parts = parts_of(page)
    assert parts
    for part in parts:
        recipe = parse_recipe({**RECIPE, **part})
        assert isinstance(recipe, OnPolicyRecipe)
        assert recipe.environment is not None
        assert recipe.environment.kinds == (page,)


@pytest.mark.parametrize("page", PAGES)
def test_the_example_has_the_page_s_first_environment(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(f"examples/{page}/grpo.yaml")
    assert isinstance(recipe, OnPolicyRecipe)
    part = parse_recipe({**RECIPE, **parts_of(page)[0]})
    assert isinstance(part, OnPolicyRecipe)
    assert recipe.environment == part.environment


@pytest.mark.parametrize("page", PAGES)
def test_the_page_names_every_key(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    recipe = parse_recipe({**RECIPE, **parts_of(page)[0]})
    assert isinstance(recipe, OnPolicyRecipe)
    for key in type(getattr(recipe.environment, page)).model_fields:
        assert f"| `{key}` |" in text
