# SPDX-License-Identifier: Apache-2.0
"""Chats as text for people: consoles, samples, and reward functions that ask for the prompt as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from podium.data.kinds import Message


def as_text(messages: Sequence[Message]) -> str:
    """Readable text: a single question as it is; a longer chat with the role of each message."""
    if len(messages) == 1:
        return message_text(messages[0])
    return "\n".join(f"{message['role']}: {message_text(message)}" for message in messages)


def message_text(message: Message) -> str:
    """What a message says, and the tools that it calls: `get_weather({"city": "Paris"})`."""
    calls = [_call_text(call) for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    return " ".join(part for part in (str(message.get("content") or ""), *calls) if part)


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    return f"{function.get('name')}({text})"
