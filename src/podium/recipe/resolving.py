# SPDX-License-Identifier: Apache-2.0
"""A recipe made independent of where it was started: paths absolute, defaults that follow from the model filled in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from podium.errors import RecipeError
from podium.recipe import plugins
from podium.recipe.dense_rules import documents_per_row
from podium.recipe.loading import parse_recipe
from podium.recipe.programs import SIGNALS
from podium.recipe.schema import Recipe


def resolved(recipe: Recipe, model_config: Mapping[str, Any]) -> Recipe:
    """What is saved in the run folder. Resolving again changes nothing."""
    values = located(recipe)
    values["data"]["max_length"] = _max_length(recipe, model_config)
    return parse_recipe(values)


def located(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values with local paths in full."""
    values: dict[str, Any] = recipe.model_dump(mode="json")
    for key in ("path", "tokenizer", "chat_template"):
        values["model"][key] = _absolute(values["model"][key])
    for section, key in (("lora", "adapter"), ("new_tokens", "file")):
        if values["model"][section] is not None:
            values["model"][section][key] = _absolute(values["model"][section][key])
    values["preference"]["reference_model"] = _absolute(values["preference"]["reference_model"])
    for part in ("train", "heldout"):
        for source in values["data"][part]:
            source["path"] = _absolute(source["path"])
            source["map"] = _absolute_plugin(source["map"])
    generation = values["evaluation"]["generation"]
    if generation is not None:
        generation["score"] = _absolute_plugin(generation["score"])
    for reward in values["reward"]:
        reward["function"], reward["model"] = _absolute_plugin(reward["function"]), _absolute(reward["model"])
    for teacher in values["teachers"]:
        teacher["path"] = _absolute(teacher["path"])
    values["critic"]["path"] = _absolute(values["critic"]["path"])
    algorithm = values["algorithm"]
    for key in ("advantage", "loss"):
        algorithm[key] = _absolute_plugin(algorithm[key])
    if algorithm["kl"] is not None:
        algorithm["kl"]["reference"] = _absolute(algorithm["kl"]["reference"])
    environment = values["environment"]
    if environment is not None:
        environment["environment"] = _absolute_plugin(environment["environment"])
        environment["tools"] = [_absolute_plugin(tool) for tool in environment["tools"]]
    values["run"]["loggers"] = [_absolute_plugin(logger) for logger in values["run"]["loggers"]]
    return values


def _max_length(recipe: Recipe, model_config: Mapping[str, Any]) -> int:
    """As the recipe says, or the longest that step and model allow. Micro-batches have no say in it: they must not
    change the data."""
    context = model_config.get("max_position_embeddings") or model_config.get("text_config", {}).get(
        "max_position_embeddings"
    )
    asked = recipe.data.max_length
    if asked is not None:
        if context is not None and asked > context:
            raise RecipeError(
                f"data.max_length: {asked} is more than the model's context of {context} positions. "
                f"Lower it to {context}."
            )
        return asked
    if SIGNALS[recipe.program].execution == "controlled":
        # Prompts are read as they come; what bounds an episode is the model's context.
        return int(context or recipe.tokens_per_step)
    if recipe.rows_per_step is not None and context is not None:
        return int(context)
    each = recipe.tokens_per_step // documents_per_row(recipe)
    return int(min(each, context or each))


def _absolute(path: str | None) -> str | None:
    """Local paths that exist, and globs beneath a folder that exists; a hub id or URL stays as it is."""
    if path is None or "://" in path:
        return path
    head = path.split("*")[0].split("?")[0].split("[")[0]
    there = os.path.exists(path) or (head != path and os.path.isdir(os.path.dirname(head) or "."))
    return os.path.abspath(path) if there else path


def _absolute_plugin(path: str | None) -> str | None:
    if path is None or ":" not in path:
        return path
    module, name = plugins.split_plugin(path)
    return f"{_absolute(module)}:{name}" if module.endswith(".py") else path
