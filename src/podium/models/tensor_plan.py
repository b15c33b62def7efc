# SPDX-License-Identifier: Apache-2.0
"""Which models tensor parallelism divides, and over how many ranks. Torch-free, so `check` can use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.models.expert_plan import num_experts

KEY = "placement.policy.tensor"
# Architectures whose plan (transformers' `base_model_tp_plan`) is tested against one device.
MODEL_TYPES = (
    "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "granite", "llama", "mistral",
    "mixtral", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3",
)  # fmt: skip
SUMMED = "replicated_with_grad_allreduce"  # whole on each rank, which has the gradient of its own heads alone
BY_HEADS = "by_heads"  # a parameter with one number for each head
_ATTENTION, _SHARED = "layers.*.self_attn.", "layers.*.mlp.shared_expert."
# What transformers' plans (5.22) leave out.
ADDED: Mapping[str, Mapping[str, str]] = {
    "deepseek_v3": {  # latents are computed on each rank, for its own heads
        **{f"{_ATTENTION}{name}": "colwise" for name in ("q_proj", "q_b_proj", "kv_b_proj")},
        **{f"{_ATTENTION}{name}": SUMMED for name in ("q_a_proj", "q_a_layernorm")},
        **{f"{_ATTENTION}{name}": SUMMED for name in ("kv_a_proj_with_mqa", "kv_a_layernorm")},
        f"{_ATTENTION}o_proj": "rowwise",
    },
    "glm4_moe": {f"{_ATTENTION}{name}": SUMMED for name in ("q_norm", "k_norm")},
    "gpt_oss": {
        **{f"{_ATTENTION}{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
        f"{_ATTENTION}o_proj": "rowwise",
        f"{_ATTENTION}sinks": BY_HEADS,
    },
    "qwen2_moe": {
        **{f"{_SHARED}{name}": "colwise" for name in ("gate_proj", "up_proj")},
        f"{_SHARED}down_proj": "rowwise",
    },
}
# Sizes of a config that the ranks divide evenly, beside `intermediate_size`, which all layers of a dense model have.
_DIVIDED = ("num_attention_heads", "num_key_value_heads")
_WITHOUT_DENSE_LAYERS = ("gpt_oss", "mixtral", "olmoe")  # `intermediate_size` is the width of an expert
_SHARED_WIDTH = "shared_expert_intermediate_size"


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
    if _has_dense_layers(config):
        sizes["intermediate_size"] = config.get("intermediate_size")
    if count := num_experts(config):
        sizes |= {"number of experts": count, _SHARED_WIDTH: config.get(_SHARED_WIDTH)}
        if (shared := config.get("n_shared_experts")) and (width := config.get("moe_intermediate_size")):
            sizes["moe_intermediate_size × n_shared_experts"] = width * shared
    return [f"{name} {value}" for name, value in sizes.items() if isinstance(value, int) and value % size]


def _has_dense_layers(config: Mapping[str, Any]) -> bool:
    """Whether some layers have a plain MLP, of width `intermediate_size`."""
    if not num_experts(config):
        return True
    if config.get("model_type") in _WITHOUT_DENSE_LAYERS:
        return False
    if "first_k_dense_replace" in config:
        return bool(config["first_k_dense_replace"])
    if config.get("model_type") in ("qwen2_moe", "qwen3_moe"):
        return bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1
    return True


def possible_sizes(config: Mapping[str, Any], most: int) -> frozenset[int]:
    """Sizes of the tensor axis up to `most` that the model allows."""
    return frozenset(size for size in range(1, most + 1) if not undivided(config, size))
