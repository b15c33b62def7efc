# SPDX-License-Identifier: Apache-2.0
"""Types of recipe values, and the base class of sections."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    Strict,
    StringConstraints,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

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


class Section(BaseModel):
    """Base of every part of a recipe: frozen, unknown keys forbidden, defaults checked too."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class CheckpointSource(Section):
    """A section that begins with a checkpoint's `path`; a path alone is short for {path: PATH}."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(core)
        schema = handler.resolve_ref_schema(reference)
        whole = dict(schema)
        schema.clear()
        schema["anyOf"] = [whole, {"type": "string", "minLength": 1}]
        return reference
