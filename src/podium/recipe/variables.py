# SPDX-License-Identifier: Apache-2.0
"""`${env:NAME}` and `${env:NAME:default}` in the texts of a recipe: the variable's value for the run, the reference for
everything that is written. No value of an environment variable is stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from pydantic import PrivateAttr

from podium.recipe.fields import Section

KeyParts = tuple[Any, ...]
"""The path to a value: keys of mappings and positions of lists."""

_REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)(?::([^}]*))?\}")
_BEGIN = "${env"


class WholeRecipe(Section):
    """The recipe of a run or a pipeline. It knows which of its values come from environment variables."""

    # Path to a value -> what was written there.
    _references: dict[KeyParts, str] = PrivateAttr(default_factory=dict)

    @property
    def references(self) -> Mapping[KeyParts, str]:
        """Path to each value that comes from environment variables -> the text with `${env:NAME}` that was written."""
        return self._references

    def with_references(self, references: Mapping[KeyParts, str]) -> Self:
        """The recipe, given what was written in place of values that come from environment variables."""
        recipe = self.model_copy()
        recipe._references = dict(references)
        return recipe

    def stored_values(self) -> dict[str, Any]:
        """The values as they are written to disk: `${env:NAME}` and not the variable's value."""
        values = self.model_dump(mode="json")
        for parts, text in self._references.items():
            put(values, parts, text)
        return values

    def written(self, key: str) -> str | None:
        """What was written at a key path, if it refers to an environment variable."""
        return next((text for parts, text in self._references.items() if ".".join(map(str, parts)) == key), None)


class FromEnvironment(str):
    """A text with its references replaced by values, which still knows what was written."""

    reference: str


def refers_to_environment(text: str) -> bool:
    """Whether a text has a reference to an environment variable, or what looks like one."""
    return _BEGIN in text


def resolve(
    values: Mapping[str, Any], environment: Mapping[str, str], *, keeps_missing: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """The values with every reference replaced, and a line for each that cannot be. With `keeps_missing` a reference
    without a value stays in its text."""
    problems: list[str] = []

    def text_of(parts: KeyParts, text: str) -> str:
        if not refers_to_environment(text):
            return text
        key = ".".join(map(str, parts))
        if refers_to_environment(_REFERENCE.sub("", text)):
            problems.append(f"{key}: {text!r} is not a reference. Write ${{env:NAME}}, or ${{env:NAME:default}}.")
            return text

        def value_of(match: re.Match[str]) -> str:
            name = match[1]
            value: str | None = environment.get(name, match[2])
            if value is not None:
                return value
            problems.append(
                f"{key}: the environment variable {name} is not set. Set it, or give a default: "
                f"${{env:{name}:DEFAULT}}."
            )
            return match[0]

        result = FromEnvironment(_REFERENCE.sub(value_of, text))
        result.reference = text
        return result

    resolved: dict[str, Any] = _replaced(values, text_of)
    return resolved, [] if keeps_missing else problems


def references_of(values: Mapping[str, Any]) -> dict[KeyParts, str]:
    """Where resolved values came from: the path to each, and what was written there."""
    return {parts: text.reference for parts, text in texts_of(values) if isinstance(text, FromEnvironment)}


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved values as ordinary texts."""
    result: dict[str, Any] = _replaced(values, lambda parts, text: str(text))
    return result


def value_at(values: Any, parts: KeyParts) -> Any:
    """The value at a path; None if there is none."""
    for part in parts:
        is_there = part in values if isinstance(values, Mapping) else isinstance(values, list) and part < len(values)
        if not is_there:
            return None
        values = values[part]
    return values


def put(values: Any, parts: KeyParts, value: Any) -> None:
    """Replaces the value at a path, if there is one."""
    if value_at(values, parts[:-1]) is not None and value_at(values, parts) is not None:
        value_at(values, parts[:-1])[parts[-1]] = value


def _replaced(value: Any, text_of: Callable[[KeyParts, str], str], parts: KeyParts = ()) -> Any:
    if isinstance(value, str):
        return text_of(parts, value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, text_of, (*parts, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, text_of, (*parts, index)) for index, item in enumerate(value)]
    return value


def texts_of(value: Any, parts: KeyParts = ()) -> Iterator[tuple[KeyParts, str]]:
    """All texts in nested values, with the path to each."""
    if isinstance(value, str):
        yield parts, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_of(item, (*parts, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from texts_of(item, (*parts, index))
