# SPDX-License-Identifier: Apache-2.0
"""The arguments `recipe` and `overrides` of the Python API: files, dicts with objects in them, or parsed recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.errors import RecipeError, type_phrase
from podium.python_objects import SectionArguments, without_objects
from podium.recipe import PipelineRecipe, Recipe, parse_recipe
from podium.recipe.loading import named_after, read_values
from podium.recipe.pipeline_loading import is_pipeline, load_any_recipe, parse_pipeline

RecipeLike = Recipe | PipelineRecipe | Mapping[str, Any] | str | Path
"""A recipe's file, its values as a dict, or a parsed recipe."""
Overrides = Sequence[str] | Mapping[str, Any]
"""`key.path=value` each, or a dict from key paths to values."""


def load_recipe_arguments(
    recipe: RecipeLike, overrides: Overrides, sections: SectionArguments, *, cache: Path | None = None
) -> Recipe | PipelineRecipe:
    """The recipe, with objects in the place of some of its parts. `cache`: where files of objects are written; default:
    the cache folder of the run."""
    texts = override_texts(overrides)
    if isinstance(recipe, str | Path) and sections.is_empty:
        return load_any_recipe(recipe, texts)
    if isinstance(recipe, Recipe) and sections.is_empty and not texts:
        return _named(recipe)
    values, origin = _values_of(recipe)
    values = without_objects(sections.within(values), texts, cache=cache)
    if isinstance(recipe, str | Path):
        values = named_after(recipe, values)
    return _named((parse_pipeline if is_pipeline(values) else parse_recipe)(values, origin=origin))


def _values_of(recipe: RecipeLike) -> tuple[Mapping[str, Any], str]:
    """The keys and values of a recipe, and its name in errors."""
    match recipe:
        case str() | Path():
            return read_values(recipe), str(recipe)
        case Recipe() | PipelineRecipe():
            return recipe.model_dump(mode="json"), "the recipe"
        case Mapping():
            return recipe, "the recipe"
        case other:
            raise RecipeError(
                f"recipe: expected the path of a YAML file, a dict or a Recipe, found {type_phrase(other)}."
            )


def _named(recipe: Recipe | PipelineRecipe) -> Recipe | PipelineRecipe:
    if recipe.run.name is None:
        raise RecipeError("run.name: a recipe that was not read from a file needs a name for its run folder.")
    return recipe


def override_texts(overrides: Overrides) -> tuple[str, ...]:
    """Overrides as the command line has them."""
    if isinstance(overrides, Mapping):
        try:
            return tuple(f"{key}={json.dumps(value)}" for key, value in overrides.items())
        except TypeError as error:
            raise RecipeError(
                f"overrides: values are those of YAML ({error}). Put objects into a dict recipe."
            ) from error
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not is_list or not all(isinstance(each, str) for each in overrides):
        raise RecipeError(f"overrides: expected a list of texts such as 'optimizer.lr=2e-5', found {overrides!r}.")
    return tuple(overrides)
