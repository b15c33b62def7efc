# SPDX-License-Identifier: Apache-2.0
"""What the page asks for and gets: parameters of a request with their checks, errors, and values as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from podium.errors import PodiumError

_MOST_PARAMETERS = 50


class PageError(PodiumError):
    """A request cannot be answered: has the HTTP status, and says what is wrong, where, and what to do."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of a request. A value of the wrong type is an error that names its parameter."""

    values: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Query:
        """Of the part of an address after the question mark. Empty values count as absent."""
        try:
            pairs = parse_qsl(text, max_num_fields=_MOST_PARAMETERS)
        except ValueError as error:
            raise PageError(400, f"the address has more than {_MOST_PARAMETERS} parameters. Leave some out.") from error
        return cls(dict(pairs))

    def text(self, name: str, default: str = "") -> str:
        """A text."""
        return self.values.get(name, default)

    def number(self, name: str) -> float | None:
        """A finite number."""
        if name not in self.values:
            return None
        try:
            value = float(self.values[name])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise PageError(
                400, f"{name}={self.values[name]!r} in the address is not a number. Give one, or leave it out."
            )
        return value

    def whole(self, name: str, default: int, *, least: int, most: int) -> int:
        """A whole number, at most and at least these."""
        found = self.optional_whole(name)
        return default if found is None else max(least, min(most, found))

    def optional_whole(self, name: str) -> int | None:
        """A whole number of 64 bits."""
        if name not in self.values:
            return None
        try:
            value = int(self.values[name])
        except ValueError:
            value = 1 << 64
        if abs(value) >= 1 << 63:
            raise PageError(
                400, f"{name}={self.values[name]!r} in the address is not a whole number. Give one, or leave it out."
            )
        return value


def json_text(value: Any) -> str:
    """JSON as browsers read it: a number that is not finite is null, no text can be taken for HTML, and half an emoji
    is a question mark, so that UTF-8 has it. What JSON has no type for is text."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False, default=str)
    except ValueError:
        text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"), ensure_ascii=False, default=str)
    text = text.encode("utf-8", "replace").decode("utf-8")
    for char, escape in _ESCAPES.items():
        text = text.replace(char, escape)
    return text


# Inside of JSON these characters stand in strings only. Without them no text ends a script element or begins a tag;
# the last two end a line in old JavaScript.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
