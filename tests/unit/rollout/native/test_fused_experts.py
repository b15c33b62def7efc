# SPDX-License-Identifier: Apache-2.0
"""Fused experts of decode steps: what they compute, which models have them, and how a forward is switched to them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from podium.rollout.native import fused_experts
from podium.rollout.native.fused_experts import fused, fusible_experts, plain_experts

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3MoeConfig", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    "OLMoE": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "GLM-4-MoE": (
        "Glm4MoeConfig",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 0},
    ),
    "GPT-OSS": ("GptOssConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "dense": ("Qwen3Config", {}),
}


def model_of(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    kind, sizes = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SMALL, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def test_a_token_is_the_weighted_sum_of_its_experts() -> None:
    """Two experts of width 1 on a hidden width of 1, by hand. The first: gate 1, up 2, down 3; the second: gate -1,
    up 1, down 1. Of x = 2 they are 3 · silu(2) · 4 and silu(-2) · 2."""
    gate_up = torch.tensor([[[1.0], [2.0]], [[-1.0], [1.0]]])
    down = torch.tensor([[[3.0]], [[1.0]]])
    hidden, experts = torch.tensor([[2.0], [2.0]]), torch.tensor([[0, 1], [1, 0]])
    gates = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    first = 12 * 2 / (1 + math.exp(-2))
    second = 2 * -2 / (1 + math.exp(2))
    out = plain_experts(hidden, experts, gates, gate_up, down)
    assert out.squeeze(1).tolist() == pytest.approx([0.75 * first + 0.25 * second, 0.5 * first + 0.5 * second])


@pytest.mark.parametrize(
    ("name", "is_fusible"), [(name, name not in ("GPT-OSS", "dense")) for name in CONFIGS], ids=list(CONFIGS)
)
def test_experts_that_are_not_swiglu_keep_their_own_forward(name: str, is_fusible: bool) -> None:
    assert len(fusible_experts(model_of(name))) == (2 if is_fusible else 0)


def test_experts_in_float32_keep_their_own_forward() -> None:
    assert fusible_experts(model_of("Qwen3-MoE", torch.float32)) == []


def test_one_layer_of_another_kind_keeps_all_as_they_are() -> None:
    model = model_of("Qwen3-MoE")
    model.model.layers[1].mlp.experts.act_fn = nn.GELU()
    assert fusible_experts(model) == []


@pytest.mark.parametrize("name", ["Qwen3-MoE", "OLMoE", "Mixtral", "GLM-4-MoE"])
def test_a_fused_forward_computes_what_transformers_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = model_of(name), torch.arange(40)[None]
    seen: list[torch.Size] = []

    def counted(hidden: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape)
        return plain_experts(hidden, *rest)

    monkeypatch.setattr(fused_experts, "plain_experts", counted)
    with torch.no_grad():
        own = model(tokens).logits
        with fused(fusible_experts(model)):
            other = model(tokens).logits
        again = model(tokens).logits
    assert seen == [torch.Size([40, 16])] * 2
    assert torch.equal(own, again)
    assert (own - other).abs().max() < 0.02 * own.abs().max()


def test_an_error_leaves_no_forward_fused() -> None:
    model = model_of("Qwen3-MoE")
    experts = fusible_experts(model)
    before = model.config._experts_implementation
    with pytest.raises(ZeroDivisionError), fused(experts):
        1 / 0  # noqa: B018
    assert model.config._experts_implementation == before


@pytest.mark.slow
def test_compiled_layers_follow_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same compiled layer serves the learner and decode steps: a guard must tell them apart."""
    model, tokens = model_of("Qwen3-MoE"), torch.arange(40)[None]
    calls: list[int] = []

    def counted(hidden: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.shape[0])
        return plain_experts(hidden, *rest)

    monkeypatch.setattr(fused_experts, "plain_experts", counted)
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager", fullgraph=True)
    counts = []
    with torch.no_grad():
        for is_fused in (False, True, False, True):
            calls.clear()
            with fused(fusible_experts(model) if is_fused else []):
                model(tokens)
            counts.append(len(calls))
    assert counts == [0, 2, 0, 2]
