# SPDX-License-Identifier: Apache-2.0
"""A tiny random model with the tokenizer of another: to try a recipe where its model does not fit."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3Config

from podium.data.tokenizer import load_tokenizer
from podium.recipe import ModelSection


def make_stand_in(section: ModelSection, folder: Path, *, max_length: int) -> ModelSection:
    """Writes config and tokenizer of a model of two small layers; returns the section that names it."""
    tokenizer = load_tokenizer(section)
    tokenizer.save_pretrained(folder)
    Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=max_length, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return ModelSection(path=str(folder), init="random")
