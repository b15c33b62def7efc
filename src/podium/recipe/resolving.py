# SPDX-License-Identifier: Apache-2.0
"""Makes a recipe independent of its working folder: absolute paths, and defaults that follow from the model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from podium.errors import RecipeError
from podium.recipe import plugins
from podium.recipe.algorithm import PolicySection
from podium.recipe.loading import parse_recipe
from podium.recipe.recipes import OnPolicyRecipe, Recipe, SpmdRecipe
from podium.recipe.variables import put, value_at

RecipeT = TypeVar("RecipeT", bound=Recipe)

# Keys that name local files or folders; `*` is a position in a list. A program has those of its own sections.
_PATHS = (
    "model.path",
    "model.tokenizer",
    "model.chat_template",
    "model.lora.adapter",
    "model.new_tokens.file",
    "data.train.*.path",
    "data.heldout.*.path",
    "preference.reference_model",
    "teachers.*.path",
    "reward.*.model",
    "critic.path",
    "algorithm.kl.reference",
)
_PLUGINS = (
    "program",
    "data.train.*.map",
    "data.heldout.*.map",
    "evaluation.generation.score",
    "reward.*.function",
    "algorithm.advantage",
    "algorithm.loss",
    "preference.loss",
    "environment.environment",
    "environment.tools.*",
    "environment.agent",
    "environment.gymnasium.id",
    "environment.gymnasium.render",
    "environment.gymnasium.parse",
    "environment.openenv.client",
    "environment.openenv.action",
    "environment.openenv.render",
    "run.loggers.*",
)
# For an on-policy program whose model does not state its context.
_CONTEXT = 16_384


def resolved(recipe: RecipeT, model_config: Mapping[str, Any]) -> RecipeT:
    """The recipe that is saved in the run folder, but for steps that are still to be counted. Resolving again changes
    nothing."""
    values = located(recipe)
    values["data"]["max_length"] = _max_length(recipe, model_config)
    if recipe.steps > 0:
        values["optimizer"] |= _warmup(recipe, recipe.steps)
    if isinstance(recipe, OnPolicyRecipe) and _has_auto_correction(recipe):
        correction = recipe.correction
        values["algorithm"]["correction"] = None if correction is None else correction.model_dump(mode="json")
    return _same_program(recipe, values)


def with_max_length(recipe: RecipeT, model_config: Mapping[str, Any]) -> RecipeT:
    """The recipe with the `data.max_length` that the resolved one has, and everything else as it is."""
    if recipe.data.max_length is not None:
        return recipe
    data = recipe.data.model_copy(update={"max_length": _max_length(recipe, model_config)})
    return recipe.model_copy(update={"data": data})


def _has_auto_correction(recipe: OnPolicyRecipe) -> bool:
    return isinstance(recipe.algorithm, PolicySection) and recipe.algorithm.correction == "auto"


def with_steps(recipe: RecipeT, steps: int) -> RecipeT:
    """The recipe of a run of `epochs`, once their steps are counted. Only the steps are stored, so that a resumed run
    has the same number."""
    values = recipe.stored_values()
    optimizer = values["optimizer"] | _warmup(recipe, steps)
    return _same_program(recipe, {**values, "steps": steps, "epochs": None, "optimizer": optimizer})


def _warmup(recipe: Recipe, steps: int) -> dict[str, Any]:
    """`optimizer.warmup_ratio` as steps; empty if there is none. At least one step has the full rate."""
    ratio = recipe.optimizer.warmup_ratio
    if ratio is None:
        return {}
    return {"warmup_steps": min(math.ceil(ratio * steps), steps - 1), "warmup_ratio": None}


def _same_program(recipe: RecipeT, values: dict[str, Any]) -> RecipeT:
    result = parse_recipe(values)
    assert isinstance(result, type(recipe)), "the program stays"
    return result


def located(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values with local paths in full, as they are stored. In a text that refers to an environment
    variable only what stands before the reference is known here."""
    values: dict[str, Any] = recipe.model_dump(mode="json")
    for key in _PATHS:
        _change(values, key.split("."), _absolute)
    for key in _PLUGINS:
        _change(values, key.split("."), _absolute_plugin)
    _change(values, ["environment", "verifiers", "taskset"], _absolute_file)
    stored = recipe.stored_values()
    for parts, text in recipe.references.items():
        became_absolute = value_at(values, parts) != value_at(recipe.model_dump(mode="json"), parts)
        is_relative = became_absolute and not text.startswith("${env:")
        put(values, parts, os.path.join(os.getcwd(), text) if is_relative else text)
    return {key: values[key] for key in stored}


def _change(values: Any, path: list[str], change: Callable[[str], str]) -> None:
    """Replaces each text at a path by change(text), if the values have one."""
    first, *rest = path
    places: list[Any] = []
    if first == "*" and isinstance(values, list):
        places = list(range(len(values)))
    elif isinstance(values, dict) and first in values:
        places = [first]
    for place in places:
        if rest:
            _change(values[place], rest, change)
        elif isinstance(values[place], str):
            values[place] = change(values[place])


def context_of(model_config: Mapping[str, Any]) -> int | None:
    """Positions that a model was made for; None: its config does not say."""
    context = model_config.get("max_position_embeddings") or model_config.get("text_config", {}).get(
        "max_position_embeddings"
    )
    return None if context is None else int(context)


def _max_length(recipe: Recipe, model_config: Mapping[str, Any]) -> int:
    """The recipe's value, or the longest that step and model allow. Micro-batches do not count: they must not change
    the data."""
    context = context_of(model_config)
    max_length = recipe.data.max_length
    if max_length is not None:
        if context is not None and max_length > context:
            raise RecipeError(
                f"data.max_length: {max_length} is more than the model's context of {context} positions. "
                f"Lower it to {context}."
            )
        return max_length
    if not isinstance(recipe, SpmdRecipe):
        # Prompts have no length limit here; the model's context bounds an episode.
        return int(context or _CONTEXT)
    if recipe.rows_per_step is not None and context is not None:
        return int(context)
    each = recipe.tokens_per_step // recipe.documents_per_row
    return int(min(each, context or each))


def _absolute(path: str) -> str:
    """Local paths that exist, and globs below an existing folder; a hub id or URL stays unchanged."""
    if "://" in path:
        return path
    head = path.split("*")[0].split("?")[0].split("[")[0]
    there = os.path.exists(path) or (head != path and os.path.isdir(os.path.dirname(head) or "."))
    return os.path.abspath(path) if there else path


def _absolute_file(text: str) -> str:
    """A Python file; the name of a module stays as it is."""
    return _absolute(text) if text.endswith(".py") else text


def _absolute_plugin(text: str) -> str:
    if not plugins.Plugin.has_shape(text):
        return text  # one of Podium's own
    module, name = plugins.split_plugin(text)
    return f"{_absolute(module)}:{name}" if module.endswith(".py") else text
