# SPDX-License-Identifier: Apache-2.0
"""Null fields that columnar files add: a struct column has the fields of all rows, so a tool call gets the arguments of
every other tool, as nulls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A list of objects with one of these is a list of messages or tools.
_CHAT_FIELDS = frozenset({"role", "from", "tool_calls", "function", "parameters"})


class NullFields:
    """Leaves null fields out of messages and tools of one columnar file. `note` says so after the first time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.note: str | None = None

    def without(self, values: Mapping[str, Any], place: str) -> dict[str, Any]:
        """The columns of a row. Columns other than messages and tools stay as they are."""
        return {name: self._cleaned(value, place) if _is_chat(value) else value for name, value in values.items()}

    def _cleaned(self, items: list[Any], place: str) -> list[Any]:
        cleaned = []
        for item in items:
            # Fields of a message itself are often empty, as the name of a tool: nothing to mention.
            filled = {key: value for key, value in item.items() if value is not None}
            result = {key: _without_nulls(value) for key, value in filled.items()}
            if self.note is None and result != filled:
                self.note = (
                    f"{self._name}: null fields of tool calls and tools are left out, as columnar files fill each with "
                    f"the fields of all others (first in {place})"
                )
            cleaned.append(result)
        return cleaned


def _is_chat(value: Any) -> bool:
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        return False
    return not _CHAT_FIELDS.isdisjoint(value[0])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
