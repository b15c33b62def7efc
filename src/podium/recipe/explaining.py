# SPDX-License-Identifier: Apache-2.0
"""Turns pydantic's errors into errors about recipes: the key, the problem, and a suggestion."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from podium.recipe.keys import is_tag, section_at
from podium.recipe.recipes import Recipe
from podium.recipe.suggesting import better_value, hints_below, suggestions

_NOTHING: Mapping[str, str] = {}
_LITERAL = "literal_error"
_QUOTED = re.compile(r"'([^']*)'")
# Members of unions beside names, by how pydantic calls them.
_MEMBERS = {"function-": "file.py:function", "tuple[": "a list"}


def explained(error: ValidationError, root: type[BaseModel], written: Mapping[str, str] = _NOTHING) -> list[str]:
    """One line for each problem of values that should be a `root`. `written`: what is shown in place of the values of
    these keys, which come from environment variables."""
    details = error.errors()
    refused = [detail["loc"][:-1] for detail in details if _is_member(detail) and detail["type"] == _LITERAL]
    members = {place: [each for each in details if each["loc"][: len(place)] == place] for place in refused}
    lines: list[str] = []
    for detail in details:
        place = next((each for each in refused if detail["loc"][: len(each)] == each), None)
        if place is None:
            lines += _explained(detail, root, written)
        elif detail in _speaking(members[place]):
            lines += _explained(detail, root, written, others=_other_members(members[place]))
    return list(dict.fromkeys(lines))


def hinted_keys(error: ValidationError, root: type[Recipe]) -> set[str]:
    """Podium's keys that stand for unknown keys of another project."""
    unknown = [detail for detail in error.errors() if detail["type"] == "extra_forbidden"]
    paths = [([str(part) for part in detail["loc"] if not is_tag(str(part))], detail["input"]) for detail in unknown]
    return {hint.key for path, value in paths for hint in hints_below(path, value, root)}


def _is_member(detail: ErrorDetails) -> bool:
    """Whether an error is that of one member of a union; pydantic gives one for each."""
    return bool(detail["loc"]) and is_tag(str(detail["loc"][-1]))


def _speaking(members: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Of the errors about a value that no member of a union takes, those that are of use: about items inside it, about
    an import path if it looks like one, or about the names that there are."""
    inside = [each for each in members if not _is_member(each)]
    if inside:
        return inside
    others = [each for each in members if each["type"] != _LITERAL]
    value = members[0]["input"]
    looks_like_path = isinstance(value, str) and (":" in value or "/" in value or value.endswith(".py"))
    return others if others and looks_like_path else [each for each in members if each["type"] == _LITERAL]


def _other_members(members: Sequence[ErrorDetails]) -> str:
    tags = [str(each["loc"][-1]) for each in members if _is_member(each) and each["type"] != _LITERAL]
    return "".join(f", or {text}" for begin, text in _MEMBERS.items() if any(tag.startswith(begin) for tag in tags))


def _explained(
    detail: ErrorDetails, root: type[BaseModel], written: Mapping[str, str], *, others: str = ""
) -> list[str]:
    location = [str(part) for part in detail["loc"]]
    while location and is_tag(location[-1]):
        location.pop()
    key = ".".join(part for part in location if not is_tag(part))
    value = _as_written(detail["input"], key, written)
    problem = str(detail["msg"]).removeprefix("Value error, ").replace(repr(detail["input"]), repr(value))
    match detail["type"]:
        case "too_short" if detail["input"]:
            return []  # pydantic leaves out items that have problems of their own, and counts the rest
        case "too_short":
            return [f"{key}: needs at least 1 item, found {_shown(value)}.{_description(location, root)}"]
        case "literal_error":
            expected = str(detail["ctx"]["expected"])
            advice = better_value(key, value, _QUOTED.findall(expected)) + _description(location, root)
            return [f"{key}: input should be {expected}{others}, found {_shown(value)}.{advice}"]
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
            better = better_value(key, value)
            return [f"{key or 'the recipe'}: expected keys and values, found {value!r}.{better}"]
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
    better = better_value(f"{key}.{name}", value, known)
    return f"{key}.{name}: input should be {', '.join(known[:-1])} or {known[-1]}, found {value!r}.{better}"


def _description(location: Sequence[str], root: type[BaseModel]) -> str:
    section = section_at(location, root)
    field = section.model_fields.get(location[-1]) if section and location else None
    return f" ({field.description})" if field and field.description else ""
