# SPDX-License-Identifier: Apache-2.0
"""Frozen pydantic models of a run; torch-free; every cross-field check."""

from podium.recipe.loading import apply_overrides, dump_recipe, load_recipe, parse_recipe
from podium.recipe.on_policy import (
    AlgorithmSection,
    CorrectionSection,
    CriticSection,
    EnvironmentSection,
    GradingSection,
    KlSection,
    OverlongSection,
    RewardSection,
    TeacherSection,
)
from podium.recipe.pipeline import PipelineRecipe, PipelineRunSection
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
    "AlgorithmSection",
    "CheckpointSection",
    "CorrectionSection",
    "CriticSection",
    "DataSection",
    "EnvironmentSection",
    "EvaluationSection",
    "GenerationSection",
    "GradingSection",
    "KlSection",
    "ModelSection",
    "OptimizerSection",
    "OverlongSection",
    "PipelineRecipe",
    "PipelineRunSection",
    "PlacementSection",
    "Recipe",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "SourceSection",
    "TeacherSection",
    "apply_overrides",
    "dump_recipe",
    "load_recipe",
    "parse_recipe",
]
