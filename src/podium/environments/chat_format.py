# SPDX-License-Identifier: Apache-2.0
"""Parses tool calls out of the text of an answer, in the common formats and in order. Never raises."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never

from podium.environments.call_markup import (
    WrittenCall,
    deepseek_calls,
    glm_calls,
    harmony_calls,
    qwen_coder_calls,
    typed_value,
)

ToolFormat = Literal["hermes", "qwen_coder", "glm", "deepseek", "harmony", "llama3", "mistral", "fenced"]

_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_LIST = "[TOOL_CALLS]"
_PYTHON = "<|python_tag|>"
_FENCE, _FENCE_END = "```tool_call", "```"
_NAMED_LIST = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the model wrote it. The arguments are JSON; the tool validates them."""

    name: str
    arguments: Mapping[str, Any]
    text: str  # the part of the answer that is this call


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCall:
    """A call that cannot be parsed. `why` is a sentence for the model."""

    text: str
    why: str


Call = ToolCall | BadCall


def detect_format(tokenizer: Any, chosen: ToolFormat | None = None) -> ToolFormat:
    """The format that the tokenizer's chat template uses, or the given one; a fenced block if it has none."""
    if chosen is not None:
        return chosen
    template = _template_text(tokenizer)
    if "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek"
    if "<function=" in template:
        return "qwen_coder"
    if "<arg_key>" in template:
        return "glm"
    if _LIST in template:
        return "mistral"
    if _TAG in template:
        return "hermes"
    if _PYTHON in template or ("ipython" in template and "parameters" in template):
        return "llama3"
    return "fenced"


def parse_calls(text: str, form: ToolFormat, tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[Call, ...]:
    """The calls of one answer, in order. Text up to `</think>` is reasoning, and calls in it do not count. `tools`: for
    formats whose arguments are text, which their schemas give types."""
    said = _behind_thoughts(text)
    match form:
        case "qwen_coder":
            return tuple(_read(qwen_coder_calls(said), tools))
        case "glm":
            return tuple(_read(glm_calls(said), tools))
        case "deepseek":
            return tuple(_read(deepseek_calls(said), tools))
        case "harmony":
            return tuple(_read(harmony_calls(said), tools))
        case "hermes":
            return tuple(_enclosed(said, _TAG, _TAG_END))
        case "fenced":
            return tuple(_enclosed(said, _FENCE, _FENCE_END))
        case "mistral":
            return tuple(_listed(said))
        case "llama3":
            return tuple(_bare(said))
        case other:
            assert_never(other)


def _template_text(tokenizer: Any) -> str:
    """The template's text. If a tokenizer has several named templates, the one for tools counts."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    return str(tokenizer.get_chat_template(None, [{}]))


def _behind_thoughts(text: str) -> str:
    thoughts, closed, said = text.partition("</think>")
    if closed:
        return said
    return "" if thoughts.lstrip().startswith("<think>") else text


def _read(written: Iterable[WrittenCall], tools: Sequence[Mapping[str, Any]] | None) -> Iterator[Call]:
    """Written calls with their arguments as values."""
    for call in written:
        if call.why is not None:
            yield BadCall(text=call.text, why=call.why)
        elif not isinstance(call.arguments, str):
            kinds = _parameters(tools, call.name)
            values = {name: typed_value(raw, kinds.get(name)) for name, raw in call.arguments.items()}
            yield ToolCall(name=call.name, arguments=values, text=call.text)
        else:
            value, end, why = _read_json(call.arguments, 0)
            if why is None and call.arguments[end:].strip():
                why = "one JSON object is expected, and nothing behind it."
            if why is not None:
                yield BadCall(text=call.text, why=why)
            else:
                yield _call_of({"name": call.name, "arguments": value}, call.text)


def _parameters(tools: Sequence[Mapping[str, Any]] | None, name: str) -> Mapping[str, Any]:
    """The schemas of a tool's parameters by name."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            kinds = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return kinds if isinstance(kinds, Mapping) else {}
    return {}


def _enclosed(text: str, opening: str, closing: str) -> Iterator[Call]:
    """Calls between markers: one object each, or a list of them."""
    begin = text.find(opening)
    while begin >= 0:
        start = begin + len(opening)
        value, end, why = _read_json(text, start)
        closed = text.find(closing, end if why is None else start)
        stop = len(text) if closed < 0 else closed + len(closing)
        whole = text[begin:stop]
        if closed < 0:
            yield BadCall(text=whole, why=f"the call is not closed: {closing} is missing.")
        elif why is not None:
            yield BadCall(text=whole, why=why)
        elif text[end:closed].strip():
            yield BadCall(text=whole, why=f"only one JSON value may stand between {opening} and {closing}.")
        else:
            yield from _calls_of(value, whole)
        begin = text.find(opening, stop)


def _listed(text: str) -> Iterator[Call]:
    """After the marker: a list of calls, or (newer models) a name and its arguments, each with its own marker."""
    for part in text.split(_LIST)[1:]:
        whole = _LIST + part
        named = _NAMED_LIST.match(part)
        value, end, why = _read_json(part, named.end() if named else 0)
        if why is not None:
            yield BadCall(text=whole, why=why)
        elif named:
            yield _call_of({"name": named[1], "arguments": value}, _LIST + part[:end])
        else:
            yield from _calls_of(value, _LIST + part[:end])


def _bare(text: str) -> Iterator[Call]:
    """Whole answers that are JSON objects with a name, separated by `;` or white space; after the python tag,
    regardless of other text."""
    _, tagged, code = text.partition(_PYTHON)
    rest = (code if tagged else text).strip()
    if tagged and not rest.startswith("{"):
        yield BadCall(text=text, why=f"behind {_PYTHON} a JSON object with `name` and `parameters` is expected.")
    while rest.startswith("{"):
        value, end, why = _read_json(rest, 0)
        if why is not None:
            if tagged or '"name"' in rest:
                yield BadCall(text=rest, why=why)
            return
        if not tagged and isinstance(value, Mapping) and "name" not in value:  # an answer that is JSON, and no call
            return
        yield _call_of(value, rest[:end])
        rest = rest[end:].lstrip("; \t\r\n").removeprefix(_PYTHON).lstrip()


def _calls_of(value: Any, text: str) -> Iterator[Call]:
    if isinstance(value, list):
        for each in value:
            yield _call_of(each, json.dumps(each, ensure_ascii=False))
        if not value:
            yield BadCall(text=text, why="the list of calls is empty.")
    else:
        yield _call_of(value, text)


def _call_of(value: Any, text: str) -> Call:
    if not isinstance(value, Mapping):
        return BadCall(text=text, why=f"a call is a JSON object with `name` and `arguments`, not {_clipped(value)}.")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return BadCall(text=text, why="the call has no `name`, which must be a string.")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write the arguments as JSON inside of JSON
        arguments, end, why = _read_json(whole := arguments, 0)
        if why is not None or whole[end:].strip():
            return BadCall(text=text, why=f"the arguments of {name} are a string; give a JSON object.")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return BadCall(text=text, why=f"the arguments of {name} must be a JSON object, not {_clipped(arguments)}.")
    return ToolCall(name=name, arguments=dict(arguments), text=text)


def _read_json(text: str, start: int) -> tuple[Any, int, str | None]:
    """(value, where it ends, None), or (None, start, why not)."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        return None, start, f"the call is not valid JSON: {error.msg} at character {error.pos - begin}."
    except (ValueError, RecursionError) as error:  # NaN, a number of thousands of digits, brackets without end
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return None, start, f"the call is not valid JSON: {said}."
    return value, end, None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _clipped(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
