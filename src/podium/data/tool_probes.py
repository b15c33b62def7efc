# SPDX-License-Identifier: Apache-2.0
"""Finds out by rendering whether a chat template writes tool calls and shows tools: a changed tool must change the
text."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium.data.kinds import Message

_CHANGE = "podium_probe"

Render = Callable[[Sequence[Message], list[dict[str, Any]] | None], str | None]
"""Messages and tools -> the rendered text; None if the template refuses them."""


class ToolProbe:
    """Remembers what was found out, so that few chats are rendered again."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: set[tuple[str, object]] = set()

    def hidden_calls(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str | None:
        """Which part of the chat's tool calls the template leaves out: `name` or `arguments`; None if it has all."""
        for index, message in enumerate(messages):
            key = ("calls", bool(message.get("content")))
            if not message.get("tool_calls") or key in self._known:
                continue
            before = self._render(messages, tools)
            for part in ("name", "arguments"):
                changed = [*messages[:index], _with_changed_calls(message, part), *messages[index + 1 :]]
                if changed[index] != message and before is not None and self._render(changed, tools) == before:
                    return part
            self._known.add(key)
        return None

    def hides_tools(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> bool:
        """Whether the prompt says nothing of the tools. It may name them without the template's help."""
        key = ("tools", messages[0].get("role") if messages else None)
        if not tools or key in self._known:
            return False
        before = self._render(messages, tools)
        if before is None or self._render(messages, _changed_tools(tools)) != before:
            self._known.add(key)
            return False
        return not all(_function(tool).get("name", _CHANGE) in before for tool in tools)


def _function(value: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = value.get("function")
    return inner if isinstance(inner, Mapping) else value


def _with_changed_calls(message: Message, part: str) -> Message:
    changed = copy.deepcopy(message)
    for call in changed["tool_calls"]:
        if not isinstance(call, Mapping):
            continue
        function: Any = _function(call)
        value = function.get(part)
        if part == "name" and isinstance(value, str):
            function["name"] = value + _CHANGE
        elif isinstance(value, Mapping):
            function[part] = {**dict.fromkeys(value, _CHANGE), _CHANGE: _CHANGE}
        elif isinstance(value, str):
            function[part] = _changed_json(value)
    return changed


def _changed_json(text: str) -> str:
    """Some templates read arguments that are JSON texts."""
    try:
        value = json.loads(text)
    except ValueError:
        return text + _CHANGE
    return json.dumps({**value, _CHANGE: _CHANGE}) if isinstance(value, dict) else json.dumps(_CHANGE)


def _changed_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    changed = copy.deepcopy(tools)
    for tool in changed:
        function: Any = _function(tool)
        for part in ("name", "description"):
            if isinstance(function.get(part), str):
                function[part] += _CHANGE
    return changed
