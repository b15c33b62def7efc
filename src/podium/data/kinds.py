# SPDX-License-Identifier: Apache-2.0
"""Detects the kind of a row (a chat, a prompt with its completion, or raw text), and checks that it is well formed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from podium.data.rows import Row
from podium.errors import BadRowError, type_phrase, what_raised

Kind = Literal["messages", "prompt_completion", "text"]
MapFunction = Callable[[dict[str, Any]], Mapping[str, Any] | None]
Message = dict[str, Any]

_KINDS: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
_EXPECTED = "`messages`, `prompt` with `completion`, or `text`"
_ROLES = ("system", "developer", "user", "assistant", "tool")


def named_values(row: Row, columns: Mapping[str, str], function: MapFunction | None) -> Mapping[str, Any] | None:
    """The row's values after renaming and the `map` plug-in; None if the plug-in drops the row."""
    if row.problem is not None:
        raise BadRowError(row.problem)
    values = dict(row.values)
    for new, old in columns.items():
        if old not in row.values:
            raise BadRowError(
                f"{row.where}: no column {old!r}, which `columns` reads as {new!r}. "
                f"The row has: {_listed(row.values)}. Correct the source's `columns`."
            )
    for old in columns.values():
        values.pop(old, None)
    values.update({new: row.values[old] for new, old in columns.items()})
    if function is None:
        return values
    try:
        mapped = function(values)
    except Exception as error:  # the plug-in is the user's code
        raise BadRowError(
            f"{row.where}: the source's `map` {what_raised(error)}. Fix the function, or let it "
            "return None to drop such a row."
        ) from error
    if mapped is not None and not isinstance(mapped, Mapping):
        raise BadRowError(
            f"{row.where}: the source's `map` returned {type_phrase(mapped)}. It must return a dict with "
            f"{_EXPECTED}, or None to drop the row."
        )
    return mapped


def kind_of(values: Mapping[str, Any], columns: Mapping[str, str], row: Row) -> Kind:
    """The kind of the row. A kind that `columns` names takes precedence over one that the row merely has."""
    present = [kind for kind, names in _KINDS.items() if all(values.get(name) is not None for name in names)]
    if len(present) > 1:
        present = [kind for kind in present if any(name in columns for name in _KINDS[kind])] or present
    if len(present) == 1:
        return present[0]
    if present:
        kinds = " and ".join(name for kind in present for name in _KINDS[kind])
        raise BadRowError(
            f"{row.where}: the row has {kinds} at once, which is ambiguous. It has: "
            f"{_listed(values)}. Keep one kind with the source's `map`, or name one in its `columns`."
        )
    raise BadRowError(
        f"{row.where}: expected {_EXPECTED}, found {_listed(values)}.{_hint(values)} Rename columns with the "
        "source's `columns`, or shape the row with its `map`."
    )


def check_values(values: Mapping[str, Any], columns: Mapping[str, str], row: Row) -> None:
    """Raises an error unless the row is of one kind and well formed; needs no tokenizer."""
    match kind_of(values, columns, row):
        case "messages":
            parse_messages(values["messages"], "messages", row)
            parse_tools(values, row)
        case "prompt_completion":
            parse_prompt_completion(values, row)
        case "text":
            parse_text(values, "text", row)


def parse_text(values: Mapping[str, Any], column: str, row: Row) -> str:
    """The text of a column, which must be a string."""
    value = values[column]
    if not isinstance(value, str):
        raise BadRowError(f"{row.where}: `{column}` must be a string, found {quoted(value)}.")
    return value


def parse_prompt_completion(
    values: Mapping[str, Any], row: Row, *, completion: str = "completion"
) -> tuple[str, str] | tuple[list[Message], list[Message]]:
    """Two strings, or two lists of messages that together are a chat. `completion`: the row's name for it."""
    prompt, said = values["prompt"], values["completion"]
    if isinstance(prompt, str) and isinstance(said, str):
        return prompt, said
    if isinstance(prompt, list | tuple) and isinstance(said, list | tuple):
        return parse_messages(prompt, "prompt", row), parse_messages(said, completion, row)
    raise BadRowError(
        f"{row.where}: `prompt` and `{completion}` must both be strings or both lists of messages, found "
        f"{quoted(prompt)} and {quoted(said)}."
    )


def parse_messages(value: Any, column: str, row: Row) -> list[Message]:
    """The messages without their empty fields (columnar formats fill a field that some message has with null)."""
    if not isinstance(value, list | tuple):
        raise BadRowError(
            f"{row.where}: `{column}` must be a list of {{role, content}}, found {quoted(value)}."
            + (" CSV cannot hold lists; use JSONL or Parquet." if isinstance(value, str) else "")
        )
    if not value:
        raise BadRowError(f"{row.where}: `{column}` is empty. Remove the row, or drop it with the source's `map`.")
    return [_parse_message(message, f"{column}[{index}]", row) for index, message in enumerate(value)]


def _parse_message(message: Any, name: str, row: Row) -> Message:
    if not isinstance(message, Mapping):
        raise BadRowError(f"{row.where}: {name} must be {{role, content}}, found {quoted(message)}.")
    filled = {key: value for key, value in message.items() if value is not None}
    role, content = filled.get("role"), filled.get("content")
    if role is None:
        hint = " Fields `from` and `value` can be rewritten with the source's `map`." if "from" in filled else ""
        raise BadRowError(f"{row.where}: {name} has no `role`, only {_listed(filled)}.{hint}")
    if role not in _ROLES:
        raise BadRowError(
            f"{row.where}: {name}.role is {quoted(role)}; known are {', '.join(_ROLES)}. "
            "Rename it with the source's `map`."
        )
    if isinstance(content, list | tuple | Mapping):
        raise BadRowError(
            f"{row.where}: {name}.content is {type_phrase(content)} of parts; only text is supported. "
            "Give one string, or join the text parts with the source's `map`."
        )
    if content is None and not (role == "assistant" and filled.get("tool_calls")):
        raise BadRowError(f"{row.where}: {name} ({role}) has no `content`. Give a string; it may be empty.")
    if content is not None and not isinstance(content, str):
        raise BadRowError(f"{row.where}: {name}.content must be a string, found {quoted(content)}.")
    return filled


def parse_tools(values: Mapping[str, Any], row: Row) -> list[dict[str, Any]] | None:
    """The row's own tools as JSON schemas: a list, or a JSON string of such a list."""
    tools = values.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRowError(f"{row.where}: `tools` is a string and not valid JSON ({error}).") from error
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRowError(f"{row.where}: `tools` must be a list of JSON schemas, found {quoted(tools)}.")
    return [dict(tool) for tool in tools]


def _hint(values: Mapping[str, Any]) -> str:
    if values.get("prompt") is not None:
        return " There is a `prompt` without `completion`."
    if values.get("completion") is not None:
        return " There is a `completion` without `prompt`."
    if "conversations" in values or "conversation" in values:
        return " A conversation column is read with `columns: {messages: conversations}` if it holds {role, content}."
    return ""


def _listed(values: Mapping[str, Any]) -> str:
    columns = [f"`{name}`" if value is not None else f"`{name}` (null)" for name, value in values.items()]
    return ", ".join(columns) or "nothing"


def quoted(value: Any) -> str:
    """Type and beginning of a value, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
