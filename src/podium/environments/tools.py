# SPDX-License-Identifier: Apache-2.0
"""Python functions as tools: calls with a deadline, and the environment that offers them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from podium.data.kinds import Message
from podium.data.tasks import Task
from podium.environments.chat_format import Call, ToolCall
from podium.environments.given_up import joined, notes_of
from podium.environments.protocol import Observation, Outcome, Turn, call_within
from podium.environments.tool_results import ToolResultError, result_text
from podium.environments.tool_schemas import ArgumentError, ToolArguments, read_docstring
from podium.errors import RecipeError, what_raised, with_place
from podium.recipe import plugins

# Metric: calls that failed by the tool's own fault, not the model's.
FAULTS = "tool_faults"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    arguments: ToolArguments
    function: Callable[..., Any]
    returns_nothing: bool = False  # annotated with -> None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Reads signature and docstring: the first paragraph describes the tool, `Args:` its parameters. Raises a
        RecipeError for a parameter without a type, or with a type that JSON cannot express."""
        name = getattr(function, "__name__", type(function).__name__)
        description, descriptions = read_docstring(inspect.getdoc(function) or "")
        arguments = ToolArguments(function, name, descriptions)
        returned = inspect.signature(function).return_annotation
        return cls(
            name=name, description=description, arguments=arguments, function=function,
            returns_nothing=returned in (None, "None"),
        )  # fmt: skip

    @property
    def schema(self) -> dict[str, Any]:
        """The schema in the format of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.arguments.schema)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a call, as the model reads it."""

    text: str
    failed: bool
    warning: str | None = None  # what is wrong with the tool and where, for the person who runs it
    is_tools_fault: bool = False  # it raised, or returned a value without a text; else the call was wrong


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ToolClass:
    """A class whose public methods are tools. Each episode has its own instance, which may hold state. Its methods
    `reset(task)` and `close()`, if it has them, are called at the beginning and at the end, and are no tools."""

    kind: type
    tools: tuple[Tool, ...]  # of the class: their functions are not bound yet

    @classmethod
    def of(cls, kind: type, key: str) -> ToolClass:
        """Reads the methods of a class. Raises a RecipeError if it cannot be made without arguments."""
        try:
            inspect.signature(kind).bind()
        except TypeError as error:
            raise RecipeError(
                f"{key}: {kind.__name__} cannot be made without arguments ({error}). Each episode makes one; "
                "`reset(task)` gets the row."
            ) from error
        names = [name for name in dir(kind) if not name.startswith("_") and name not in ("reset", "close")]
        instance: Any = object.__new__(kind)  # bound methods have no `self` in their signature
        methods = [getattr(instance, name) for name in names if inspect.isroutine(getattr(kind, name))]
        return cls(kind=kind, tools=tuple(Tool.of(method) for method in methods))

    def bound_to(self, instance: Any) -> list[Tool]:
        """The tools of one episode."""
        return [replace(tool, function=getattr(instance, tool.name)) for tool in self.tools]


def load_tools(paths: Sequence[str], key: str = "environment.tools") -> list[Tool | ToolClass]:
    """The functions and classes that a recipe names. Duplicate names raise a RecipeError."""
    loaded: list[Tool | ToolClass] = []
    for index, path in enumerate(paths):
        plugin = plugins.load(path, f"{key}.{index}")
        loaded.append(ToolClass.of(plugin, f"{key}.{index}") if isinstance(plugin, type) else Tool.of(plugin))
    _require_distinct(all_tools(loaded), key)
    return loaded


def all_tools(loaded: Sequence[Tool | ToolClass]) -> list[Tool]:
    """The tools of functions and classes, in order."""
    return [tool for each in loaded for tool in (each.tools if isinstance(each, ToolClass) else (each,))]


async def run_tool(tool: Tool, arguments: Mapping[str, Any], *, timeout_s: float, max_chars: int) -> ToolResult:
    """Runs one call. A failure becomes a text that begins with `error:`."""
    try:
        result = await call_within(timeout_s, tool.function, **tool.arguments.validate(arguments))
    except ArgumentError as error:
        return _failed(str(error), max_chars)
    except TimeoutError as error:
        failed, notes = _failed(f"{tool.name} {error or 'timed out'}", max_chars), notes_of(error)
        return replace(failed, warning=joined(f"the tool {tool.name} {error}", *notes)) if notes else failed
    except Exception as error:  # the tool is the user's code
        failed = _failed(f"{type(error).__name__}: {error}", max_chars)
        return replace(failed, warning=f"the tool {tool.name} {what_raised(error)}", is_tools_fault=True)
    named = with_place(f"the tool {tool.name}", tool.function)
    try:
        text = result_text(result)
    except ToolResultError as error:
        return replace(_failed(str(error), max_chars), warning=f"{named}: {error}", is_tools_fault=True)
    except Exception as error:  # methods of the result are the user's code too
        failed = _failed(f"{type(error).__name__}: {error}", max_chars)
        return replace(failed, warning=f"the text of what {named} returned {what_raised(error)}", is_tools_fault=True)
    warning = None
    if result is None and not tool.returns_nothing:
        warning = f"{named} returned None, which the model reads as null. Return a text, or annotate it with -> None"
    return ToolResult(text=_cut(text, max_chars), failed=False, warning=warning)


