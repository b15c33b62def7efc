# SPDX-License-Identifier: Apache-2.0
"""Writes shorthands of a recipe's values in full: `model: FOLDER` is {path: FOLDER}, `train: FILE` a list of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from podium.recipe.fields import PathSection, Shorthand
from podium.recipe.recipes import CustomOnPolicyRecipe

# It has every key that has a short form; a key that a program does not have is refused later.
_EVERY_KEY = CustomOnPolicyRecipe


def in_full(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe, of a pipeline or of one of its stages without shorthands. What is neither a short form
    nor a full one stays as it is: it is refused with its key later."""
    result = _section(values, _EVERY_KEY)
    stages, defaults = values.get("stages"), values.get("defaults")
    if isinstance(stages, Mapping):
        result["stages"] = {
            name: in_full(stage) if isinstance(stage, Mapping) else stage for name, stage in stages.items()
        }
    if isinstance(defaults, Mapping):
        result["defaults"] = in_full(defaults)
    return result


def _section(values: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    result = dict(values)
    for name, field in kind.model_fields.items():
        if name in result:
            result[name] = _value(result[name], field.annotation, field.metadata)
    return result


def _value(value: Any, annotation: Any, metadata: Sequence[Any] = ()) -> Any:
    for each in reversed(metadata):  # the last one is the outermost
        if isinstance(each, Shorthand):
            value = each.in_full(value)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(value, parts[0], annotation.__metadata__)
    if origin in (Union, UnionType):
        kinds = [part for part in parts if part is not type(None)]
        return _value(value, kinds[0]) if len(kinds) == 1 else value
    if origin is tuple and isinstance(value, list | tuple):
        return [_value(item, parts[0]) for item in value]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if issubclass(annotation, PathSection) and isinstance(value, str):
            return {"path": value}
        return _section(value, annotation) if isinstance(value, Mapping) else value
    return value
