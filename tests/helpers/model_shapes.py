# SPDX-License-Identifier: Apache-2.0
"""Configs of large models by their published sizes, and tiny ones, for dry runs. There are no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from podium.recipe import SpmdRecipe, parse_recipe

LLAMA_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "hidden_size": 8192,
    "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_235B = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151_936, "hidden_size": 4096,
    "intermediate_size": 12_288, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "max_position_embeddings": 40_960, "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
TINY_LLAMA = {
    **LLAMA_70B, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
TINY_QWEN3 = {**TINY_LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
TINY_MOE = {
    **QWEN3_235B, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6,
    "num_experts_per_tok": 2, "max_position_embeddings": 128,
}  # fmt: skip


def config_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a config alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def dry_recipe(
    folder: Path, devices: int, policy: object, *, model: dict[str, Any] | None = None, **changes: Any
) -> SpmdRecipe:
    """An SFT of a model's config on these devices."""
    values: dict[str, Any] = {
        "program": "sft", "model": {"path": str(folder), **(model or {})},
        "data": {"train": "rows.jsonl", "max_length": 64}, "tokens_per_step": 512, "micro_batch_tokens": 64,
        "optimizer": {"lr": 1e-5}, "steps": 10, "run": {"name": "dry"},
        "placement": {"devices": devices, "policy": policy}, **changes,
    }  # fmt: skip
    recipe = parse_recipe(values)
    assert isinstance(recipe, SpmdRecipe)
    return recipe
