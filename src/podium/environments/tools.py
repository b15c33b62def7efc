# SPDX-License-Identifier: Apache-2.0
"""Python functions as tools: their JSON schema, checked calls with a deadline, and the environment that offers them."""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from podium.data.kinds import Message
from podium.data.tasks import Task
from podium.environments.chat_format import Call, ToolCall
from podium.environments.protocol import Observation, Outcome, Turn, call_within
from podium.errors import RecipeError
from podium.recipe import plugins

_NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
_PARAMETER = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


class ArgumentError(Exception):
    """A value does not fit a tool's parameter; the text is for the model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments
    types: Mapping[str, Any]  # annotation of each parameter
    function: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Reads signature and docstring: the first paragraph describes the tool, `Args:` its parameters. A parameter
        without a type, or of one that JSON cannot say, raises a RecipeError."""
        name = getattr(function, "__name__", type(function).__name__)
        description, described = _read_docstring(inspect.getdoc(function) or "")
        hints = _hints(function, name)
        properties: dict[str, Any] = {}
        required: list[str] = []
        for parameter in inspect.signature(function).parameters.values():
            _require_describable(parameter, name, hints)
            schema = _schema(hints[parameter.name], f"{name}({parameter.name})")
            if parameter.name in described:
                schema["description"] = described[parameter.name]
            properties[parameter.name] = schema
            if parameter.default is inspect.Parameter.empty:
                required.append(parameter.name)
        return cls(
            name=name,
            description=description,
            parameters={"type": "object", "properties": properties, "required": required},
            types={each: hints[each] for each in properties},
            function=function,
        )

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates want it."""
        described = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": described}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them; an ArgumentError names everything that does not fit."""
        missing = [name for name in self.parameters["required"] if name not in arguments]
        problems = [f"the argument `{name}` ({_kind(self.types[name])}) is missing" for name in missing]
        converted: dict[str, Any] = {}
        for name, value in arguments.items():
            if name not in self.types:
                known = ", ".join(f"`{each}`" for each in self.types) or "none"
                problems.append(f"there is no argument `{name}` (arguments of {self.name}: {known})")
                continue
            try:
                converted[name] = _converted(value, self.types[name], f"`{name}`")
            except ArgumentError as error:
                problems.append(str(error))
        if problems:
            raise ArgumentError("; ".join(problems))
        return converted


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a call came to, as the model reads it."""

    text: str
    failed: bool


def load_tools(paths: Sequence[str], key: str = "environment.tools") -> list[Tool]:
    """The functions that a recipe names; two of one name are refused, the model could not tell them apart."""
    tools = [Tool.of(plugins.load(path, f"{key}.{index}")) for index, path in enumerate(paths)]
    _require_distinct(tools, key)
    return tools


async def run_tool(tool: Tool, arguments: Mapping[str, Any], *, timeout_s: float, max_chars: int) -> ToolResult:
    """One call. Whatever goes wrong in it becomes a text that begins with `error:`."""
    try:
        found = await call_within(timeout_s, tool.function, **tool.checked(arguments))
        text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
    except ArgumentError as error:
        return _failed(str(error), max_chars)
    except TimeoutError as error:
        return _failed(f"{tool.name} {error or 'timed out'}", max_chars)
    except Exception as error:  # the tool is the user's code
        return _failed(f"{type(error).__name__}: {error}", max_chars)
    return ToolResult(text=_cut(text, max_chars), failed=False)


class ToolEnvironment:
    """The task's own question, and tools that the model may call before it answers.

    Calls of one turn run one after the other, and their results come back as messages in the same order. An answer
    without a call ends the episode. Metrics: turns, tool_calls, failed_tool_calls.
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]],
        *,
        timeout_s: float = 60.0,
        max_chars: int = 8_000,
        max_calls: int = 16,
        role: Literal["tool", "user"] = "tool",
    ) -> None:
        """`max_chars` of a result, `max_calls` of one turn; `role` user for templates that know no tool messages."""
        made = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in tools]
        _require_distinct(made, "environment.tools")
        self._tools = {tool.name: tool for tool in made}
        self._timeout_s, self._max_chars, self._max_calls = timeout_s, max_chars, max_calls
        self._role = role
        # The calls of a turn run one after the other, and each has all of its time.
        self.step_timeout_s = timeout_s * max_calls + 1.0

    async def reset(self, task: Task, /) -> Observation:
        return Observation(tools=[tool.schema for tool in self._tools.values()])

    async def step(self, turn: Turn, /) -> Outcome:
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
            },
        )

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
        """With an id of nine characters, which some templates insist on."""
        message: Message = {"role": self._role, "content": result.text}
        if self._role == "tool":
            message["tool_call_id"] = call_id
            if isinstance(call, ToolCall):
                message["name"] = call.name
        return message


def _failed(why: str, max_chars: int) -> ToolResult:
    return ToolResult(text=_cut(f"error: {why}", max_chars), failed=True)


def _cut(text: str, max_chars: int) -> str:
    # Half an emoji, which a model can put into its arguments as an escape, is no text that a tokenizer reads.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= max_chars else f"{text[:max_chars]}... (cut: {len(text)} characters in all)"


