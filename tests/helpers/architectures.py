# SPDX-License-Identifier: Apache-2.0
"""Small configs of all causal language models that transformers has, made from its own defaults."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Whatever of these a config has.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers", "decoder_sparse_step"), 1),
    **dict.fromkeys(("moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 250),
    "num_key_value_heads": 2, "sliding_window": 64, "index_head_dim": 16, "index_topk": 64, "laurel_rank": 4,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_expand": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def small_config(model_type: str) -> Any:
    """Two small layers. Raises what the config's own checks raise where the sizes do not go together."""
    config = CONFIG_MAPPING[model_type]
    return config(**_shrunk(config()))


def _shrunk(config: Any) -> dict[str, Any]:
    values = config.to_dict()
    changes = {key: small for key, small in _SMALL.items() if key in values and not isinstance(values[key], dict)}
    if "kv_lora_rank" in values:  # latent attention has as many of both
        changes["num_key_value_heads"] = 4
    if kinds := values.get("layer_types"):
        changes["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[:2]
    if values.get("mlp_layer_types"):
        changes["mlp_layer_types"] = ["dense", "sparse"]
    for part in getattr(type(config), "sub_configs", None) or {}:
        if (inner := getattr(config, part, None)) is not None:
            changes[part] = {**_shrunk(inner), "model_type": inner.model_type}
    return changes
