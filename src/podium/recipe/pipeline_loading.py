# SPDX-License-Identifier: Apache-2.0
"""Loads YAML into a Recipe or PipelineRecipe; every stage of a pipeline is checked as a recipe."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from podium.errors import RecipeError
from podium.recipe.explaining import explained
from podium.recipe.loading import (
    EXTENSION,
    apply_overrides,
    named_after,
    not_valid,
    parse_recipe,
    read_values,
    recipe_or_problems,
    without_extensions,
)
from podium.recipe.pipeline import NAME, PipelineRecipe, reference_problems, references
from podium.recipe.programs import BUILT_IN, CUSTOM, AnyRecipe
from podium.recipe.recipes import Recipe
from podium.recipe.resolving import located
from podium.recipe.shorthands import in_full
from podium.recipe.variables import plain, references_of, resolve

_DEVICES = "placement.devices="
# It has the form of a hub id, so no check looks for it on this machine.
_NOT_YET_MADE = "podium.stage/"
# Parts of the JSON schema that stages have are called so.
_PARTIAL = "InStage"


def load_any_recipe(file: str | Path, overrides: Sequence[str] = ()) -> Recipe | PipelineRecipe:
    """Reads, overrides and checks a recipe file, of one run or of a pipeline. Its name defaults to the file's name."""
    values = overridden(read_values(file), overrides)
    parse = parse_pipeline if is_pipeline(values) else parse_recipe
    return parse(named_after(file, values), origin=str(Path(file)))


def is_pipeline(values: Mapping[str, Any]) -> bool:
    """Whether the values of a file are a pipeline's and not one recipe's."""
    return values.get("program") == "pipeline" or "stages" in values


def overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Applies `--set` to a recipe of either kind. `placement.devices`, the key of --devices, applies to every stage."""
    stages = values.get("stages")
    if is_pipeline(values) and isinstance(stages, Mapping):
        per_stage = [
            [f"stages.{name}.{text}" for name in stages] if text.startswith(_DEVICES) else [text] for text in overrides
        ]
        overrides = [text for texts in per_stage for text in texts]
        for text in overrides:
            _refuse_unknown_stage(text, list(map(str, stages)))
    return apply_overrides(values, overrides)


def _refuse_unknown_stage(override: str, stages: Sequence[str]) -> None:
    """Refuses a key below an unknown stage, which would create a stage of the defaults alone."""
    section, _, rest = override.partition("=")[0].strip().partition(".")
    name, below, _ = rest.partition(".")
    if section == "stages" and below and name not in stages:
        near = difflib.get_close_matches(name, stages, n=1, cutoff=0.6)
        hint = f"Did you mean stages.{near[0]}?" if near else f"There are: {', '.join(stages)}."
        raise RecipeError(f"--set {override}: there is no stage {name!r}. {hint}")


def parse_pipeline(
    values: Mapping[str, Any], *, origin: str = "the recipe", needs_environment: bool = True
) -> PipelineRecipe:
    """Checks plain values: the pipeline's own keys, the references between stages, and each stage as a recipe. Lists
    all problems at once, with their keys."""
    own = without_extensions(values)
    # Stages are resolved one by one, as recipes.
    run, missing = resolve({"run": own.get("run", {})}, os.environ, keeps_missing=not needs_environment)
    if missing:
        raise not_valid(origin, missing)
    try:
        pipeline = PipelineRecipe.model_validate({**own, **plain(run)}).with_references(references_of(run))
    except ValidationError as error:
        raise not_valid(origin, explained(error, PipelineRecipe)) from None
    merged = {name: pipeline.merged(name) for name in pipeline.stages}
    problems = [(name, f"{key}: {text}") for name, key, text in reference_problems(merged)]
    problems += [
        (name, line)
        for name, stage in merged.items()
        for line in _stage_problems(pipeline, name, stage, needs_environment=needs_environment)
    ]
    if problems:
        raise not_valid(origin, _located(pipeline, problems))
    return pipeline


def stage_recipe(pipeline: PipelineRecipe, stage: str, places: Mapping[str, str], folder: Path) -> Recipe:
    """A stage as the recipe of a run inside `folder`; `places` are the paths of other stages' weights."""
    values = pipeline.placed(stage, places)
    run = {**(values.get("run") or {}), "name": stage, "folder": str(folder)}
    return parse_recipe({**values, "run": run}, origin=f"stage {stage}")


def unmade_stage_recipe(pipeline: PipelineRecipe, stage: str) -> Recipe:
    """A stage before any has run: referenced weights are not looked up."""
    places = {name: _NOT_YET_MADE + name for name in pipeline.stages}
    return stage_recipe(pipeline, stage, places, Path(pipeline.run.folder) / (pipeline.run.name or "pipeline"))


