# SPDX-License-Identifier: Apache-2.0
"""Which models context parallelism divides. Torch-free, so `check` can use it."""

from __future__ import annotations

from podium.errors import UnsupportedModelError

KEY = "placement.policy.context"
# Architectures in which tokens meet in attention alone, tested against one device.
MODEL_TYPES = (
    "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "granite", "llama", "mistral",
    "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3",
)  # fmt: skip


def unsupported_type(model_type: str) -> str | None:
    """Why the tokens of this architecture are not divided; None: they are."""
    if model_type in MODEL_TYPES:
        return None
    return (
        f"{model_type} is not among the architectures that it divides ({', '.join(MODEL_TYPES)}). Use "
        "placement.policy.shard, which every architecture allows."
    )


def require_context_type(model_type: str) -> None:
    """Raises an error if the tokens of this architecture are not divided."""
    reason = unsupported_type(model_type)
    if reason is not None:
        raise UnsupportedModelError(f"{KEY}: {reason}")
