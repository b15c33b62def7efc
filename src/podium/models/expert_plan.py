# SPDX-License-Identifier: Apache-2.0
"""Which mixtures of experts can be divided over ranks by their experts. Torch-free, so `check` can use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    """The number of ranks that divides all these and differs from the one asked for by the smallest factor; of two, the
    smaller."""
    common = math.gcd(*numbers)
    fits = [each for each in range(1, common + 1) if common % each == 0]
    return min(fits, key=lambda each: (abs(math.log(each / asked)), each))
