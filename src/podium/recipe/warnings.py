# SPDX-License-Identifier: Apache-2.0
"""Warnings about recipes: values that are allowed but seldom intended."""

from __future__ import annotations

from collections.abc import Iterator

from podium.recipe.algorithm import PolicySection
from podium.recipe.plugins import Plugin
from podium.recipe.recipes import OnPolicyRecipe, Recipe


def recipe_warnings(recipe: Recipe) -> list[str]:
    """Each as a sentence with the key."""
    warnings = []
    if recipe.model.lora is not None and recipe.model.init == "random":
        warnings.append("model.lora: an adapter of random weights learns little. Remove model.init, or model.lora.")
    if isinstance(recipe.program, Plugin) and recipe.execution == "controlled" and not recipe.gives_rewards:
        warnings.append("reward: there is none, so step.rewards_N is 0 for every episode of the program.")
    if isinstance(recipe, OnPolicyRecipe) and _ignores_age(recipe):
        warnings.append(
            f"algorithm.correction: there is none, so tokens of weights that are up to {recipe.rollout.staleness} "
            "versions old count as if the newest had sampled them. Learning may suffer. Set it to auto."
        )
    if isinstance(recipe, OnPolicyRecipe) and recipe.sandbox_section.allow_unsafe:
        warnings.append(
            "sandbox.allow_unsafe: where programs cannot be isolated, those that the model writes run with limits "
            "only: they can read your files and use the network."
        )
    if isinstance(recipe, OnPolicyRecipe):
        warnings.extend(_vanishing_weights(recipe))
    return warnings


def _vanishing_weights(recipe: OnPolicyRecipe) -> Iterator[str]:
    correction, keys = recipe.correction, recipe.rollout.truncated_by
    if keys and correction is not None and correction.kind in ("sequence_truncate", "sequence_mask"):
        yield (
            f"algorithm.correction.kind: {correction.kind} multiplies the weights of an episode's tokens. With "
            f"rollout.{keys[0]} each is below 1, so that long episodes count almost nothing. Use token_truncate."
        )


def _ignores_age(recipe: OnPolicyRecipe) -> bool:
    algorithm = recipe.algorithm
    is_uncorrected = recipe.rollout.staleness > 0 and recipe.correction is None
    return is_uncorrected and isinstance(algorithm, PolicySection) and algorithm.ignores_age
