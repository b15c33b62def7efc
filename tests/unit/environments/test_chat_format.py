# SPDX-License-Identifier: Apache-2.0
"""Tool calls are found in every common format, malformed ones are distinguished from none, and nothing raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import CHATML, LLAMA, MISTRAL, PLAIN, byte_tokenizer

from podium.environments.chat_format import BadCall, ToolCall, ToolFormat, detect_format, parse_calls

FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3", "mistral", "fenced")
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'


def named(calls: tuple[Any, ...]) -> list[tuple[str, dict[str, Any]]]:
    assert all(isinstance(call, ToolCall) for call in calls), calls
    return [(call.name, dict(call.arguments)) for call in calls]


def only_bad(text: str, form: ToolFormat) -> BadCall:
    (call,) = parse_calls(text, form)
    assert isinstance(call, BadCall)
    return call


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f"Let me see.\n<tool_call>\n{ADD}\n</tool_call>"),
        ("llama3", ADD.replace("arguments", "parameters")),
        ("llama3", "<|python_tag|>" + ADD.replace("arguments", "parameters")),
        ("mistral", f"[TOOL_CALLS][{ADD}]"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "x"]}'),
        ("fenced", f"So:\n```tool_call\n{ADD}\n```\n"),
    ],
)
def test_one_call_is_found(form: ToolFormat, text: str) -> None:
    assert named(parse_calls(text, form)) == [("add", {"a": 1, "b": [2, "x"]})]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call> and <tool_call>{"name": "g"}</tool_call>'),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f"}, {"name": "g"}]'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}"),
        ("fenced", '```tool_call\n{"name": "f"}\n```\n```tool_call\n{"name": "g"}\n```'),
    ],
)
def test_several_calls_keep_their_order(form: ToolFormat, text: str) -> None:
    assert named(parse_calls(text, form)) == [("f", {}), ("g", {})]


def test_a_bad_call_between_good_ones_keeps_its_place() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{oops}</tool_call><tool_call>{"name": "g"}</tool_call>'
    first, second, third = parse_calls(text, "hermes")
    assert isinstance(first, ToolCall)
    assert isinstance(third, ToolCall)
    assert (first.name, third.name) == ("f", "g")
    assert isinstance(second, BadCall)
    assert second.text == "<tool_call>{oops}</tool_call>"
    assert "valid JSON" in second.why
    assert second.why.endswith("character 1.")


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_in_plain_words_calls_nothing(form: ToolFormat) -> None:
    assert parse_calls("The answer is {391}, or [391].", form) == ()
    assert parse_calls("", form) == ()


@pytest.mark.parametrize(
    ("form", "text", "why"),
    [
        ("hermes", f"<tool_call>{ADD}", "not closed"),
        ("hermes", f"<tool_call>{ADD} {ADD}</tool_call>", "only one"),
        ("hermes", "<tool_call></tool_call>", "character 0"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no `name`"),
        ("hermes", '<tool_call>"add"</tool_call>', '"add"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "[1]"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "a=1"}</tool_call>', "a string"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nested"),
        ("llama3", '{"name": "f", "parameters": {', "valid JSON"),
        ("llama3", "<|python_tag|>search.call(query='x')", "<|python_tag|>"),
        ("mistral", '[TOOL_CALLS][{"name": "f"', "valid JSON"),
        ("mistral", "[TOOL_CALLS][]", "empty"),
        ("fenced", f"```tool_call\n{ADD}", "```"),
    ],
)
def test_a_malformed_call_says_why(form: ToolFormat, text: str, why: str) -> None:
    assert why in only_bad(text, form).why


def test_the_end_marker_inside_of_an_argument_does_not_end_the_call() -> None:
    text = '<tool_call>{"name": "write", "arguments": {"text": "</tool_call>"}}</tool_call>'
    assert named(parse_calls(text, "hermes")) == [("write", {"text": "</tool_call>"})]


def test_arguments_written_as_json_inside_of_json_are_read() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert named(parse_calls(text, "hermes")) == [("f", {"a": 1})]


def test_json_without_a_name_is_an_answer_and_not_a_llama_call() -> None:
    assert parse_calls('{"answer": 391}', "llama3") == ()


def test_what_is_only_thought_is_not_called() -> None:
    thought = f"<think>I could <tool_call>{ADD}</tool_call></think>"
    assert parse_calls(thought + "No.", "hermes") == ()
    assert named(parse_calls(thought + '<tool_call>{"name": "g"}</tool_call>', "hermes")) == [("g", {})]
    assert parse_calls(f"<think>cut off <tool_call>{ADD}</tool_call>", "hermes") == ()


@pytest.mark.parametrize(
    ("template", "form"),
    [(CHATML, "hermes"), (LLAMA, "llama3"), (MISTRAL, "mistral"), (PLAIN, "fenced"), (None, "fenced")],
)
def test_the_format_follows_from_the_template(template: str | None, form: ToolFormat) -> None:
    assert detect_format(byte_tokenizer(template)) == form


def test_a_given_format_goes_before_the_templates() -> None:
    assert detect_format(byte_tokenizer(CHATML), "fenced") == "fenced"


_PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```tool_call", "```", "<think>"]
# Without the formats' own marks: a model writes them as special tokens, which text in arguments cannot be.
_TEXT = st.text().filter(lambda text: not any(mark in text for mark in (*_PIECES, "</think>")))
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner),
)


@given(
    name=st.from_regex(r"\A[a-z_]{1,12}\Z"),
    arguments=st.dictionaries(_TEXT, _VALUES),
    form=st.sampled_from(FORMATS),
)
def test_what_is_written_in_a_format_is_read_back(name: str, arguments: dict[str, Any], form: ToolFormat) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    text = {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "llama3": call,
        "mistral": f"[TOOL_CALLS][{call}]",
        "fenced": f"```tool_call\n{call}\n```",
    }[form]
    assert named(parse_calls(text, form)) == [(name, arguments)]


_BROKEN = st.lists(
    st.sampled_from([*_PIECES, "</think>", ADD, "{", "}", '"name"', "[", "]", ";", "\n"]) | st.text(max_size=5)
)


@given(pieces=_BROKEN, form=st.sampled_from(FORMATS))
def test_no_text_raises(pieces: list[str], form: ToolFormat) -> None:
    for call in parse_calls("".join(pieces), form):
        assert isinstance(call, ToolCall) or call.why
