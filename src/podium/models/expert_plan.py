# SPDX-License-Identifier: Apache-2.0
"""Which mixtures of experts can be divided over ranks by their experts. Torch-free, so `check` can use it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

KEY = "placement.experts"
# Architectures whose experts are tested against one device.
MODEL_TYPES = ("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
# How configs name the number of experts of a layer.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer by the model's config; 0: it has none."""
    return next((value for name in _COUNTS if isinstance(value := config.get(name), int) and value), 0)


def unsupported_type(model_type: str) -> str | None:
    """Why the experts of this architecture are not divided; None: they are."""
    if model_type in MODEL_TYPES:
        return None
    return (
        f"{model_type} is not among the mixtures of experts that it divides ({', '.join(MODEL_TYPES)}). Remove it: "
        "placement.policy.shard divides every architecture."
    )


def nearest(asked: int, *numbers: int) -> int:
    """The number of ranks nearest to the one asked for that divides all these."""
    return closest(asked, divisors(math.gcd(*numbers)))


def divisors(number: int) -> list[int]:
    """All of them."""
    return [each for each in range(1, number + 1) if number % each == 0]


def closest(asked: int, sizes: Iterable[int]) -> int:
    """The size that differs from the one asked for by the smallest factor; of two, the smaller."""
    return min(sizes, key=lambda each: (abs(math.log(each / asked)), each))
