# SPDX-License-Identifier: Apache-2.0
"""Tiny models of several architectures, a character tokenizer with a chat template, and chat data, all seeded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models

from podium.models.buffers import persistent_buffers

_CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyzW.\n"
_SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# 250 tokens are padded to 256 rows, so every comparison covers padding.
VOCABULARY = 250
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    # Two layers, one of which slides: by default every sixth layer of Gemma3 sees everything.
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", "head_dim": 8, "sliding_window": 8},
    "qwen3_moe": dict(model_type="qwen3_moe", head_dim=8, **_MOE),
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "granite": {"model_type": "granite", "logits_scaling": 4.0},
    "qwen2": {"model_type": "qwen2"},  # with biases at queries, keys and values
    "gemma": {"model_type": "gemma", "head_dim": 8, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},  # queries, keys and values are one layer
    "olmo2": {"model_type": "olmo2", "pad_token_id": 0},  # norms over all heads together
    "glm4": {"model_type": "glm4", "head_dim": 8, "pad_token_id": 0},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    # Biases of routers that are parameters without gradient.
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
    },
    "afmoe": {
        "model_type": "afmoe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
        "sliding_window": 8,
    },
    "laguna": {
        "model_type": "laguna",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_attention_heads_per_layer": None,
    },
    "gemma3n": {
        "model_type": "gemma3n_text",
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "phimoe": {"model_type": "phimoe", "num_local_experts": 4, "sliding_window": 50},
    # With dropout or noise of the router: by default, or put in.
    "gpt2": {"model_type": "gpt2"},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 8},
    "mixtral": {"model_type": "mixtral", "head_dim": 8, "num_local_experts": 4, "router_jitter_noise": 0.2},
    "starcoder2": {
        "model_type": "starcoder2",
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
    },
    "qwen3_next": dict(
        model_type="qwen3_next",
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=16,
        **_MOE,
    ),
}


SUPPORTED = [
    "llama", "qwen3", "gemma3", "mistral", "qwen3_moe", "gemma2", "granite", "gpt_oss", "glm4_moe", "deepseek_v3",
    "ernie4_5_moe", "afmoe", "laguna", "gemma3n", "gemma3_multimodal",
]  # fmt: skip


def tiny_multimodal_config(**changes: Any) -> Any:
    """Gemma3 with a vision tower, which text does not reach."""
    text = {**_BASE, **_CONFIGS["gemma3"], **changes}
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    return transformers.AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=7
    )


def tiny_config(name: str, **changes: Any) -> Any:
    """A config of one of the architectures above, two layers of 32 unless changed."""
    if name == "gemma3_multimodal":
        return tiny_multimodal_config(**changes)
    return transformers.AutoConfig.for_model(**{**_BASE, **_CONFIGS[name], **changes})


def save_tiny_model(name: str, folder: Path, *, seed: int = 0, shard_size: str = "5GB", **changes: Any) -> Path:
    """Writes config and weights. Every weight is moved a little: ones and zeros hide mistakes."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in [*model.parameters(), *persistent_buffers(model).values()]:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def tiny_tokenizer(further: str = "") -> Any:
    """One token per character, ChatML with generation markers. `further`: characters beside the usual ones."""
    vocabulary = {symbol: index for index, symbol in enumerate([*_SPECIAL, *_CHARACTERS, *further])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
    core.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny_folder(folder: Path, name: str = "qwen3") -> Path:
    """A whole checkpoint folder that can be trained on chats: model and tokenizer."""
    tokenizer = tiny_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    save_tiny_model(name, folder, vocab_size=len(tokenizer), **ends)
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(path: Path, *, count: int = 64, seed: int = 0) -> Path:
    """Sums of two numbers of one to six digits, as chats: documents of unequal length."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        left, right = (draw.randrange(10 ** draw.randint(1, 6)) for _ in range(2))
        question = {"role": "user", "content": f"what is {left}+{right}?"}
        rows.append({"messages": [question, {"role": "assistant", "content": str(left + right)}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
