# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of tiny models, counted by hand."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.tiny import tiny_config
from podium.models.cost import model_cost
from podium.models.lora import inject
from podium.recipe.schema import LoraSection

SHAPE = {
    "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4,
}  # fmt: skip
# Query and output 8×8, key and value 8×4, three 8×16 matrices in the MLP.
LAYER = 2 * 64 + 2 * 32 + 3 * 128
HEAD = 32 * 8
# Pairs of (query, visible key) of documents of 3 and 5 tokens: 1+2+3 and 1+2+3+4+5; 8 = heads × width.
PAIRS = 6 + 15


def tiny(name: str, **changes: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(name, **{**SHAPE, **changes}))
    return model


def test_a_step_costs_6_per_token_and_matrix_parameter_plus_attention() -> None:
    cost = model_cost(tiny("llama"))
    assert (cost.trained_matrix, cost.frozen_matrix, cost.head_matrix) == (2 * LAYER, 0, HEAD)
    attention = 3 * 4 * 8 * 2 * PAIRS
    assert cost.training_flops([3, 5], head_tokens=4) == 6 * 8 * 2 * LAYER + 6 * 4 * HEAD + attention


def test_the_head_costs_only_for_trained_tokens_and_the_same_when_tied() -> None:
    tied, untied = model_cost(tiny("llama", tie_word_embeddings=True)), model_cost(tiny("llama"))
    assert tied == untied
    assert tied.training_flops([8], head_tokens=8) - tied.training_flops([8], head_tokens=1) == 6 * 7 * HEAD


def test_a_window_of_2_sees_at_most_2_keys() -> None:
    cost = model_cost(tiny("mistral", sliding_window=2))
    assert cost.windows == (2, 2)
    # Documents of 3 and 5 tokens: 1+2+2 and 1+2+2+2+2.
    plain = model_cost(tiny("llama")).training_flops([3, 5], head_tokens=4)
    assert plain - cost.training_flops([3, 5], head_tokens=4) == 3 * 4 * 8 * 2 * (PAIRS - 14)


def test_each_layer_has_its_own_window() -> None:
    kinds = ["sliding_attention", "full_attention"]
    assert model_cost(tiny("gemma3", sliding_window=2, layer_types=kinds)).windows == (2, None)


def test_a_sequence_costs_what_a_step_of_it_alone_does_with_every_token_at_the_head() -> None:
    for model in (tiny("llama"), tiny("mistral", sliding_window=2), tiny("qwen3_moe", moe_intermediate_size=4)):
        cost = model_cost(model)
        alone = [cost.training_flops([length], head_tokens=length) for length in (1, 3, 5)]
        assert cost.per_sequence.of([1, 3, 5]).tolist() == alone


def test_of_four_experts_two_work() -> None:
    cost = model_cost(tiny("qwen3_moe", moe_intermediate_size=4))
    attention, router, expert = 2 * 64 + 2 * 32, 4 * 8, 3 * 8 * 4
    assert cost.trained_matrix == 2 * (attention + router + 2 * expert)


def test_a_frozen_matrix_costs_4_because_it_gets_no_gradient_of_its_own() -> None:
    model = tiny("llama")
    for parameter in model.model.layers[1].parameters():
        parameter.requires_grad_(False)
    cost = model_cost(model)
    assert (cost.trained_matrix, cost.frozen_matrix) == (LAYER, LAYER)
    whole = model_cost(tiny("llama"))
    assert whole.training_flops([8], head_tokens=0) - cost.training_flops([8], head_tokens=0) == 2 * 8 * LAYER


def test_a_frozen_head_costs_4() -> None:
    model = tiny("llama")
    model.lm_head.weight.requires_grad_(False)
    cost = model_cost(model)
    assert cost.training_flops([8], head_tokens=5) - cost.training_flops([8], head_tokens=0) == 4 * 5 * HEAD


def test_a_frozen_base_costs_4_and_its_adapter_6_per_token_and_parameter() -> None:
    """Rank 2 on query (8×8) and value (8×4) of both layers."""
    model = tiny("llama")
    inject(model, LoraSection(rank=2, targets=("q_proj", "v_proj"), dropout=0.1))
    cost = model_cost(model)
    adapter = 2 * 2 * ((8 + 8) + (8 + 4))
    assert (cost.trained_matrix, cost.frozen_matrix, cost.head_trained) == (adapter, 2 * LAYER, False)
    attention = 3 * 4 * 8 * 2 * PAIRS
    wanted = 8 * (6 * adapter + 4 * 2 * LAYER) + 4 * 4 * HEAD + attention
    assert cost.training_flops([3, 5], head_tokens=4) == wanted


def test_of_a_mixture_with_an_adapter_only_the_active_experts_cost() -> None:
    plain = tiny("qwen3_moe", moe_intermediate_size=4)
    before = model_cost(plain)
    inject(plain, LoraSection(rank=2))
    after = model_cost(plain)
    assert after.frozen_matrix == before.trained_matrix
    assert after.trained_matrix == 2 * 2 * (2 * (8 + 8) + 2 * (8 + 4))