def resolved_pipeline(pipeline: PipelineRecipe) -> PipelineRecipe:
    """A pipeline that does not depend on the working folder: defaults written into every stage, paths in full. This is
    saved in the pipeline's folder; resolving again changes nothing."""
    stages = {}
    for name in pipeline.stages:
        values = located(unmade_stage_recipe(pipeline, name))
        for key in ("name", "folder"):
            del values["run"][key]
        stages[name] = _with_references(values)
    return parse_pipeline({"program": "pipeline", "stages": stages, "run": pipeline.stored_values()["run"]})


def recipe_schema() -> dict[str, Any]:
    """JSON schema of recipes of either kind. The keys of a stage are those of a recipe, but none is required: they may
    be in `defaults`."""
    schema = TypeAdapter(AnyRecipe | PipelineRecipe).json_schema()
    parts = schema["$defs"]
    keys = parts["PipelineRecipe"]["properties"]
    kinds = [kind.__name__ for kind in (*BUILT_IN.values(), *CUSTOM.values())]
    parts |= {f"{name}{_PARTIAL}": _partial(part) for name, part in parts.items() if name != "PipelineRecipe"}
    stage = {"anyOf": [{"$ref": f"#/$defs/{name}{_PARTIAL}"} for name in kinds]}
    keys["stages"] |= {"patternProperties": {f"^{NAME}$": stage}, "additionalProperties": False}
    keys["defaults"] = {**stage, "description": keys["defaults"]["description"]}
    for name in (*kinds, "PipelineRecipe"):
        parts[name]["patternProperties"] = {f"^{EXTENSION}": True}
    return {"title": "Recipe", **schema}


def _partial(part: Any) -> Any:
    """A part of a schema without required keys, in which several branches of a union may match."""
    if isinstance(part, list):
        return [_partial(each) for each in part]
    if not isinstance(part, dict):
        return part
    result: dict[str, Any] = {}
    for key, value in part.items():
        if key == "$ref":
            result[key] = f"{value}{_PARTIAL}"
        elif key == "properties":  # names of keys, which may be any word
            result[key] = {name: _partial(each) for name, each in value.items()}
        elif key != "required":
            result["anyOf" if key == "oneOf" else key] = _partial(value)
    return result


def _stage_problems(
    pipeline: PipelineRecipe, name: str, stage: Mapping[str, Any], *, needs_environment: bool
) -> list[str]:
    run = stage.get("run")
    lines = [
        f"run.{key}: a stage's folder is {name}/ in that of the pipeline. Remove it; the pipeline's own is run.{key}."
        for key in ("name", "folder")
        if isinstance(run, Mapping) and key in run
    ]
    if stage.get("program") == "pipeline":
        return [*lines, "program: a stage is a recipe, and this is a pipeline. Write its stages out in this one."]
    places = {each.stage: _NOT_YET_MADE + each.stage for each in references(stage)}
    result = recipe_or_problems(pipeline.placed(name, places), needs_environment=needs_environment)
    return lines if isinstance(result, Recipe) else [*lines, *result]


def _located(pipeline: PipelineRecipe, problems: Sequence[tuple[str, str]]) -> list[str]:
    """Each problem of a stage under the key in the user's file: in the stage, or once in the defaults."""
    taken: dict[str, list[str]] = {}
    for name, line in problems:
        key, colon, text = line.partition(":")
        own, shared = in_full(pipeline.stages[name]), in_full(pipeline.defaults)
        if colon and _depth(shared, key) > _depth(own, key):
            taken.setdefault(f"defaults.{key}:{text}", []).append(name)
            continue
        if key == "model.path" and isinstance(pipeline.stages[name].get("model"), str):
            key = "model"
        taken.setdefault(f"stages.{name}.{key}:{text}" if colon else f"stages.{name}: {line}", [])
    return [
        f"{line} (This is so in stage {', '.join(names)}.)" if 0 < len(names) < len(pipeline.stages) else line
        for line, names in taken.items()
    ]


def _depth(values: Any, key: str) -> int:
    """Depth to which the values have a key path."""
    depth = 0
    for part in key.split("."):
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, list | tuple) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            break
        depth += 1
    return depth


def _with_references(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_NOT_YET_MADE):
        return f"${{stage.{value.removeprefix(_NOT_YET_MADE)}}}"
    if isinstance(value, Mapping):
        return {key: _with_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_references(item) for item in value]
    return value
