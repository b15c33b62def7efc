# SPDX-License-Identifier: Apache-2.0
"""Which models tensor parallelism divides, and over how many ranks. Torch-free, so `check` can use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "placement.policy.tensor"
# Architectures whose plan (transformers' `base_model_tp_plan`) is tested against one device.
MODEL_TYPES = (
    "gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3",
    "smollm3",
)  # fmt: skip
# Sizes of a config that the ranks divide evenly.
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def unsupported_type(model_type: str) -> str | None:
    """Why this architecture is not divided; None: it is."""
    if model_type in MODEL_TYPES:
        return None
    return (
        f"{model_type} is not among the architectures that it divides ({', '.join(MODEL_TYPES)}). Use "
        "placement.policy.shard, which every architecture allows."
    )


def undivided(config: Mapping[str, Any], size: int) -> list[str]:
    """Sizes of the model that do not divide over so many ranks, each as `name value`."""
    sizes = {name: config.get(name) for name in _DIVIDED}
    if sizes["num_key_value_heads"] is None:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return [f"{name} {value}" for name, value in sizes.items() if isinstance(value, int) and value % size]


def possible_sizes(config: Mapping[str, Any], most: int) -> frozenset[int]:
    """Sizes of the tensor axis up to `most` that the model allows."""
    return frozenset(size for size in range(1, most + 1) if not undivided(config, size))
