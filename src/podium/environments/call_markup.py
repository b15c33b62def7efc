# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the markup of Qwen3-Coder, GLM, DeepSeek and GPT-OSS: finds them in the text of an answer, in order.
Never raises."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>|\Z))", re.DOTALL)
_PARAMETER_END = "</parameter>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_SPACE = re.compile(r"\s*")
_DEEPSEEK, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_HARMONY_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A call as it stands in the text. `arguments`: their texts by name, or all of them as JSON text. `why`: it cannot
    be read, in words for the model."""

    text: str
    name: str = ""
    arguments: Mapping[str, str] | str = field(default_factory=dict)
    why: str | None = None


def qwen_coder_calls(said: str) -> Iterator[WrittenCall]:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""
    begin = said.find(_FUNCTION)
    while begin >= 0:
        before = said[:begin].rstrip()
        opening = len(before) - len(_CALL) if before.endswith(_CALL) else begin
        head = said.find(">", begin)
        following = said.find(_FUNCTION, begin + 1)
        call = _qwen_coder_call(said, opening, begin, head)
        if call.why is not None and following >= 0:
            call = replace(call, text=said[opening:following])
        yield call
        begin = said.find(_FUNCTION, opening + len(call.text)) if call.why is None else following


def _qwen_coder_call(said: str, opening: int, begin: int, head: int) -> WrittenCall:
    name = said[begin + len(_FUNCTION) : head].strip() if head >= 0 else ""
    if not name or "\n" in name or "<" in name:
        return WrittenCall(text=said[opening:], why=f"a call begins with {_FUNCTION}name>.")
    at, arguments = head + 1, {}
    # What a model never closes is looked for with `find`: a pattern would take minutes for a long answer of such calls.
    while said.find(_PARAMETER_END, at) >= 0 and (found := _PARAMETER.match(said, at)) is not None:
        # The template writes a line break on each side of a value.
        arguments[found[1].strip()] = found[2].removeprefix("\n").removesuffix("\n")
        at = found.end()
    rest = said[at:].lstrip()
    if not rest.startswith(_FUNCTION_END):
        what = "a parameter is not closed" if rest.startswith("<parameter=") else f"{_FUNCTION_END} is missing"
        return WrittenCall(text=said[opening:], why=f"the call of {name} is not closed: {what}.")
    stop = len(said) - len(rest) + len(_FUNCTION_END)
    closed = said[stop:].lstrip()
    if closed.startswith(_CALL_END):
        stop = len(said) - len(closed) + len(_CALL_END)
    return WrittenCall(text=said[opening:stop], name=name, arguments=arguments)


def glm_calls(said: str) -> Iterator[WrittenCall]:
    """`<tool_call>name` and pairs of `<arg_key>` and `<arg_value>`, `</tool_call>`."""
    begin = said.find(_CALL)
    while begin >= 0:
        start = begin + len(_CALL)
        name = re.compile(r"[^<]*").match(said, start)
        assert name is not None
        at, arguments = name.end(), {}
        while (pair := _glm_pair(said, at)) is not None:
            key, value, at = pair
            arguments[key.strip()] = value
        rest = said[at:].lstrip()
        closes = rest.startswith(_CALL_END)
        stop = len(said) - len(rest) + len(_CALL_END) if closes else len(said)
        end = said.find(_CALL, start)
        whole = said[begin:stop] if closes or end < 0 else said[begin:end]
        if not closes:
            why = f"behind the name stand pairs of <arg_key> and <arg_value>, and then {_CALL_END}."
            yield WrittenCall(text=whole, why=why)
        elif not name[0].strip():
            yield WrittenCall(text=whole, why="the call has no name.")
        else:
            yield WrittenCall(text=whole, name=name[0].strip(), arguments=arguments)
        begin = said.find(_CALL, begin + len(whole))


def _glm_pair(said: str, at: int) -> tuple[str, str, int] | None:
    """(key, value, where they end) of a pair that stands here; None: there is none."""
    begin = _behind_space(said, at) + len(_KEY)
    stop = said.find("<", begin)
    if not said.startswith(_KEY, begin - len(_KEY)) or stop < 0 or not said.startswith(_KEY_END, stop):
        return None
    value = _behind_space(said, stop + len(_KEY_END))
    end = said.find(_VALUE_END, value) if said.startswith(_VALUE, value) else -1
    return None if end < 0 else (said[begin:stop], said[value + len(_VALUE) : end], end + len(_VALUE_END))


def _behind_space(said: str, at: int) -> int:
    space = _SPACE.match(said, at)
    assert space is not None, "it matches nothing too"
    return space.end()


def deepseek_calls(said: str) -> Iterator[WrittenCall]:
    """Between marks: `function`, a separator, the name, and a block of JSON (V3, R1); or the name, a separator and JSON
    (V3.1)."""
    for part in said.split(_DEEPSEEK)[1:]:
        inner, closed, _ = part.partition(_DEEPSEEK_END)
        whole = _DEEPSEEK + inner + closed
        first, separated, second = inner.partition(_DEEPSEEK_SEPARATOR)
        if not closed or not separated:
            missing = _DEEPSEEK_SEPARATOR if closed else _DEEPSEEK_END
            yield WrittenCall(text=whole, why=f"the call is not complete: {missing} is missing.")
            continue
        name, arguments = first, second
        if first.strip() == "function":
            name, _, arguments = second.lstrip().partition("\n")
        plain = arguments.strip()
        if plain.startswith(_FENCE):
            plain = plain.removeprefix(_FENCE).removeprefix("json").strip().removesuffix(_FENCE).strip()
        yield WrittenCall(text=whole, name=name.strip(), arguments=plain)


def harmony_calls(said: str) -> Iterator[WrittenCall]:
    """Messages to a recipient `functions.name`, whose body is JSON."""
    for message in harmony_messages(said):
        if message.recipient is not None and message.recipient != "assistant":
            name = message.recipient.removeprefix("functions.")
            yield WrittenCall(text=message.text, name=name, arguments=message.body.strip() or "{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyMessage:
    """One message of an answer. An answer has several: thoughts, calls, and what the user reads."""

    text: str
    channel: str | None
    recipient: str | None
    body: str


def harmony_messages(said: str) -> Sequence[HarmonyMessage]:
    """The messages of an answer with its control tokens. Text without them is one message without a channel."""
    messages, at = [], 0
    while at < len(said):
        head, mark, _ = said[at:].partition("<|message|>")
        if not mark:
            is_cut = head.startswith("<|start|>") or "<|channel|>" in head  # before the message began
            body = _HARMONY_END.sub("", head)
            if body.strip() and not is_cut:
                messages.append(HarmonyMessage(text=said[at:], channel=None, recipient=None, body=body))
            break
        begin = at + len(head) + len(mark)
        end = _HARMONY_END.search(said, begin)
        stop = end.start() if end is not None else len(said)
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        after = stop if end is None or end[0] == "<|start|>" else end.end()
        messages.append(
            HarmonyMessage(
                text=said[at:after],
                channel=channel[1] if channel else None,
                recipient=recipient[1] if recipient else None,
                body=said[begin:stop],
            )
        )
        at = after
    return messages


def harmony_parts(said: str) -> tuple[str, str]:
    """(thoughts, what the user reads) of an answer."""
    messages = [each for each in harmony_messages(said) if each.recipient is None]
    thoughts = "\n".join(each.body for each in messages if each.channel == "analysis")
    return thoughts.strip(), "\n".join(each.body for each in messages if each.channel != "analysis").strip()


def typed_value(raw: str, schema: Any) -> Any:
    """The text of one argument as a value of its JSON schema. Text that is no such value stays text: the tool says what
    is wrong with it. Without a type, JSON if it is JSON."""
    types = _types(schema)
    if not types:
        return _from_json(raw, raw)
    if "string" in types:
        return None if "null" in types and raw.strip() in ("null", "None") else raw
    for kind in types:
        value = _of_type(raw.strip(), kind)
        if value is not _NONE:
            return value
    return raw


_NONE = object()
_WORDS: dict[str, dict[str, Any]] = {
    "boolean": {"true": True, "True": True, "false": False, "False": False},
    "null": {"null": None, "None": None},
}  # fmt: skip
_KINDS: dict[str, type | tuple[type, ...]] = {
    "integer": int, "number": (int, float), "object": dict, "array": list,
}  # fmt: skip


def _of_type(raw: str, kind: str) -> Any:
    if kind in _WORDS:
        return _WORDS[kind].get(raw, _NONE)
    value = _from_json(raw, _NONE)
    if isinstance(value, bool) or not isinstance(value, _KINDS.get(kind, ())):
        is_whole = kind == "integer" and isinstance(value, float) and value.is_integer()
        return int(value) if is_whole else _NONE
    return value


def _types(schema: Any) -> list[str]:
    """The JSON types that a schema allows, those of its alternatives included."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else list(declared) if isinstance(declared, list | tuple) else []
    for name in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(name)
        for each in alternatives if isinstance(alternatives, list | tuple) else ():
            types += _types(each)
    if not types and isinstance(schema.get("enum"), list | tuple) and all(isinstance(v, str) for v in schema["enum"]):
        types = ["string"]
    if types and schema.get("nullable"):
        types.append("null")
    return [each for each in types if isinstance(each, str)]


def _from_json(raw: str, otherwise: Any) -> Any:
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return otherwise


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")
