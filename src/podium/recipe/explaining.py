# SPDX-License-Identifier: Apache-2.0
"""Turns pydantic's errors into errors about recipes: the key, the problem, and a suggestion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from podium.recipe.keys import is_tag, section_at
from podium.recipe.suggesting import suggestions


def explained(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line for each problem of values that should be a `root`."""
    lines: list[str] = []
    for detail in error.errors():
        for line in _explained(detail, root):
            if line not in lines:
                lines.append(line)
    return lines


def _explained(detail: ErrorDetails, root: type[BaseModel]) -> list[str]:
    location = [str(part) for part in detail["loc"]]
    while location and is_tag(location[-1]):
        location.pop()
    key = ".".join(part for part in location if not is_tag(part))
    match detail["type"]:
        case "extra_forbidden":
            return suggestions(location, detail["input"], root)
        case "missing":
            return [f"{key}: required, and missing.{_description(location, root)}"]
        case "value_error" if not location:
            return str(detail["msg"]).removeprefix("Value error, ").split("\n")
        case "value_error":
            return [f"{key}: {str(detail['msg']).removeprefix('Value error, ')}"]
        case "union_tag_invalid":
            return [_unknown_branch(key, detail)]
        case "string_pattern_mismatch" if detail["loc"][-1] == "[key]":
            return [f"{key}: the name of a stage is letters, digits, - and _ (it is a folder's name too)."]
        case "model_type" | "model_attributes_type":
            return [f"{key or 'the recipe'}: expected keys and values, found {detail['input']!r}."]
    message = str(detail["msg"]).replace("valid tuple", "list").replace("Tuple", "List")
    message = message[0].lower() + message[1:]
    return [f"{key}: {message}, found {_shown(detail['input'])}.{_description(location, root)}"]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown_branch(key: str, detail: ErrorDetails) -> str:
    """An unknown tag of a union. Tags are written `key=value`: the value is none of those that the key may have."""
    name, _, value = str(detail["ctx"]["tag"]).partition("=")
    known = [part.strip(" '").partition("=")[2] for part in str(detail["ctx"]["expected_tags"]).split(",")]
    return f"{key}.{name}: input should be {', '.join(known[:-1])} or {known[-1]}, found {value!r}."


def _description(location: Sequence[str], root: type[BaseModel]) -> str:
    section = section_at(location, root)
    field = section.model_fields.get(location[-1]) if section and location else None
    return f" ({field.description})" if field and field.description else ""
