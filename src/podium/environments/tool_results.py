# SPDX-License-Identifier: Apache-2.0
"""Return values of tools as text for the model: strings as they are, everything else as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Mapping, Set
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

from pydantic import BaseModel

from podium.errors import type_phrase


class ToolResultError(Exception):
    """A tool returned a value that has no text; the message is for the model."""


def result_text(result: Any) -> str:
    """The text of a result. A ToolResultError names the type of a value that is neither JSON nor has its own text."""
    if isinstance(result, str) and not isinstance(result, Enum):
        return result
    try:
        return json.dumps(_plain(result), ensure_ascii=False, default=_plain)
    except ValueError as error:  # a value that contains itself
        raise ToolResultError(f"the result cannot be written as JSON ({error})") from error


def _plain(value: Any) -> Any:
    """A value of JSON for one that JSON does not have; its parts are converted when they are reached."""
    match value:
        case Enum():
            return value.value
        case BaseModel():
            return value.model_dump(mode="json")
        case Mapping():
            return {_key(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
        case Set():
            return sorted((_plain(item) for item in value), key=lambda item: json.dumps(item, default=_plain))
        case datetime.date() | datetime.time():
            return value.isoformat()
        case Decimal() | Fraction():
            return _number(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "tolist"):
        return value.tolist()
    kind: Any = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise ToolResultError(
            f"the result has {type_phrase(value)}, which is not JSON and has no text. Return texts, numbers, lists and "
            "dicts"
        )
    return str(value)


def _key(key: Any) -> str | int | float | bool | None:
    plain = _plain(key)
    return plain if isinstance(plain, str | int | float | bool | None) else json.dumps(plain, default=_plain)


def _number(value: Decimal | Fraction) -> int | float | str:
    if isinstance(value, Decimal) and not value.is_finite():
        return str(value)
    if value == int(value):
        return int(value)
    return float(value) if math.isfinite(float(value)) else str(value)
