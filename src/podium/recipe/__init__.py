# SPDX-License-Identifier: Apache-2.0
"""Frozen pydantic models of a run; torch-free; every cross-field check."""

from podium.recipe.loading import apply_overrides, dump_recipe, load_recipe, parse_recipe
from podium.recipe.schema import (
    CheckpointSection,
    DataSection,
    EvaluationSection,
    GenerationSection,
    ModelSection,
    OptimizerSection,
    PlacementSection,
    Recipe,
    RolloutSection,
    RunSection,
    SourceSection,
)

__all__ = [
    "CheckpointSection",
    "DataSection",
    "EvaluationSection",
    "GenerationSection",
    "ModelSection",
    "OptimizerSection",
    "PlacementSection",
    "Recipe",
    "RolloutSection",
    "RunSection",
    "SourceSection",
    "apply_overrides",
    "dump_recipe",
    "load_recipe",
    "parse_recipe",
]
