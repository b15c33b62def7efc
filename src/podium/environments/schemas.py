# SPDX-License-Identifier: Apache-2.0
"""A small part of JSON Schema: enough to say what an answer must look like, and strict about what it does not know."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any] | bool

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: not isinstance(value, bool) and isinstance(value, int | float) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
# They explain and do not constrain.
_NOTES = ("title", "description", "$schema", "$id", "$comment", "default", "examples")


def schema_problems(schema: Any, path: str = "") -> Iterator[str]:
    """Why this is not a schema that `fits` understands, one sentence each; nothing when it is."""
    if isinstance(schema, bool):
        return
    at = f"{path}: " if path else ""
    if not isinstance(schema, Mapping):
        yield f"{at}a schema is an object (or true, or false), found {schema!r}"
        return
    for keyword, value in schema.items():
        if keyword in _NOTES:
            continue
        check = _CHECKS.get(keyword)
        if check is None:
            yield f"{at}the keyword {keyword!r} is not known; known are {', '.join(_CHECKS)}"
        elif not check(value):
            yield f"{at}{keyword} cannot be {value!r}"
    inside = schema.get("properties")
    for name, part in inside.items() if isinstance(inside, Mapping) else ():
        yield from schema_problems(part, _below(path, f"properties.{name}"))
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from schema_problems(schema[name], _below(path, name))


def fits(value: Any, schema: Schema) -> bool:
    """Whether parsed JSON is what the schema describes. The schema has no problems."""
    if isinstance(schema, bool):
        return schema
    return (
        _is_of_type(value, schema)
        and _is_listed(value, schema)
        and (not isinstance(value, str) or _text_fits(value, schema))
        and (not _TYPES["number"](value) or _number_fits(value, schema))
        and (not isinstance(value, list) or all(fits(item, schema.get("items", True)) for item in value))
        and (not isinstance(value, dict) or _object_fits(value, schema))
    )


def _is_of_type(value: Any, schema: Mapping[str, Any]) -> bool:
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else wanted
    return names is None or any(_TYPES[name](value) for name in names)


def _is_listed(value: Any, schema: Mapping[str, Any]) -> bool:
    if "const" in schema and not _same(value, schema["const"]):
        return False
    return "enum" not in schema or any(_same(value, each) for each in schema["enum"])


def _text_fits(value: str, schema: Mapping[str, Any]) -> bool:
    return (
        schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        and re.search(schema.get("pattern", ""), value) is not None
    )


def _number_fits(value: float, schema: Mapping[str, Any]) -> bool:
    lowest, highest = schema.get("minimum", value), schema.get("maximum", value)
    return bool(lowest <= value <= highest)


def _object_fits(value: dict[str, Any], schema: Mapping[str, Any]) -> bool:
    known = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    return all(name in value for name in schema.get("required", ())) and all(
        fits(item, known.get(name, others)) for name, item in value.items()
    )


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and true is not 1."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, list) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, dict) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(_same(item, other[name]) for name, item in value.items())
    return bool(value == other)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError):
        return False
    return isinstance(value, str)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_type(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list | tuple) and bool(names) and all(name in _TYPES for name in names)


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _is_anything(value: Any) -> bool:
    return True


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "properties": lambda value: isinstance(value, Mapping),
    "required": _is_names,
    "additionalProperties": _is_anything,
    "items": _is_anything,
    "enum": lambda value: isinstance(value, list | tuple),
    "const": _is_anything,
    "minimum": _TYPES["number"],
    "maximum": _TYPES["number"],
    "minLength": _is_length,
    "maxLength": _is_length,
    "pattern": _is_pattern,
}
