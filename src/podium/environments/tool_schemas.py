# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of Python functions, and arguments checked against them, both by pydantic."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NotRequired, get_type_hints

from pydantic import ConfigDict, Field, PydanticUndefinedAnnotation, PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import ErrorDetails, core_schema
from typing_extensions import TypedDict

from podium.errors import RecipeError, with_place

_PARAMETER = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_MAX_PROBLEMS, _MAX_CHARS = 8, 60


class ArgumentError(Exception):
    """A value does not fit a tool's parameter; the text is for the model."""


class ToolArguments:
    """The arguments of one function: `schema` is their JSON schema, `validate` turns JSON values into Python's."""

    schema: Mapping[str, Any]

    def __init__(self, function: Callable[..., Any], name: str, descriptions: Mapping[str, str]) -> None:
        """Raises a RecipeError for a parameter without a type, or with a type that JSON cannot express."""
        self._name, placed = name, with_place(name, function)
        parameters = inspect.signature(function).parameters
        hints = _hints(function, placed)
        for parameter in parameters.values():
            _require_describable(parameter, placed, hints)
        fields = {each: _field(parameters[each], hints[each], descriptions.get(each)) for each in parameters}
        make_type: Any = TypedDict  # mypy wants the fields written out
        arguments = make_type("arguments", fields)
        arguments.__pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
        try:
            self._adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
            self.schema = _parameters_schema(self._adapter)
        except (PydanticUserError, PydanticUndefinedAnnotation, RecursionError) as error:
            reason = "a recursive type" if isinstance(error, RecursionError) else str(error).splitlines()[0]
            raise RecipeError(
                f"the tool {with_place(f'{name}{inspect.signature(function)}', function)} has a parameter that JSON "
                f"cannot express ({reason}). Use str, int, float, bool, list, dict, Literal, an Enum, a TypedDict, or "
                "an Optional of these."
            ) from error

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as Python values; an ArgumentError names those that do not fit."""
        try:
            # As JSON: there a string may be an Enum and an array a tuple, and strict still refuses "3" for 3.
            text = json.dumps(_integral(arguments), ensure_ascii=False)
            return self._adapter.validate_json(text.encode("utf-8", "replace"))  # half an emoji becomes a "?"
        except ValidationError as error:
            problems = [self._problem(each, arguments) for each in error.errors(include_url=False)]
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"the arguments are not JSON ({error})") from None
        more = [f"{len(problems) - _MAX_PROBLEMS} more problems"] if len(problems) > _MAX_PROBLEMS else []
        raise ArgumentError("; ".join(problems[:_MAX_PROBLEMS] + more))

    def _problem(self, error: ErrorDetails, arguments: Mapping[str, Any]) -> str:
        where = _path(error["loc"], arguments)
        match error["type"]:
            case "json_invalid":
                return _clip(error["msg"])
            case "missing":
                return f"the argument {where} is missing"
            case "extra_forbidden":
                known = ", ".join(f"`{each}`" for each in self.schema["properties"]) or "none"
                return f"there is no argument {where} (arguments of {self._name}: {known})"
            case _:
                message = error["msg"].replace("Input should be", "must be")
                return f"{where} {message}, not {_clip(json.dumps(error['input'], ensure_ascii=False))}"


class _ToolJsonSchema(GenerateJsonSchema):
    """Schemas in the style of transformers for chat templates: without titles and defaults, Optional as `nullable`."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return {**self.generate_inner(schema["schema"]), "nullable": True}

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonSchemaValue:
        return self.literal_schema(core_schema.literal_schema([member.value for member in schema["members"]]))

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        one_of = super().literal_schema(schema)
        values = [one_of["const"]] if "const" in one_of else one_of["enum"]
        return {"type": one_of["type"], "enum": values} if "type" in one_of else {"enum": values}


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(first paragraph, description of each parameter under `Args:`)."""
    description = " ".join(text.strip().partition("\n\n")[0].split())
    if description.startswith(("Args:", "Returns:", "Raises:")):
        description = ""
    descriptions: dict[str, str] = {}
    indent, name = None, None
    for line in _lines_under(text, "Args:"):
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        match = _PARAMETER.match(line.strip())
        if depth <= indent and match:
            name = match[1]
            descriptions[name] = match[2].strip()
        elif name is not None:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return description, descriptions


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


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    annotated = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(annotated, include_extras=True)
    except (NameError, TypeError) as error:
        raise RecipeError(f"the types of the tool {name} cannot be read ({error}). Import what they name.") from error


def _require_describable(parameter: inspect.Parameter, name: str, hints: Mapping[str, Any]) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise RecipeError(
            f"the tool {name} has the parameter {parameter}; a model gives arguments by name. Write every parameter "
            "out, without *, ** and /."
        )
    if parameter.name not in hints:
        raise RecipeError(
            f"the tool {name} has the parameter {parameter.name!r} without a type, so its schema is unknown. Annotate "
            f"it, for instance {parameter.name}: str."
        )


def _field(parameter: inspect.Parameter, hint: Any, description: str | None) -> Any:
    typed = hint if description is None else Annotated[hint, Field(description=description)]
    return typed if parameter.default is inspect.Parameter.empty else NotRequired[typed]


def _parameters_schema(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    schema = adapter.json_schema(schema_generator=_ToolJsonSchema)
    properties = _inlined(schema["properties"], schema.get("$defs", {}))
    return {"type": "object", "properties": properties, "required": schema.get("required", [])}


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema without $ref, which chat templates do not follow; a recursive one raises RecursionError."""
    if isinstance(node, list):
        return [_inlined(each, definitions) for each in node]
    if not isinstance(node, dict):
        return node
    if isinstance(reference := node.get("$ref"), str):
        merged = {**definitions[reference.removeprefix("#/$defs/")], **node}
        return _inlined({key: value for key, value in merged.items() if key not in ("$ref", "title")}, definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}


def _integral(value: Any) -> Any:
    """2.0 as 2, which JSON Schema also calls an integer."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_integral(each) for each in value]
        case Mapping():
            return {name: _integral(each) for name, each in value.items()}
        case _:
            return value


def _path(location: tuple[int | str, ...], value: Any) -> str:
    """`points`[1] for ("points", 1). Pydantic's location also names branches of unions, which are no part of it."""
    path = ""
    for depth, part in enumerate(location):
        if depth == 0:
            path, value = f"`{_clip(str(part))}`", value.get(part)
            continue
        if (isinstance(value, list) and isinstance(part, int)) or (isinstance(value, dict) and part in value):
            path, value = f"{path}[{_clip(repr(part))}]", value[part]  # type: ignore[index]
    return path


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
