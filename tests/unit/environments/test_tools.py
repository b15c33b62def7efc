# SPDX-License-Identifier: Apache-2.0
"""Functions as tools: their schemas by hand, arguments refused in words, and failures that stay inside of a call."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import enum
import functools
import re
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from scripted import task
from typing_extensions import TypedDict

from helpers.messages import facts
from podium.environments.chat_format import BadCall, ToolCall
from podium.environments.protocol import Outcome, Turn
from podium.environments.tool_schemas import ArgumentError
from podium.environments.tools import Tool, ToolEnvironment, ToolResult, load_tools, run_tool
from podium.errors import RecipeError


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


def measure(
    what: str, times: int = 1, scale: float = 1.0, unit: Unit = Unit.METRE, mode: Literal["fast", "exact"] = "fast",
    points: list[int] | None = None, options: dict[str, Any] | None = None, quiet: bool = False,
) -> str:  # fmt: skip
    """Measures a thing,
    in a unit.

    And more that the model is not told.

    Args:
        what: the thing; it may
            have a long name
        times (int): how often
        unit: what the result is in

    Returns:
        the length
    """
    return f"{what} {times} {scale} {unit} {mode} {points} {options} {quiet}"


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def test_the_schema_is_read_from_signature_and_docstring() -> None:
    schema = Tool.of(measure).schema
    assert schema == {
        "type": "function",
        "function": {
            "name": "measure",
            "description": "Measures a thing, in a unit.",
            "parameters": {
                "type": "object",
                "properties": {
                    "what": {"type": "string", "description": "the thing; it may have a long name"},
                    "times": {"type": "integer", "description": "how often"},
                    "scale": {"type": "number"},
                    "unit": {"type": "string", "enum": ["m", "ft"], "description": "what the result is in"},
                    "mode": {"type": "string", "enum": ["fast", "exact"]},
                    "points": {"type": "array", "items": {"type": "integer"}, "nullable": True},
                    "options": {"type": "object", "additionalProperties": True, "nullable": True},
                    "quiet": {"type": "boolean"},
                },
                "required": ["what"],
            },
        },
    }


def test_a_tool_without_docstring_or_parameters_is_one_too() -> None:
    def now():  # type: ignore[no-untyped-def]
        return 0

    described = Tool.of(now).schema["function"]
    assert described["description"] == ""
    assert described["parameters"] == {"type": "object", "properties": {}, "required": []}


def test_arguments_come_as_the_types_say() -> None:
    given = {
        "what": "x",
        "times": 2.0,
        "scale": 3,
        "unit": "ft",
        "mode": "exact",
        "points": [1, 2],
        "options": {"k": None},
    }
    assert Tool.of(measure).arguments.validate(given) == {
        "what": "x", "times": 2, "scale": 3.0, "unit": Unit.FOOT, "mode": "exact", "points": [1, 2],
        "options": {"k": None},
    }  # fmt: skip
    assert Tool.of(measure).arguments.validate({"what": "x", "points": None}) == {"what": "x", "points": None}


@pytest.mark.parametrize(
    ("arguments", "paths"),
    [
        ({}, ["what"]),
        ({"what": 5}, ["what"]),
        ({"what": "x", "times": "two"}, ["times"]),
        ({"what": "x", "times": 2.5}, ["times"]),
        ({"what": "x", "times": True}, ["times"]),
        ({"what": "x", "scale": "1"}, ["scale"]),
        ({"what": "x", "scale": float("nan")}, ["scale"]),
        ({"what": "x", "quiet": 1}, ["quiet"]),
        ({"what": "x", "unit": "mile"}, ["unit"]),
        ({"what": "x", "unit": ["m"]}, ["unit"]),
        ({"what": "x", "mode": None}, ["mode"]),
        ({"what": "x", "points": [1, "b"]}, ["points`[1]"]),
        ({"what": "x", "points": "b"}, ["points"]),
        ({"what": "x", "options": []}, ["options"]),
        ({"wat": "x"}, ["what", "wat"]),
    ],
)
def test_each_argument_that_does_not_fit_is_named(arguments: dict[str, Any], paths: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        Tool.of(measure).arguments.validate(arguments)
    problems = str(caught.value).split("; ")
    assert len(problems) == len(paths)
    assert all(f"`{path}" in problem for path, problem in zip(paths, problems, strict=True))


def test_a_refusal_says_what_is_expected_and_what_was_given() -> None:
    def refusal(**arguments: Any) -> str:
        with pytest.raises(ArgumentError) as caught:
            Tool.of(measure).arguments.validate({"what": "x", **arguments})
        return str(caught.value)

    assert re.search(facts("`points`[1] ", "integer", '"b"'), refusal(points=[1, "b"]))
    assert re.search(facts("`unit` ", "'m'", "'ft'", '"mile"'), refusal(unit="mile"))


def test_a_refusal_is_short_whatever_the_model_wrote() -> None:
    arguments = {"points": ["y" * 1000] * 1000, "z" * 100_000: 1, "what": "x" * 100_000, "times": "9" * 100_000}
    with pytest.raises(ArgumentError) as caught:
        Tool.of(measure).arguments.validate(arguments)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("value", [10**5000, functools.reduce(lambda inner, _: [inner], range(5000), 0)], ids=type)
def test_what_cannot_be_written_as_json_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError):
        Tool.of(measure).arguments.validate({"what": "x", "options": {"k": value}})


def test_unions_take_the_first_type_that_fits() -> None:
    def pick(value: int | str, maybe: Optional[int] = None) -> None: ...  # noqa: UP045

    tool = Tool.of(pick)
    assert tool.arguments.schema["properties"]["value"] == {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    assert tool.arguments.validate({"value": "3", "maybe": 4}) == {"value": "3", "maybe": 4}
    with pytest.raises(ArgumentError, match=r"`value` .*integer.* 1\.5; `value` .*string.* 1\.5"):
        tool.arguments.validate({"value": 1.5})
    with pytest.raises(ArgumentError, match=r"`maybe` .*integer.* 1\.5"):
        tool.arguments.validate({"value": 1, "maybe": 1.5})


class Point(TypedDict):
    x: float
    y: float


def test_types_of_pydantic_are_described_without_references() -> None:
    def draw(
        points: list[Point], size: Annotated[int, Field(ge=1, description="in pixels")], first: Unit, second: Unit
    ) -> None: ...

    tool = Tool.of(draw)
    unit = {"type": "string", "enum": ["m", "ft"]}
    assert tool.arguments.schema["properties"] == {
        "points": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
        },
        "size": {"type": "integer", "minimum": 1, "description": "in pixels"},
        "first": unit,
        "second": unit,
    }
    with pytest.raises(ArgumentError, match=r"`points`\[0\]\['y'\] .*; `size` .*\b1\b.*\b0\b"):
        tool.arguments.validate({"points": [{"x": 1, "y": "2"}], "size": 0, "first": "m", "second": "ft"})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(arguments=st.dictionaries(st.sampled_from([*Tool.of(measure).arguments.schema["properties"], "else"]), _JSON))
def test_any_json_is_accepted_or_refused_in_words(arguments: dict[str, Any]) -> None:
    try:
        converted = Tool.of(measure).arguments.validate(arguments)
    except ArgumentError:
        return
    assert converted.keys() == arguments.keys()
    measure(**converted)


def _untyped(value):  # type: ignore[no-untyped-def]
    return value


def _starred(*values: int) -> None: ...


def _strange(value: threading.Event) -> None: ...


class _Tree(TypedDict):
    children: list[_Tree]


def _recursive(value: _Tree) -> None: ...


def _unknown(value: Unheard) -> None: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (_untyped, "_untyped .*'value'"),
        (_starred, r"_starred .*\*"),
        (_strange, r"_strange.*threading\.Event"),
        (_recursive, "_recursive.*recursive type"),
        (_unknown, "_unknown .*'Unheard'"),
    ],
)
def test_functions_that_a_model_cannot_call_are_refused_at_the_start(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Tool.of(function)


def called(
    function: Callable[..., Any], /, timeout_s: float = 10.0, max_chars: int = 100, **arguments: Any
) -> ToolResult:
    return asyncio.run(run_tool(Tool.of(function), arguments, timeout_s=timeout_s, max_chars=max_chars))


def test_text_comes_back_as_it_is_and_the_rest_as_json() -> None:
    async def later(value: str) -> str:
        return value

    def table() -> dict[str, Any]:
        return {"größe": [1, None, True]}

    assert called(later, value="17 × 23") == ToolResult(text="17 × 23", failed=False)
    assert called(table) == ToolResult(text='{"größe": [1, null, true]}', failed=False)
    assert called(add, a=17, b=23) == ToolResult(text="40", failed=False)


class Shade(enum.Enum):
    DARK = "dark"


@dataclasses.dataclass
class Price:
    amount: Decimal
    when: datetime.date


class Reading(BaseModel):
    when: datetime.datetime


class Opaque:
    """Without a text of its own."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float64(0.5), "0.5"),
        (np.arange(3), "[0, 1, 2]"),
        ({"n": np.int64(3), "all": {2, 1}}, '{"n": 3, "all": [1, 2]}'),
        ({"b", "a"}, '["a", "b"]'),
        (Decimal("12.50"), "12.5"),
        (Decimal(3), "3"),
        (Price(amount=Decimal("0.1"), when=datetime.date(2024, 5, 6)), '{"amount": 0.1, "when": "2024-05-06"}'),
        (Reading(when=datetime.datetime(2024, 5, 6, 7)), '{"when": "2024-05-06T07:00:00"}'),
        ([datetime.datetime(2024, 5, 6, 7)], '["2024-05-06T07:00:00"]'),
        (Shade.DARK, '"dark"'),
        ({(1, 2): Path("a")}, '{"[1, 2]": "a"}'),
        (torch.tensor([1.0]), "[1.0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # a set has no fixed repr
)
def test_values_that_json_does_not_have_are_converted(value: Any, text: str) -> None:
    def give() -> Any:
        return value

    assert called(give) == ToolResult(text=text, failed=False)


