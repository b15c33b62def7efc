# SPDX-License-Identifier: Apache-2.0
"""Compares message histories: what a client sends back against what the gateway has returned.

Clients return an assistant message changed: white space trimmed, reasoning dropped, ids renamed, arguments serialised
again. All of these count as the same message. Any other change is a different history."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from podium.data.kinds import Message
from podium.data.masks import Tools


def history_keys(messages: Sequence[Message], tools: Tools) -> list[bytes]:
    """Keys of the empty history, of the first message, of the first two, and so on. Equal keys: equal histories."""
    keys = [_digest(b"", ["tools", tools or []])]
    for message in messages:
        keys.append(extended_key(keys[-1], message))
    return keys


def extended_key(key: bytes, message: Message) -> bytes:
    """The key of a history with one message more."""
    return _digest(key, _essence(message))


def answer_keys(key: bytes, answer: Message) -> set[bytes]:
    """Keys of a history with an answer of the gateway, in every form in which clients return it. Some of them drop
    the text beside tool calls."""
    keys = {extended_key(key, answer)}
    if answer.get("tool_calls"):
        keys.add(extended_key(key, {**answer, "content": ""}))
    return keys


def likeness(returned: Message, recorded: Message) -> int:
    """How literally a client has returned an answer, to choose between answers that say the same."""
    same_text = (returned.get("content") or "") == (recorded.get("content") or "")
    same_thought = bool(recorded.get("reasoning_content")) and (
        returned.get("reasoning_content") == recorded["reasoning_content"]
    )
    ids = [[call.get("id") for call in message.get("tool_calls") or ()] for message in (returned, recorded)]
    same_ids = bool(ids[1]) and ids[0] == ids[1]
    return 4 * same_ids + 2 * same_thought + same_text


def without_thoughts(text: str) -> str:
    """The text of an answer after its reasoning."""
    return text.rpartition("</think>")[2]


def _essence(message: Message) -> list[Any]:
    role, content = message["role"], message.get("content") or ""
    if role != "assistant":
        return [role, content, message.get("name")]
    said = " ".join(without_thoughts(content).split())
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [role, said, [[call.get("name"), _arguments(call.get("arguments"))] for call in calls]]


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value if value is not None else {}
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return " ".join(value.split())
    return parsed if isinstance(parsed, Mapping) else value


def _digest(key: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(key + text.encode()).digest()
