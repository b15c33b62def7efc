# SPDX-License-Identifier: Apache-2.0
"""`placement.generator`: over how many devices each generator holds the model. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from podium.recipe.fields import Count, Section
from podium.recipe.policy_mesh import PolicyMeshSection

if TYPE_CHECKING:
    from podium.recipe.recipes import OnPolicyRecipe

KEY = "placement.generator.tensor"


class GeneratorMeshSection(Section):
    """Devices of each generator."""

    tensor: Count = Field(
        1,
        description="Tensor parallelism: so many devices of one node hold each generator's weights and KV cache "
        "together, with layout split or colocated. Divides the devices that generate, the model's attention and "
        "key-value heads, and with the native engine the experts of a mixture.",
    )


def nearest_divisor(asked: int, *numbers: int) -> int:
    """The number that divides all of these and differs from what was asked for by the smallest factor."""
    common = math.gcd(*numbers)
    fits = [size for size in range(1, common + 1) if common % size == 0]
    return min(fits, key=lambda size: (abs(math.log(size / asked)), size))


def generator_rules(recipe: OnPolicyRecipe) -> Iterator[str]:
    """Rules of `placement.generator`."""
    placement = recipe.placement
    size = placement.generator_tensor
    if size == 1:
        return
    if placement.layout == "elastic":
        yield (
            f"{KEY}: with layout elastic each of the learner's devices generates by itself. Set placement.layout to "
            "split or colocated, or remove it."
        )
        return
    learners = placement.policy.tensor if isinstance(placement.policy, PolicyMeshSection) else 1
    if placement.layout == "colocated":
        asked: dict[str, int | None] = {"devices": placement.devices}
        if size % learners and learners % size:
            yield (
                f"{KEY}: {size} and placement.policy.tensor {learners} divide the same devices of one node, and "
                f"neither divides the other. Use {nearest_divisor(size, learners)}."
            )
            return
    else:
        first = placement.rollout_devices or placement.devices // 2
        asked = {"rollout_devices": first, "max_rollout_devices": placement.max_rollout_devices}
    for key, count in asked.items():
        if count is not None and count % size:
            fits = nearest_divisor(size, *(each for each in asked.values() if each is not None))
            yield (
                f"{KEY}: {size} does not divide the {count} devices that generate (placement.{key}). Use {fits}, or "
                f"set placement.{key} to {max(1, round(count / size)) * size}."
            )
            return
    rows = recipe.model.pad_vocab_to
    if recipe.rollout.engine == "native" and rows % size:
        yield (
            f"model.pad_vocab_to: {rows} is no multiple of {KEY} {size}, over which the vocabulary is divided. Use "
            f"{math.lcm(rows, size)}."
        )
