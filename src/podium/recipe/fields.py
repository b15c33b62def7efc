# SPDX-License-Identifier: Apache-2.0
"""The kinds of values that recipes are made of, and the base of their sections."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints

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
