# SPDX-License-Identifier: Apache-2.0
"""Divides the experts of a mixture over ranks, by transformers' own plan for the architecture (`base_model_ep_plan`):
which tensors hold one row for each expert. A rank keeps its own experts. Tokens travel to them and back; ranks of a
tensor axis have the same tokens, so that each computes its own experts and their outputs are added up.

The model is divided while it has no memory; the values are then read part by part, like those of any shard."""

# T tokens of this rank · K experts of a token · N = T · K · P of these, for experts of this tensor part · M tokens for
# this rank's experts · E hidden width · G ranks that exchange tokens · C experts of a rank

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
from podium.models.expert_axis import ExpertGroups, exchange_over_experts
from podium.models.expert_plan import KEY, MODEL_TYPES, nearest, unsupported_type
from podium.models.scalar import PackedScalarLM
from podium.models.tensor_axis import copy_to_axis, reduce_from_axis
from podium.models.tensor_split import Division, TensorSplit

_BY_EXPERT = "grouped_gemm"  # a tensor with one row for each expert


def divide_experts(model: PackedCausalLM | PackedScalarLM, groups: ExpertGroups) -> list[nn.Module]:
    """Keeps this rank's experts of every layer, in place. Returns the modules that hold them; none in a dense model."""
    modules = expert_modules(model.hf)
    for module in modules.values():
        _divide(module, groups)
    if modules:
        names = [f"{owner}.{name}" for owner, module in modules.items() for name, _ in module.named_parameters()]
        split = model.split or TensorSplit(tensor=groups.tensor, divisions={})
        model.split = split.with_divided(dict.fromkeys(names, Division(groups.holders, 0)))
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


def _divide(module: Any, groups: ExpertGroups) -> None:
    count, ranks = int(module.num_experts), groups.holders.size
    if count % ranks:
        raise ModelError(
            f"{KEY}: {ranks} ranks cannot divide {count} experts. Use {nearest(ranks, count)}, or another number that "
            "divides them."
        )
    rows = groups.holders.part(count)
    for name, whole in list(module.named_parameters(recurse=False)):
        part = whole.detach()[rows].clone(memory_format=torch.contiguous_format)
        setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    module.num_experts = count // ranks
    module.forward = partial(_dispatched, module.forward, groups, module.num_experts)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _dispatched(
    inside: Callable[..., Tensor],
    groups: ExpertGroups,
    count: int,
    hidden_TE: Tensor,
    experts_TK: Tensor,
    gates_TK: Tensor,
) -> Tensor:
    """The experts' outputs for this rank's tokens: each goes to the ranks of its experts, and comes back to be
    weighed. `inside` computes the experts of this rank as it would all of them."""
    num_tokens, per_token = experts_TK.shape
    if groups.tensor is not None:
        hidden_TE, gates_TK = copy_to_axis(hidden_TE, groups.tensor), copy_to_axis(gates_TK, groups.tensor)
    experts_N, order_N = torch.sort(_of_own_tensor_part(experts_TK.reshape(-1), groups, count), stable=True)
    # One more: those that ranks with the same tokens take.
    sent_N = torch.zeros(groups.num_exchange * count + 1, dtype=torch.int64, device=hidden_TE.device)
    sent_GC = sent_N.scatter_add(0, experts_N, torch.ones_like(experts_N))[:-1].view(groups.num_exchange, count)
    if groups.exchange is None:
        order_P = order_N[: int(sent_GC.sum())]
        returned_PE = _computed(inside, hidden_TE[order_P // per_token], experts_N[: len(order_P)])
    else:
        got_GC, sent, got = groups.exchange.counts(sent_GC, len(experts_N))
        order_P = order_N[: sum(sent)]
        mine_ME = exchange_over_experts(hidden_TE[order_P // per_token], sent, got, groups.exchange)
        own_M = torch.arange(count, device=hidden_TE.device).repeat(groups.num_exchange)
        own_M = own_M.repeat_interleave(got_GC.view(-1), output_size=sum(got))
        returned_PE = exchange_over_experts(_computed(inside, mine_ME, own_M), got, sent, groups.exchange)
    weighed_PE = returned_PE * gates_TK.reshape(-1, 1)[order_P]
    weighed_NE = weighed_PE.new_zeros(num_tokens * per_token, weighed_PE.shape[1]).index_copy(0, order_P, weighed_PE)
    summed_TE = weighed_NE.view(num_tokens, per_token, -1).sum(dim=1).to(hidden_TE.dtype)
    if groups.tensor is None:
        return summed_TE
    joined_TE: Tensor = reduce_from_axis(summed_TE, groups.tensor)
    return joined_TE


def _of_own_tensor_part(experts_N: Tensor, groups: ExpertGroups, count: int) -> Tensor:
    """Experts as numbers among those that ranks of this tensor part hold, by rank; one behind the last for others.
    Ranks of the tensor axis vary fastest among those that hold the experts."""
    if groups.tensor is None:
        return experts_N
    holder_N = experts_N // count
    own_N = holder_N // groups.num_tensor * count + experts_N % count
    return torch.where(holder_N % groups.num_tensor == groups.tensor.rank, own_N, groups.num_exchange * count)


def _computed(inside: Callable[..., Tensor], tokens_ME: Tensor, experts_M: Tensor) -> Tensor:
    """Each token through one expert. Without any token a row of zeros goes through one, and is cut off: on every rank
    all parameters take part in the backward pass, which reduces gradients over ranks."""
    if len(tokens_ME) == 0:
        row_1E = torch.cat([tokens_ME, tokens_ME.new_zeros(1, tokens_ME.shape[1])])
        return inside(row_1E, experts_M.new_zeros(1, 1), tokens_ME.new_ones(1, 1))[:0]
    return inside(tokens_ME, experts_M[:, None], tokens_ME.new_ones(len(tokens_ME), 1))
