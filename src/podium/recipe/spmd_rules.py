# SPDX-License-Identifier: Apache-2.0
"""Rules about values of programs with fixed data: each gives a sentence with key path, value and fix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from podium.errors import PlacementError

if TYPE_CHECKING:
    from podium.recipe.dense import DistillSection, RewardModelSection
    from podium.recipe.recipes import Recipe, SpmdRecipe


def length_rules(recipe: SpmdRecipe) -> Iterator[str]:
    """Rules of all programs with fixed data: documents fit micro-batches and steps."""
    longest, budget, step = recipe.data.max_length, recipe.micro_batch_tokens, recipe.tokens_per_step
    count = recipe.documents_per_row
    what = "a document" if count == 1 else "a pair of documents"
    if longest is not None and budget is not None and count * longest > budget:
        yield (
            f"data.max_length: {longest} does not fit micro_batch_tokens {budget}; {what} is never cut over two "
            f"micro-batches. Lower data.max_length to {budget // count} or raise micro_batch_tokens to "
            f"{count * longest}."
        )
    if longest is not None and count * longest > step and recipe.rows_per_step is None:
        whose = "" if count == 1 else "of each document of a pair "
        yield (
            f"data.max_length: {longest} {whose}is longer than tokens_per_step {step}. "
            f"Raise tokens_per_step to at least {count * longest}."
        )
    if longest is not None and longest < 2:
        yield f"data.max_length: {longest} leaves no token to predict. Use at least 2."


def mesh_rules(recipe: Recipe) -> Iterator[str]:
    """Rules of all programs: the axes of placement.policy give the devices that train, and allow groups of experts."""
    if recipe.placement.policy == "auto" and recipe.placement.experts > 1:
        yield (
            f"placement.experts: {recipe.placement.experts} needs axes that are known, and placement.policy is auto. "
            "Remove placement.policy (all devices shard), or give its sizes."
        )
    if recipe.placement.policy == "auto" or recipe.placement.training_devices < 1:  # another rule's
        return
    try:
        sizes = recipe.placement.mesh_sizes
    except PlacementError as error:
        yield str(error)
        return
    rows = recipe.model.pad_vocab_to
    if rows % sizes.tensor:
        yield (
            f"model.pad_vocab_to: {rows} is no multiple of placement.policy.tensor {sizes.tensor}, over which the "
            f"vocabulary is divided. Use {math.lcm(rows, sizes.tensor)}."
        )


def reward_model_rules(reward_model: RewardModelSection) -> Iterator[str]:
    """Rules of reward_model."""
    if reward_model.learns == "scores" and reward_model.center:
        yield "reward_model.center: scores say themselves where zero is. Remove it, or set learns to pairs."


def distill_rules(distill: DistillSection) -> Iterator[str]:
    """Rules of distill."""
    if distill.jsd_beta is not None and distill.divergence != "jsd":
        yield f"distill.jsd_beta: {distill.divergence} has none. Remove it, or set distill.divergence to jsd."
    if distill.top_k is not None and distill.targets != "cached":
        yield "distill.top_k: live teachers give their whole distribution. Remove it, or set distill.targets to cached."
