# SPDX-License-Identifier: Apache-2.0
"""JSON objects of lines: parsed at once, or when they are used first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from podium.data.rows import LinePlace
from podium.errors import BadRowError


def parse_object(line: bytes, place: str | LinePlace, key: str) -> dict[str, Any]:
    """The JSON object of a line; a BadRowError names the line."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadRowError(
            f"{key}: {place}: not valid JSON ({reason}). Every line must be one JSON object; fix or remove this line."
        ) from error
    if not isinstance(values, dict):
        raise BadRowError(
            f"{key}: {place}: a JSON {type(values).__name__}, not an object. Every line must be one object "
            'such as {"messages": [...]}; a file that is one JSON array has to be written as JSON Lines.'
        )
    return values


class LazyObject(Mapping[str, Any]):
    """The JSON object of a line, which is parsed when it is used first. A malformed one raises its BadRowError then."""

    __slots__ = ("_key", "_line", "_place", "_values")

    def __init__(self, line: bytes, place: str | LinePlace, key: str) -> None:
        self._line, self._place, self._key = line, place, key
        self._values: dict[str, Any] | None = None

    def _parsed(self) -> dict[str, Any]:
        if self._values is None:
            self._values = parse_object(self._line, self._place, self._key)
        return self._values

    def __getitem__(self, name: str) -> Any:
        return self._parsed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parsed())

    def __len__(self) -> int:
        return len(self._parsed())