def test_a_value_without_a_text_is_the_tools_fault_and_names_its_line() -> None:
    def give() -> Any:
        return {"it": Opaque()}

    result = called(give)

    assert result.failed
    assert result.is_tools_fault
    assert "0x" not in result.text
    assert ".py" not in result.text
    assert f"give ({__file__}, line {give.__code__.co_firstlineno})" in str(result.warning)


def test_a_tool_that_returns_nothing_is_warned_of_unless_it_says_so() -> None:
    def forgets(): ...  # type: ignore[no-untyped-def]

    def writes() -> None: ...

    result = called(forgets)
    assert (result.text, result.failed) == ("null", False)
    assert f"forgets ({__file__}, line {forgets.__code__.co_firstlineno})" in str(result.warning)
    assert called(writes).warning is None


def test_a_tool_without_types_names_its_line() -> None:
    def untyped(x): ...  # type: ignore[no-untyped-def]

    with pytest.raises(RecipeError, match=facts("untyped", f"{__file__}, line {untyped.__code__.co_firstlineno}", "x")):
        Tool.of(untyped)


def test_long_results_are_cut() -> None:
    def long() -> str:
        return "x" * 200

    assert called(long, max_chars=5).text == "xxxxx... (cut: 200 characters in all)"


def test_half_an_emoji_comes_back_as_something_that_can_be_read() -> None:
    def echo(text: str) -> str:
        return text

    assert called(echo, text="\ud83d!").text == "?!"


