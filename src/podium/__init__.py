# SPDX-License-Identifier: Apache-2.0
"""Podium post-trains language models: one user API over SPMD programs and a single controller.

What the package offers is imported when it is first used: a process that only runs a reward function starts in half
the time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podium.api import (
        check,
        compare,
        evaluate,
        export,
        generate,
        init,
        list_runs,
        metrics,
        replay,
        resume,
        show,
        trace,
        train,
        try_recipe,
        verify,
    )
    from podium.errors import PodiumError
    from podium.recipe import PipelineRecipe, Recipe, load_recipe, parse_recipe

__all__ = [
    "PipelineRecipe",
    "PodiumError",
    "Recipe",
    "check",
    "compare",
    "evaluate",
    "export",
    "generate",
    "init",
    "list_runs",
    "load_recipe",
    "metrics",
    "parse_recipe",
    "replay",
    "resume",
    "show",
    "trace",
    "train",
    "try_recipe",
    "verify",
]
_ELSEWHERE = {
    "PipelineRecipe": "podium.recipe",
    "PodiumError": "podium.errors",
    "Recipe": "podium.recipe",
    "load_recipe": "podium.recipe",
    "parse_recipe": "podium.recipe",
}

if not TYPE_CHECKING:  # else every name would be one

    def __getattr__(name: str) -> object:
        """A name of `__all__`, or a module of the package."""
        if name in __all__:
            found = getattr(import_module(_ELSEWHERE.get(name, "podium.api")), name)
            globals()[name] = found
            return found
        missing = AttributeError(f"module 'podium' has no attribute {name!r}")
        if name.startswith("_"):
            raise missing
        try:
            return import_module(f"podium.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"podium.{name}":
                raise
            raise missing from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