def _require_distinct(tools: Sequence[Tool], key: str) -> None:
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not tools:
        raise RecipeError(f"{key}: no tools. Name at least one function, or leave the section out.")
    if twice:
        raise RecipeError(f"{key}: two tools are called {twice[0]!r}, so a call could mean either. Rename one of them.")


def _require_describable(parameter: inspect.Parameter, name: str, hints: Mapping[str, Any]) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise RecipeError(
            f"the tool {name} has the parameter {parameter}; a model gives arguments by name. Write every parameter "
            "out, without *, ** and /."
        )
    if parameter.name not in hints:
        raise RecipeError(
            f"the tool {name} has the parameter {parameter.name!r} without a type, so the model cannot be told what to "
            f"give. Annotate it, for instance {parameter.name}: str."
        )


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    annotated = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(annotated)
    except (NameError, TypeError) as error:
        raise RecipeError(f"the types of the tool {name} cannot be read ({error}). Import what they name.") from error


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(first paragraph, description of each parameter under `Args:`)."""
    description = " ".join(text.strip().partition("\n\n")[0].split())
    if description.startswith(("Args:", "Returns:", "Raises:")):
        description = ""
    described: dict[str, str] = {}
    indent, name = None, None
    for line in _lines_under(text, "Args:"):
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        found = _PARAMETER.match(line.strip())
        if depth <= indent and found:
            name = found[1]
            described[name] = found[2].strip()
        elif name is not None:
            described[name] = f"{described[name]} {line.strip()}".strip()
    return description, described


def _lines_under(text: str, heading: str) -> Iterator[str]:
    """The indented lines below a heading, up to the next line that is not."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.strip() == heading:
            break
    for line in lines:
        if line.strip() and not line[0].isspace():
            return
        if line.strip():
            yield line


def _schema(annotation: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a parameter's type."""
    if annotation is Any:
        return {}
    if annotation in _NAMES:
        return {"type": _NAMES[annotation]}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _one_of([each.value for each in annotation], where)
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _one_of(list(inner), where)
    if annotation is list or origin is list:
        return {"type": "array", "items": _schema(inner[0], where)} if inner else {"type": "array"}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema(inner[1], where)}
    if origin in (Union, types.UnionType):
        kinds = [each for each in inner if each is not type(None)]
        schema = _schema(kinds[0], where) if len(kinds) == 1 else {"anyOf": [_schema(each, where) for each in kinds]}
        return {**schema, "nullable": True} if len(kinds) < len(inner) else schema
    raise RecipeError(
        f"{where} has the type {annotation!r}, which JSON arguments cannot be turned into. Use str, int, float, bool, "
        "list, dict, Literal, an Enum, or an Optional of these."
    )


def _one_of(values: list[Any], where: str) -> dict[str, Any]:
    kinds = {_NAMES.get(type(value)) for value in values}
    if None in kinds or not values:
        raise RecipeError(f"{where} can be {values!r}; the choices of a tool's parameter are strings or numbers.")
    return {"type": kinds.pop(), "enum": values} if len(kinds) == 1 else {"enum": values}


def _converted(value: Any, annotation: Any, where: str) -> Any:
    """A JSON value as the annotated type, or an ArgumentError."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin in (Union, types.UnionType):
        return _first_that_fits(value, annotation, inner, where)
    if origin is Literal:
        fits = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in inner)
    elif annotation is bool or isinstance(value, bool):  # true is an int to Python, and none to JSON
        fits = annotation is bool and isinstance(value, bool)
    elif annotation is int:
        fits = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        value = int(value) if fits else value
    elif annotation is float:
        fits = isinstance(value, int | float)
        value = float(value) if fits else value
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        members = {each.value: each for each in annotation}
        fits = isinstance(value, str | int | float) and value in members
        value = members[value] if fits else value
    elif annotation is list or origin is list:
        fits = isinstance(value, list)
        if fits and inner:
            return [_converted(each, inner[0], f"{where}[{index}]") for index, each in enumerate(value)]
    elif annotation is dict or origin is dict:
        fits = isinstance(value, dict)
        if fits and inner:
            return {name: _converted(each, inner[1], f"{where}[{name!r}]") for name, each in value.items()}
    else:
        fits = isinstance(value, annotation)
    if not fits:
        raise ArgumentError(f"{where} must be {_kind(annotation)}, not {_shown(value)}")
    return value


def _first_that_fits(value: Any, annotation: Any, kinds: Sequence[Any], where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    wanted = [kind for kind in kinds if kind is not type(None)]
    for kind in wanted:
        try:
            return _converted(value, kind, where)
        except ArgumentError:
            if len(wanted) == 1:  # says more than that nothing fits
                raise
    raise ArgumentError(f"{where} must be {_kind(annotation)}, not {_shown(value)}")


def _kind(annotation: Any) -> str:
    """A type in words that a model knows from schemas."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in _NAMES:
        return f"{'an' if _NAMES[annotation][0] in 'aeiou' else 'a'} {_NAMES[annotation]}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(json.dumps(each.value) for each in annotation)
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(each) for each in inner)
    if annotation is list or origin is list:
        return "an array"
    if origin is dict:
        return "an object"
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(each) for each in inner)
    return "any value"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