def test_exceptions_and_deadlines_become_error_texts() -> None:
    def divide(a: int, b: int) -> float:
        return a / b

    async def hang() -> None:
        await asyncio.Event().wait()

    released = threading.Event()

    def block() -> None:
        released.wait()

    divided = called(divide, a=1, b=0)
    assert (divided.text, divided.failed) == ("error: ZeroDivisionError: division by zero", True)
    assert re.search(r"^error: hang .*0\.02 s", called(hang, timeout_s=0.02).text)
    assert re.search(r"^error: block .*0\.02 s", called(block, timeout_s=0.02).text)
    assert re.search("^error: .*`b`", called(add, a=1).text)
    released.set()


def step(turn: Turn, **options: Any) -> Outcome:
    async def play() -> Outcome:
        environment = ToolEnvironment([add], **options)
        await environment.reset(task())
        return await environment.step(turn)

    return asyncio.run(play())


def call(name: str = "add", **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, text="")


def test_the_environment_offers_its_tools_and_leaves_the_question_to_the_task() -> None:
    observation = asyncio.run(ToolEnvironment([add]).reset(task()))
    assert observation.messages is None
    assert observation.tools == [Tool.of(add).schema]


def test_calls_of_one_turn_are_answered_in_order() -> None:
    calls = (call(a=1, b=2), BadCall(text="{", why="the call is not valid JSON."), call("sub"), call(a=3, b=4))
    outcome = step(Turn(number=2, text="", calls=calls))
    messages: Any = outcome.messages
    unknown = messages[2].pop("content")
    assert re.search("^error: .*`sub`.*: add", unknown)
    assert messages == [
        {"role": "tool", "content": "3", "tool_call_id": "000200000", "name": "add"},
        {"role": "tool", "content": "error: the call is not valid JSON.", "tool_call_id": "000200001"},
        {"role": "tool", "tool_call_id": "000200002", "name": "sub"},
        {"role": "tool", "content": "7", "tool_call_id": "000200003", "name": "add"},
    ]  # fmt: skip
    assert not outcome.done
    assert outcome.metrics == {"turns": 1.0, "tool_calls": 4.0, "failed_tool_calls": 2.0, "tool_faults": 0.0}


def test_an_answer_without_a_call_ends_the_episode() -> None:
    outcome = step(Turn(number=0, text="391"))
    assert outcome.done
    assert outcome.metrics == {"turns": 1.0}


def test_more_calls_than_allowed_are_refused_one_by_one() -> None:
    outcome = step(Turn(number=0, text="", calls=(call(a=1, b=2),) * 3), max_calls=2)
    first, second, third = (message["content"] for message in outcome.messages)  # type: ignore[index,union-attr]
    assert (first, second) == ("3", "3")
    assert re.search(r"^error: .*\b2 calls", third)


def test_results_can_come_from_the_user_where_the_template_knows_no_tools() -> None:
    outcome = step(Turn(number=0, text="", calls=(call(a=1, b=2),)), role="user")
    assert outcome.messages == [{"role": "user", "content": "3"}]


def test_tools_are_loaded_by_their_paths(tmp_path: Path) -> None:
    file = tmp_path / "sums.py"
    file.write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    (tool,) = load_tools([f"{file}:add"])
    assert tool.function(1, 2) == 3
    with pytest.raises(RecipeError, match=r"^environment\.tools: .*'add'"):
        load_tools([f"{file}:add", f"{file}:add"])
    with pytest.raises(RecipeError, match=r"^environment\.tools\.0: .*'sub'"):
        load_tools([f"{file}:sub"])
    with pytest.raises(RecipeError, match=r"^environment\.tools: "):
        load_tools([])