class ToolEnvironment:
    """The task's own prompt, and tools that the model may call before it answers.

    Calls of one turn run one after the other, and their results come back as messages in the same order. An answer
    without a call ends the episode. Metrics: turns, tool_calls, failed_tool_calls, tool_faults."""

    def __init__(
        self,
        tools: Sequence[Tool | ToolClass | Callable[..., Any]],
        *,
        timeout_s: float = 60.0,
        max_chars: int = 8_000,
        max_calls: int = 16,
        role: Literal["tool", "user"] = "tool",
    ) -> None:
        """`max_chars` of a result, `max_calls` of one turn; `role` user for templates without tool messages."""
        self._instances: list[Any] = []
        loaded: list[Tool] = []
        for each in tools:
            if isinstance(each, ToolClass):
                self._instances.append(each.kind())
                loaded += each.bound_to(self._instances[-1])
            else:
                loaded.append(each if isinstance(each, Tool) else Tool.of(each))
        _require_distinct(loaded, "environment.tools")
        self._tools = {tool.name: tool for tool in loaded}
        self._timeout_s, self._max_chars, self._max_calls = timeout_s, max_chars, max_calls
        self._role = role
        if self._instances:
            self.close = self._close  # only then: closing costs a call for every episode
        # The calls of a turn run one after the other, and each has its full timeout.
        self.step_timeout_s = timeout_s * max_calls + 1.0

    async def reset(self, task: Task, /) -> Observation:
        """Offers the tools; the prompt is the task's own."""
        for instance in self._instances:
            if callable(getattr(instance, "reset", None)):
                await call_within(self._timeout_s, instance.reset, task)
        return Observation(tools=[tool.schema for tool in self._tools.values()])

    async def step(self, turn: Turn, /) -> Outcome:
        """Runs the calls of the turn; a turn without a call ends the episode."""
        if not turn.calls:
            return Outcome(done=True, metrics={"turns": 1.0})
        results = [await self._answered(call, index) for index, call in enumerate(turn.calls)]
        return Outcome(
            messages=[
                self._message(call, result, f"{turn.number:04d}{index:05d}")
                for index, (call, result) in enumerate(zip(turn.calls, results, strict=True))
            ],
            metrics={
                "turns": 1.0,
                "tool_calls": float(len(results)),
                "failed_tool_calls": float(sum(result.failed for result in results)),
                FAULTS: float(sum(result.is_tools_fault for result in results)),
            },
            warnings=[result.warning for result in results if result.warning is not None],
        )

    async def _close(self) -> None:
        for instance in self._instances:
            if callable(getattr(instance, "close", None)):
                await call_within(self._timeout_s, instance.close)

    async def _answered(self, call: Call, index: int) -> ToolResult:
        if index >= self._max_calls:
            return _failed(f"at most {self._max_calls} calls in one turn.", self._max_chars)
        if not isinstance(call, ToolCall):
            return _failed(call.why, self._max_chars)
        tool = self._tools.get(call.name)
        if tool is None:
            return _failed(f"there is no tool `{call.name}`; there are: {', '.join(self._tools)}.", self._max_chars)
        return await run_tool(tool, call.arguments, timeout_s=self._timeout_s, max_chars=self._max_chars)

    def _message(self, call: Call, result: ToolResult, call_id: str) -> Message:
        """A message with an id of nine characters, which some templates require."""
        message: Message = {"role": self._role, "content": result.text}
        if self._role == "tool":
            message["tool_call_id"] = call_id
            if isinstance(call, ToolCall):
                message["name"] = call.name
        return message


def _failed(why: str, max_chars: int) -> ToolResult:
    return ToolResult(text=_cut(f"error: {why}", max_chars), failed=True)


def _cut(text: str, max_chars: int) -> str:
    # Half an emoji, which a model can write as an escape in its arguments, cannot be tokenized.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= max_chars else f"{text[:max_chars]}... (cut: {len(text)} characters in all)"


def _require_distinct(tools: Sequence[Tool], key: str) -> None:
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not tools:
        raise RecipeError(f"{key}: no tools. Name at least one function, or leave the section out.")
    if twice:
        raise RecipeError(f"{key}: two tools are called {twice[0]!r}, so a call could mean either. Rename one of them.")
