# SPDX-License-Identifier: Apache-2.0
"""Divides the experts of a mixture over ranks, by transformers' own plan for the architecture (`base_model_ep_plan`):
which tensors hold one row for each expert. A rank keeps its own experts; tokens travel to them and back.

The model is divided while it has no memory; the values are then read part by part, like those of any shard."""

# T tokens of this rank · K experts of a token · N = T · K · M tokens for this rank's experts · E hidden width
# G ranks of the group · C experts of a rank

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.errors import ModelError, UnsupportedModelError
from podium.models.causal_lm import PackedCausalLM
from podium.models.expert_axis import ExpertAxis, exchange_over_experts
from podium.models.expert_plan import KEY, MODEL_TYPES, nearest, unsupported_type
from podium.models.scalar import PackedScalarLM
from podium.models.tensor_split import TensorSplit

_BY_EXPERT = "grouped_gemm"  # a tensor with one row for each expert


def divide_experts(model: PackedCausalLM | PackedScalarLM, axis: ExpertAxis) -> list[nn.Module]:
    """Keeps this rank's experts of every layer, in place. Returns the modules that hold them; none in a dense model."""
    modules = expert_modules(model.hf)
    for module in modules.values():
        _divide(module, axis)
    if modules:
        assert model.split is None, "mixtures have no tensor axis"
        names = [f"{owner}.{name}" for owner, module in modules.items() for name, _ in module.named_parameters()]
        model.split = TensorSplit(axis=axis, dims=dict.fromkeys(names, 0), summed=frozenset(), has_copies=False)
    return list(modules.values())


def expert_modules(hf: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that hold experts, by name; none in a dense model. Raises an error if they cannot be divided."""
    config = hf.config.get_text_config()
    prefix = f"{hf.base_model_prefix}." if hf.base_model is not hf else ""
    names = [name for name, each in hf.named_parameters() if ".experts." in name or each.dim() > 2]
    if not names:
        return {}
    if (reason := unsupported_type(config.model_type)) is not None:
        raise UnsupportedModelError(f"{KEY}: {reason}")
    plan = getattr(config, "base_model_ep_plan", None) or {}
    patterns = [
        re.compile(re.escape(prefix + name).replace(r"\*", r"\d+")) for name, how in plan.items() if how == _BY_EXPERT
    ]
    owners = {name.rpartition(".")[0] for name in names if any(pattern.fullmatch(name) for pattern in patterns)}
    found = {owner: hf.get_submodule(owner) for owner in sorted(owners, key=names_in_order(names))}
    whole = {f"{owner}.{name}" for owner, module in found.items() for name, _ in module.named_parameters()}
    if not found or whole != {name for name in names if name.rpartition(".")[0] in owners}:
        raise UnsupportedModelError(
            f"{KEY}: transformers' plan for {config.model_type} does not say which tensors hold experts, or leaves "
            f"some out. Remove it, or update transformers (tested: 5.22 with {', '.join(MODEL_TYPES)})."
        )
    return found


def names_in_order(names: list[str]) -> Callable[[str], int]:
    """A key that sorts modules as their parameters are named."""
    first: dict[str, int] = {}
    for at, name in enumerate(names):
        first.setdefault(name.rpartition(".")[0], at)
    return first.__getitem__


def _divide(module: Any, axis: ExpertAxis) -> None:
    count = int(module.num_experts)
    if count % axis.size:
        raise ModelError(
            f"{KEY}: {axis.size} ranks cannot divide {count} experts. Use {nearest(axis.size, count)}, or another "
            "number that divides them."
        )
    rows = axis.part(count)
    for name, whole in list(module.named_parameters(recurse=False)):
        part = whole.detach()[rows].clone(memory_format=torch.contiguous_format)
        setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    module.num_experts = count // axis.size
    module.forward = partial(_dispatched, module.forward, axis, module.num_experts)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _dispatched(
    inside: Callable[..., Tensor], axis: ExpertAxis, count: int, hidden_TE: Tensor, experts_TK: Tensor, gates_TK: Tensor
) -> Tensor:
    """The experts' outputs for this rank's tokens: each goes to the ranks of its experts, and comes back to be
    weighed. `inside` computes the experts of this rank as it would all of them."""
    num_tokens, per_token = experts_TK.shape
    experts_N, order_N = torch.sort(experts_TK.reshape(-1), stable=True)
    sent_GC = torch.zeros(axis.size * count, dtype=torch.int64, device=hidden_TE.device)
    sent_GC = sent_GC.scatter_add(0, experts_N, torch.ones_like(experts_N)).view(axis.size, count)
    got_GC, sent, got = axis.counts(sent_GC)
    mine_ME = exchange_over_experts(hidden_TE[order_N // per_token], sent, got, axis)
    own_M = torch.arange(count, device=hidden_TE.device).repeat(axis.size)
    own_M = own_M.repeat_interleave(got_GC.view(-1), output_size=sum(got))
    returned_NE = exchange_over_experts(_computed(inside, mine_ME, own_M), got, sent, axis)
    outputs_NE = torch.empty_like(returned_NE).index_copy(0, order_N, returned_NE)
    weighed_NE = outputs_NE * gates_TK.reshape(-1, 1)
    return weighed_NE.view(num_tokens, per_token, -1).sum(dim=1).to(hidden_TE.dtype)


def _computed(inside: Callable[..., Tensor], tokens_ME: Tensor, experts_M: Tensor) -> Tensor:
    """Each token through one expert. Without any token a row of zeros goes through one, and is cut off: on every rank
    all parameters take part in the backward pass, which reduces gradients over ranks."""
    if len(tokens_ME) == 0:
        row_1E = torch.cat([tokens_ME, tokens_ME.new_zeros(1, tokens_ME.shape[1])])
        return inside(row_1E, experts_M.new_zeros(1, 1), tokens_ME.new_ones(1, 1))[:0]
    return inside(tokens_ME, experts_M[:, None], tokens_ME.new_ones(len(tokens_ME), 1))
