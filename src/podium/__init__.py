# SPDX-License-Identifier: Apache-2.0
"""Podium post-trains language models: one user API over SPMD programs and a single controller."""

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
