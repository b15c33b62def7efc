# SPDX-License-Identifier: Apache-2.0
"""Types of recipe values, and the base class of sections."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    StringConstraints,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

Count = Annotated[int, Strict(), Field(ge=1)]
Switch = Annotated[bool, Strict()]
NonNegative = Annotated[int, Strict(), Field(ge=0)]
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Place = Annotated[Text, AfterValidator(os.path.expanduser)]


def _not_a_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, found {value}")
    return value


Real = Annotated[float, BeforeValidator(_not_a_bool)]


class Shorthand:
    """Marks a value that has a shorter form: `Annotated[..., OneOrMore()]`. A subclass says how it is written in full
    (`in_full`) and which JSON schema the short form has (`short_schema`)."""

    def in_full(self, value: Any) -> Any:
        """The value in its full form; one that is in full already stays as it is."""
        raise NotImplementedError

    def short_schema(self, schema: JsonSchemaValue) -> JsonSchemaValue:
        """JSON schema of the short form, given that of the full one."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Pydantic's hook: the full form is what is validated."""
        return core_schema.no_info_before_validator_function(self.in_full, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Pydantic's hook: both forms match."""
        schema = handler(core)
        return {"anyOf": [self.short_schema(schema), schema]}


@dataclass(frozen=True)
class OneOrMore(Shorthand):
    """A list whose only item may stand alone: `train: FILE` for `train: [FILE]`."""

    not_an_item: tuple[str, ...] = ()  # texts with a meaning of their own, beside the list

    def in_full(self, value: Any) -> Any:
        """A list of one, for an item that stands alone."""
        is_item = isinstance(value, str | Mapping | BaseModel) and value not in self.not_an_item
        return [value] if is_item else value

    def short_schema(self, schema: JsonSchemaValue) -> JsonSchemaValue:
        """The schema of an item."""
        forms = schema.get("anyOf", [schema])
        items: JsonSchemaValue = next(form["items"] for form in forms if form.get("type") == "array")
        return items


class Section(BaseModel):
    """Base of every part of a recipe: frozen, unknown keys forbidden, defaults checked too."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class PathSection(Section):
    """A section that begins with a `path`; a path alone is short for {path: PATH}."""

    @model_validator(mode="before")
    @classmethod
    def in_full(cls, value: Any) -> Any:
        """The section's values, of a path alone too."""
        return {"path": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(core)
        schema = handler.resolve_ref_schema(reference)
        whole = dict(schema)
        schema.clear()
        schema["anyOf"] = [whole, {"type": "string", "minLength": 1}]
        return reference
