# SPDX-License-Identifier: Apache-2.0
"""Selects the class for a recipe's values by `program`, and for a custom program by `signal`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from podium.errors import ProgramError
from podium.recipe.migration_programs import ProgramHint, guessed_program, program_hint
from podium.recipe.plugins import Plugin
from podium.recipe.recipes import (
    CustomOnPolicyRecipe,
    CustomSpmdRecipe,
    DistillRecipe,
    DpoRecipe,
    ExpertIterationRecipe,
    GrpoRecipe,
    OnPolicyDistillRecipe,
    PpoRecipe,
    Recipe,
    RewardModelRecipe,
    SftRecipe,
)

BUILT_IN: Mapping[str, type[Recipe]] = {
    "sft": SftRecipe,
    "dpo": DpoRecipe,
    "reward_model": RewardModelRecipe,
    "distill": DistillRecipe,
    "grpo": GrpoRecipe,
    "ppo": PpoRecipe,
    "on_policy_distill": OnPolicyDistillRecipe,
    "expert_iteration": ExpertIterationRecipe,
}
CUSTOM: Mapping[str, type[Recipe]] = {"fixed": CustomSpmdRecipe, "on_policy": CustomOnPolicyRecipe}


def _tag(value: Any) -> str | None:
    if isinstance(value, Recipe):
        return type(value).__name__
    kind = recipe_class(value) if isinstance(value, Mapping) else None
    return None if kind is None else kind.__name__


AnyRecipe = Annotated[
    Annotated[SftRecipe, Tag("SftRecipe")]
    | Annotated[DpoRecipe, Tag("DpoRecipe")]
    | Annotated[RewardModelRecipe, Tag("RewardModelRecipe")]
    | Annotated[DistillRecipe, Tag("DistillRecipe")]
    | Annotated[GrpoRecipe, Tag("GrpoRecipe")]
    | Annotated[PpoRecipe, Tag("PpoRecipe")]
    | Annotated[OnPolicyDistillRecipe, Tag("OnPolicyDistillRecipe")]
    | Annotated[ExpertIterationRecipe, Tag("ExpertIterationRecipe")]
    | Annotated[CustomSpmdRecipe, Tag("CustomSpmdRecipe")]
    | Annotated[CustomOnPolicyRecipe, Tag("CustomOnPolicyRecipe")],
    Discriminator(_tag),
]
"""A recipe of any program."""


def wrong_kind(program: str, signal: Literal["fixed", "on_policy"]) -> ProgramError:
    """The error for a custom program whose function does not fit its signal."""
    if signal == "on_policy":
        return ProgramError(
            f"program: {program} is not an async function, and with signal on_policy the controller awaits the "
            "program. Write `async def`, or set signal to fixed for a program that every rank runs."
        )
    return ProgramError(
        f"program: {program} is an async function, which a controller runs. With signal fixed every rank runs the "
        "program as a plain function. Write `def` instead of `async def`, or set signal to on_policy."
    )


def recipe_class(values: Mapping[str, Any]) -> type[Recipe] | None:
    """The class of the program that the values name; None: they name none, and `program_problem` gives the reason."""
    program, signal = values.get("program"), values.get("signal")
    if isinstance(program, str) and program in BUILT_IN:
        return BUILT_IN[program]
    if Plugin.has_shape(program) and isinstance(signal, str):
        return CUSTOM.get(signal)
    return None


def likely_program(values: Mapping[str, Any]) -> str | None:
    """The program that is most likely meant by values without a class: by its name in another project, or without a
    name by keys of other projects. None: nothing tells."""
    program = values.get("program")
    if program is None:
        return guessed_program(values)
    hint = None if Plugin.has_shape(program) else program_hint(str(program), BUILT_IN)
    return None if hint is None else hint.program


def program_problem(values: Mapping[str, Any]) -> str:
    """Why the values have no class."""
    program = values.get("program")
    if program is None:
        guess = guessed_program(values)
        likely = "" if guess is None else f"By the other keys it is most likely `program: {guess}`. "
        return (
            f"program: required, and missing. {likely}There are {', '.join(BUILT_IN)}; a custom one is "
            "file.py:function."
        )
    if Plugin.has_shape(program):
        both = "fixed (every rank runs it, on data that is known) or on_policy (a controller runs it, and generates)"
        if values.get("signal") is None:
            return f"signal: required, and missing. A custom program says {both}."
        return f"signal: {values['signal']!r} is not a signal. A custom program says {both}."
    hint = program_hint(str(program), BUILT_IN)
    near = difflib.get_close_matches(str(program), BUILT_IN, n=1, cutoff=0.6)
    guess = _instead(hint) if hint is not None else f"Did you mean {near[0]}? " if near else ""
    return (
        f"program: {program!r} is not a program. {guess}There are {', '.join(BUILT_IN)}; a custom one is "
        "file.py:function."
    )


def _instead(hint: ProgramHint) -> str:
    """What to write for the name of another project's method or trainer."""
    keys = " and ".join(f"`{key}: {value}`" for key, value in hint.keys.items())
    return f"Write `program: {hint.program}`{f' with {keys}' if keys else ''}. "
