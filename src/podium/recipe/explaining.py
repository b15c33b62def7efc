# SPDX-License-Identifier: Apache-2.0
"""Turns pydantic's errors into errors about recipes: the key, the problem, and a suggestion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from podium.recipe.keys import is_tag, section_at
from podium.recipe.suggesting import suggestions

_NOTHING: Mapping[str, str] = {}


def explained(error: ValidationError, root: type[BaseModel], written: Mapping[str, str] = _NOTHING) -> list[str]:
    """One line for each problem of values that should be a `root`. `written`: what is shown in place of the values of
    these keys, which come from environment variables."""
    lines: list[str] = []
    for detail in error.errors():
        for line in _explained(detail, root, written):
            if line not in lines:
                lines.append(line)
    return lines


def _explained(detail: ErrorDetails, root: type[BaseModel], written: Mapping[str, str]) -> list[str]:
    location = [str(part) for part in detail["loc"]]
    while location and is_tag(location[-1]):
        location.pop()
    key = ".".join(part for part in location if not is_tag(part))
    value = _as_written(detail["input"], key, written)
    problem = str(detail["msg"]).removeprefix("Value error, ").replace(repr(detail["input"]), repr(value))
    match detail["type"]:
        case "too_short" if detail["input"]:
            return []  # pydantic leaves out items that have problems of their own, and counts the rest
        case "extra_forbidden":
            return suggestions(location, detail["input"], root)
        case "missing":
            return [f"{key}: required, and missing.{_description(location, root)}"]
        case "value_error" if not location:
            return problem.split("\n")
        case "value_error":
            return [f"{key}: {problem}"]
        case "union_tag_invalid":
            return [_unknown_branch(key, detail)]
        case "string_pattern_mismatch" if detail["loc"][-1] == "[key]":
            return [f"{key}: the name of a stage is letters, digits, - and _ (it is a folder's name too)."]
        case "model_type" | "model_attributes_type":
            return [f"{key or 'the recipe'}: expected keys and values, found {value!r}."]
    message = problem.replace("valid tuple", "list").replace("Tuple", "List")
    message = message[0].lower() + message[1:]
    return [f"{key}: {message}, found {_shown(value)}.{_description(location, root)}"]


def _as_written(value: Any, key: str, written: Mapping[str, str]) -> Any:
    """A value with what was written for it, and for values in it, instead of values from environment variables."""
    if key in written or not written:
        return written.get(key, value)
    if isinstance(value, Mapping):
        return {name: _as_written(item, f"{key}.{name}".lstrip("."), written) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_written(item, f"{key}.{index}".lstrip("."), written) for index, item in enumerate(value)]
    return value


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
