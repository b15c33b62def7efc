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
        "together. Divides the devices that generate, those that are lent too, the model's attention and key-value "
        "heads, and with the native engine the experts of a mixture.",
    )


def nearest_divisor(asked: int, *numbers: int) -> int:
    """The number that divides all of these (0: any does) and differs from what was asked for by the smallest factor."""
    common = math.gcd(*numbers)
    fits = [size for size in range(1, common + 1) if common % size == 0]
    return min(fits, key=lambda size: (abs(math.log(size / asked)), size))


def _nearest(count: int, size: int) -> int:
    """The multiple of a size that is nearest to a number of devices."""
    return max(1, round(count / size)) * size


def generator_rules(recipe: OnPolicyRecipe) -> Iterator[str]:
    """Rules of `placement.generator`."""
    placement = recipe.placement
    size = placement.generator_tensor
    if size == 1:
        return
    learners = placement.policy.tensor if isinstance(placement.policy, PolicyMeshSection) else 1
    if placement.layout != "split" and size % learners and learners % size:
        yield (
            f"{KEY}: {size} and placement.policy.tensor {learners} divide the same devices of one node, and neither "
            f"divides the other. Use {nearest_divisor(size, learners)}."
        )
        return
    asked: dict[str, int] = {}
    if placement.layout == "colocated":
        asked["devices"] = placement.devices
    else:
        asked["rollout_devices"] = placement.rollout_devices or placement.devices // 2
        if placement.max_rollout_devices is not None:
            asked["max_rollout_devices"] = placement.max_rollout_devices
    lent = max(0, placement.training_devices) if placement.layout == "elastic" else 0
    for key, count in asked.items():
        if count % size:
            yield (
                f"{KEY}: {size} does not divide the {count} devices that generate (placement.{key}). Use "
                f"{nearest_divisor(size, *asked.values(), lent)}, or set placement.{key} to {_nearest(count, size)}."
            )
            return
    if lent % size and asked.get("rollout_devices"):
        apart = asked["rollout_devices"]
        yield (
            f"{KEY}: {size} does not divide the {lent} learner's devices that are lent (placement.devices "
            f"{placement.devices} - placement.rollout_devices {apart}). Use "
            f"{nearest_divisor(size, *asked.values(), lent)}, or set placement.devices to "
            f"{apart + _nearest(lent, size)}."
        )
        return
    rows = recipe.model.pad_vocab_to
    if recipe.rollout.engine == "native" and rows % size:
        yield (
            f"model.pad_vocab_to: {rows} is no multiple of {KEY} {size}, over which the vocabulary is divided. Use "
            f"{math.lcm(rows, size)}."
        )
