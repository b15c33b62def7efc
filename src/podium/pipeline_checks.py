# SPDX-License-Identifier: Apache-2.0
"""What can be known of a pipeline before it runs: each stage as a recipe, and the order. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeVar

from podium.checks import deep_report, problems_of, raise_together
from podium.errors import PodiumError, RecipeError
from podium.memory_checks import devices_per_machine, memory_report, refuse_what_cannot_fit
from podium.models.folder import is_hub_id
from podium.recipe import PipelineRecipe, Recipe
from podium.recipe.pipeline import references
from podium.recipe.pipeline_loading import stage_recipe, unmade_stage_recipe
from podium.recipe.warnings import recipe_warnings

Value = TypeVar("Value")


def check_pipeline(
    pipeline: PipelineRecipe, *, deep: bool, all_rows: bool = False, progress: TextIO | None = None,
    device: str | None = None,
) -> list[str]:  # fmt: skip
    """Raises what is wrong with any stage, and which of them cannot fit their device's memory; returns lines about what
    was seen. Weights that an earlier stage will make cannot be looked at. `device`: name of one that the run will have;
    default: this machine's."""
    check_stages(pipeline, device=device)
    order = pipeline.order()
    memory = _of_stages(pipeline, lambda recipe: memory_report(recipe, device))
    lines = [f"program pipeline: {len(order)} stages, in this order: {', '.join(order)}"]
    for name in order:
        lines += [*_stage_lines(pipeline, name), *(f"  {line}" for line in memory[name])]
        if deep:
            lines += [f"  {line}" for line in _deep_lines(pipeline, name, all_rows, progress)]
    return lines


def check_stages(pipeline: PipelineRecipe, *, device: str | None = None) -> None:
    """Raises what is wrong with any stage, but for its memory."""
    order, problems = pipeline.order(), list[PodiumError]()
    for name in order:
        recipe = unmade_stage_recipe(pipeline, name)
        found = problems_of(recipe, per_machine=devices_per_machine(recipe, device))
        problems += [RecipeError(f"stages.{name}.{problem}") for problem in found]
    raise_together(problems)


def refuse_stages_that_cannot_fit(pipeline: PipelineRecipe) -> None:
    """Raises which stages cannot fit this machine's memory, as `refuse_what_cannot_fit` does for a single recipe."""
    _of_stages(pipeline, refuse_what_cannot_fit)


def _of_stages(pipeline: PipelineRecipe, look: Callable[[Recipe], Value]) -> dict[str, Value]:
    """By stage: what is seen of its recipe, in which a checkpoint that another stage will make is the model that this
    one begins with: their shapes are the same. Raises the problems of all stages together."""
    order, problems, found = pipeline.order(), list[PodiumError](), dict[str, Value]()
    places = {name: _first_model(pipeline, name) for name in order}
    for name in order:
        try:
            found[name] = look(stage_recipe(pipeline, name, places, Path(pipeline.run.folder)))
        except PodiumError as problem:
            problems.append(RecipeError(f"stages.{name}.{problem}"))
    raise_together(problems)
    return found


def _stage_lines(pipeline: PipelineRecipe, name: str) -> list[str]:
    recipe = unmade_stage_recipe(pipeline, name)
    lines = [f"stage {name}: program {recipe.program}, {recipe.execution} execution, {recipe.length}"]
    stage_references = references(pipeline.merged(name))
    lines += [f"  {each.key}: what stage {each.stage} makes" for each in stage_references]
    if "model.path" not in {each.key for each in stage_references} and is_hub_id(recipe.model.path):
        lines.append(f"  model.path: there is no folder {recipe.model.path}; taken as a hub id, not looked up")
    return lines + [f"  warning: {text}" for text in recipe_warnings(recipe)]


def _deep_lines(pipeline: PipelineRecipe, name: str, all_rows: bool, progress: TextIO | None) -> list[str]:
    """With the config and tokenizer of the model that the first of its ancestors begins with: training keeps both."""
    recipe = unmade_stage_recipe(pipeline, name)
    model = recipe.model.model_copy(update={"path": _first_model(pipeline, name)})
    try:
        return deep_report(recipe.model_copy(update={"model": model}), all_rows=all_rows, progress=progress)
    except PodiumError as error:
        raise type(error)(f"stages.{name}: {error}") from error


def _first_model(pipeline: PipelineRecipe, name: str) -> str:
    parents = {each.key: each.stage for each in references(pipeline.merged(name))}
    if "model.path" in parents:
        return _first_model(pipeline, parents["model.path"])
    return unmade_stage_recipe(pipeline, name).model.path
