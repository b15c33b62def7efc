# SPDX-License-Identifier: Apache-2.0
"""Tool calls are found in every common format, malformed ones are distinguished from none, and nothing raises."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import CHATML, DEEPSEEK, GLM, HARMONY, LLAMA, MISTRAL, PLAIN, QWEN_CODER, byte_tokenizer

from podium.environments.call_markup import deepseek_calls, glm_calls, harmony_parts, qwen_coder_calls
from podium.environments.chat_format import BadCall, ToolCall, ToolFormat, detect_format, parse_calls

FORMATS: tuple[ToolFormat, ...] = (
    "hermes", "qwen_coder", "glm", "deepseek", "harmony", "llama3", "mistral", "fenced",
)  # fmt: skip
JSON_FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3", "mistral", "fenced", "deepseek", "harmony")
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'


_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


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
        (
            "qwen_coder",
            "So:\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
            '[2, "x"]\n</parameter>\n</function>\n</tool_call>',
        ),
        (
            "glm",
            "So:\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            '<arg_value>[2, "x"]</arg_value>\n</tool_call>',
        ),
        ("deepseek", _DEEPSEEK.format("add", '{"a": 1, "b": [2, "x"]}')),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 1, "b": [2, "x"]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1, "b": [2, "x"]}<|call|>',
        ),
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": [2, "x"]}'),
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
        ("qwen_coder", "<tool_call><function=f></function></tool_call><tool_call><function=g></function></tool_call>"),
        ("qwen_coder", "<function=f>\n</function>\n<function=g>\n</function>"),
        ("glm", "<tool_call>f</tool_call> <tool_call>g\n</tool_call>"),
        ("deepseek", _DEEPSEEK.format("f", "{}") + _DEEPSEEK.format("g", "{}")),
        ("harmony", "<|start|>assistant to=functions.f<|message|>{}<|call|><|start|>assistant to=g<|message|>{}"),
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
        ("qwen_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>", "a parameter is not closed"),
        ("qwen_coder", "<tool_call><function=f><parameter=a>1</parameter>", "</function> is missing"),
        ("qwen_coder", "<tool_call><function=></function></tool_call>", "name"),
        ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>", "<arg_value>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", "</tool_call>"),
        ("glm", "<tool_call></tool_call>", "no name"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "[1]"),
        ("deepseek", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>", "no `name`"),
        ("harmony", "<|start|>assistant to=functions.f<|message|>{oops}<|call|>", "valid JSON"),
        ("harmony", "<|start|>assistant to=functions.f<|message|>{} {}<|call|>", "nothing behind"),
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
    [
        (CHATML, "hermes"),
        (QWEN_CODER, "qwen_coder"),
        (GLM, "glm"),
        (DEEPSEEK, "deepseek"),
        (HARMONY, "harmony"),
        (LLAMA, "llama3"),
        (MISTRAL, "mistral"),
        (PLAIN, "fenced"),
        (None, "fenced"),
    ],
)
def test_the_format_follows_from_the_template(template: str | None, form: ToolFormat) -> None:
    assert detect_format(byte_tokenizer(template)) == form


def test_a_given_format_goes_before_the_templates() -> None:
    assert detect_format(byte_tokenizer(CHATML), "fenced") == "fenced"


def _tool(**kinds: Any) -> list[dict[str, Any]]:
    properties = {name: kind if isinstance(kind, dict) else {"type": kind} for name, kind in kinds.items()}
    return [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}]


@pytest.mark.parametrize("form", ["qwen_coder", "glm"])
@pytest.mark.parametrize(
    ("raw", "kind", "value"),
    [
        ("7", "string", "7"), ("7", "integer", 7), ("7.0", "integer", 7), ("7.5", "integer", "7.5"), ("7", "number", 7),
        ("7.5", "number", 7.5), ("seven", "integer", "seven"), ("true", "boolean", True), ("False", "boolean", False),
        ("true", "string", "true"), ("[1, 2]", "array", [1, 2]), ("[1, 2]", "string", "[1, 2]"),
        ('{"a": 1}', "object", {"a": 1}), ("[1", "array", "[1"), ("true", "integer", "true"), ("NaN", "number", "NaN"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("null", {"type": ["integer", "null"]}, None), ("5", {"type": ["integer", "null"]}, 5),
        ("x", {"type": ["string", "null"]}, "x"), ("1", {"enum": ["1", "2"]}, "1"), ("1", {}, 1), ("text", {}, "text"),
    ],
)  # fmt: skip
def test_arguments_that_are_text_get_the_types_of_the_tool(form: ToolFormat, raw: str, kind: Any, value: Any) -> None:
    text = {
        "qwen_coder": f"<tool_call>\n<function=f>\n<parameter=x>\n{raw}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{raw}</arg_value>\n</tool_call>",
    }[form]
    ((name, arguments),) = named(parse_calls(text, form, _tool(x=kind)))
    assert (name, arguments) == ("f", {"x": value})
    assert type(arguments["x"]) is type(value)


@given(
    values=st.dictionaries(st.from_regex(r"\A[a-z_]{1,9}\Z"), st.text().filter(lambda text: "<" not in text)),
    form=st.sampled_from(["qwen_coder", "glm"]),
)
def test_texts_come_back_as_they_were_written(values: dict[str, str], form: ToolFormat) -> None:
    pairs = {
        "qwen_coder": "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()),
        "glm": "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()),
    }[form]
    text = f"<tool_call>\n<function=f>\n{pairs}</function>\n</tool_call>"
    text = text if form == "qwen_coder" else f"<tool_call>f\n{pairs}</tool_call>"
    assert named(parse_calls(text, form, _tool(**dict.fromkeys(values, "string")))) == [("f", values)]


def test_a_value_may_hold_the_marks_of_other_parts() -> None:
    code = "if a < b:\n    print('</function>')"
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{code}\n</parameter>\n</function>\n</tool_call>"
    assert named(parse_calls(text, "qwen_coder", _tool(x="string"))) == [("f", {"x": code})]


def test_a_bad_call_of_the_coder_leaves_the_next_one() -> None:
    text = "<tool_call><function=f><parameter=a>1</tool_call><tool_call><function=g></function></tool_call>"
    first, second = parse_calls(text, "qwen_coder")
    assert isinstance(first, BadCall)
    assert isinstance(second, ToolCall)
    assert second.name == "g"


def test_thoughts_and_answers_of_harmony_are_told_apart() -> None:
    said = (
        "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>final<|message|>It is 4."
    )
    assert harmony_parts(said) == ("Two and two.", "I look.\nIt is 4.")
    assert parse_calls(said, "harmony") == ()
    assert harmony_parts("plain words") == ("", "plain words")
    assert harmony_parts("<|channel|>analysis<|message|>cut o") == ("cut o", "")
    assert harmony_parts("<|channel|>ana") == ("", "")


_PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```tool_call", "```", "<think>",
           "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>",
           "</arg_value>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|channel|>",
           "<|message|>", "<|start|>", "<|end|>", "<|call|>", "analysis", " to=functions.f"]  # fmt: skip
# Without the formats' own marks: a model writes them as special tokens, which text in arguments cannot be.
_TEXT = st.text().filter(lambda text: not any(mark in text for mark in (*_PIECES, "</think>")))
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner),
)


@given(
    name=st.from_regex(r"\A[a-z_]{1,12}\Z"),
    arguments=st.dictionaries(_TEXT, _VALUES),
    form=st.sampled_from(JSON_FORMATS),
)
def test_what_is_written_in_a_format_is_read_back(name: str, arguments: dict[str, Any], form: ToolFormat) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    text = {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "llama3": call,
        "mistral": f"[TOOL_CALLS][{call}]",
        "fenced": f"```tool_call\n{call}\n```",
        "deepseek": _DEEPSEEK.format(name, json.dumps(arguments)),
        "harmony": f"<|channel|>commentary to=functions.{name}<|message|>{json.dumps(arguments)}<|call|>",
    }[form]
    assert named(parse_calls(text, form)) == [(name, arguments)]


_BROKEN = st.lists(
    st.sampled_from([*_PIECES, "</think>", ADD, "{", "}", '"name"', "[", "]", ";", "\n"]) | st.text(max_size=5)
)


@given(pieces=_BROKEN, form=st.sampled_from(FORMATS))
def test_no_text_raises(pieces: list[str], form: ToolFormat) -> None:
    for call in parse_calls("".join(pieces), form):
        assert isinstance(call, ToolCall) or call.why


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>a" * 2000,
        "<tool_call>read\n<arg_key>path" * 2000,
        "<tool_call><function=read><parameter=path>a" * 2000,
        "<｜tool▁call▁begin｜>read<｜tool▁sep｜>```json\n{" + " " * 50_000 + "x<｜tool▁call▁end｜>",
    ],
    ids=["values", "keys", "parameters", "fence"],
)
def test_long_answers_of_calls_that_are_never_closed_are_read_at_once(said: str) -> None:
    """A pattern that tries every end at every begin takes minutes, and holds Python's lock for as long."""
    began = time.process_time()
    assert sum(len(list(calls(said))) for calls in (glm_calls, qwen_coder_calls, deepseek_calls)) > 0
    assert time.process_time() - began < 10
