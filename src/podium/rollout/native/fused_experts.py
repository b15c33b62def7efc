# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture while decoding on CUDA: one fused operation in place of transformers' grouped products,
where the experts are of the common kind, and what it computes in plain torch.

transformers looks up how experts compute at every forward by a name in the config. Decoding sets that name for its own
forward; the learner's forward and prompts keep theirs."""

# T tokens · K experts of a token · E experts · H hidden width · I width of an expert

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

_NAME = "podium_decode"


@torch.library.custom_op("podium::decode_experts", mutates_args=())
def decode_experts(hidden: Tensor, experts: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Hidden states [T, H], experts [T, K], their weights [T, K], gate and up [E, 2 · I, H], down [E, H, I] to
    [T, H]."""
    if not hidden.is_cuda:
        return plain_experts(hidden, experts, gates, gate_up, down)
    from podium.rollout.native.expert_kernels import DEFAULT_TILES, experts_with  # imports triton

    return experts_with(DEFAULT_TILES, hidden, experts, gates, gate_up, down)


@decode_experts.register_fake
def _(hidden, *_):  # type: ignore[no-untyped-def]
    return hidden.new_empty(hidden.shape)


def plain_experts(hidden_TH: Tensor, experts_TK: Tensor, gates_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Σ_k gate_k · down(silu(gate(x)) · up(x)). Each product is rounded to the dtype of the weights; what is between
    them is computed in float32 and rounded once, as in a compiled layer of the learner."""
    dtype = hidden_TH.dtype
    outs = hidden_TH.new_zeros(*experts_TK.shape, hidden_TH.shape[1])
    for expert in experts_TK.unique().tolist():
        token, k = torch.where(experts_TK == expert)
        gate, up = nn.functional.linear(hidden_TH[token], gate_up[expert]).float().chunk(2, dim=-1)
        act = (nn.functional.silu(gate) * up).to(dtype)
        outs[token, k] = nn.functional.linear(act, down[expert])
    return (outs.float() * gates_TK.float()[..., None]).sum(dim=1).to(dtype)


def fusible_experts(model: PreTrainedModel) -> list[nn.Module]:
    """The experts of all layers, if the fused operation computes what they do: SwiGLU without biases, in 16 bits.
    Those of Qwen-MoE, OLMoE, Mixtral, DeepSeek-V3 and GLM-4-MoE are such, those of GPT-OSS are not."""
    found = [each for each in model.modules() if isinstance(getattr(each, "down_proj", None), nn.Parameter)]
    return found if all(_is_fusible(each) for each in found) else []


def _is_fusible(experts: Any) -> bool:
    gate_up, down = getattr(experts, "gate_up_proj", None), experts.down_proj
    return (
        isinstance(gate_up, nn.Parameter)
        and gate_up.dim() == down.dim() == 3
        and gate_up.dtype == down.dtype
        and gate_up.dtype in (torch.bfloat16, torch.float16)
        and getattr(type(experts), "_apply_gate", None) is _default_apply_gate
        and experts.has_gate
        and experts.is_concatenated
        and not experts.is_transposed
        and not experts.has_bias
        and not getattr(experts, "has_post_expert_norm", False)
        and not getattr(experts, "_is_expert_parallel", False)
        and _is_silu(experts.act_fn)
    )


def _is_silu(act: Callable[[Tensor], Tensor]) -> bool:
    points = torch.linspace(-4.0, 4.0, 9, device="cpu")
    return torch.equal(act(points), nn.functional.silu(points))


def _forward(experts: Any, hidden_TH: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
    out: Tensor = decode_experts(hidden_TH, experts_TK, gates_TK, experts.gate_up_proj, experts.down_proj)
    return out


ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)


@contextmanager
def fused(experts: Sequence[nn.Module]) -> Iterator[None]:
    """A context of one forward without gradients, in which these experts (from `fusible_experts`) are fused."""
    configs: list[Any] = list({id(each.config): each.config for each in experts}.values())
    before = [config._experts_implementation for config in configs]
    for config in configs:
        config._experts_implementation = _NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._experts_implementation = name
