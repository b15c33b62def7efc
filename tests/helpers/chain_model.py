# SPDX-License-Identifier: Apache-2.0
"""A model that says one text whatever it is asked: each token depends on the one before it alone."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from helpers.tiny import tiny_tokenizer


def save_chain_folder(folder: Path, text: str, *, context: int = 4096) -> Path:
    """A checkpoint folder of a model that answers `text`, whose characters are all different. Its layers add nothing,
    so that the head reads the last token's embedding, which is a unit vector."""
    tokenizer = tiny_tokenizer(":")
    chain = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(set(chain)) == len(chain) == len(text)
    size = len(tokenizer)
    width = -(-size // 32) * 32
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=width, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=context, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    follows = dict(zip(chain, [*chain[1:], tokenizer.eos_token_id], strict=True))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.lm_head.weight.zero_()
        for token in range(size):
            model.lm_head.weight[follows.get(token, chain[0]), token] = 3.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
