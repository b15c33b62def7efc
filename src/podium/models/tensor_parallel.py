# SPDX-License-Identifier: Apache-2.0
"""Divides a model over the ranks of a tensor axis by transformers' own plan: each rank keeps a part of the layers and
of the vocabulary, as plain tensors.

Every rank computes the same hidden states. Between a layer divided by its outputs (`colwise`) and the next one divided
by its inputs (`rowwise`) each rank has its own heads, or its own part of the MLP; sums over the ranks join them again.
The model is divided while it has no memory; the values are then read part by part, like those of any shard."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.errors import ModelError, UnsupportedModelError
from podium.models.causal_lm import PackedCausalLM
from podium.models.scalar import PackedScalarLM
from podium.models.tensor_axis import TensorAxis, copy_to_axis, gather_from_axis, reduce_from_axis, scatter_to_axis
from podium.models.tensor_plan import ADDED, BY_HEADS, KEY, SUMMED, undivided, unsupported_type
from podium.models.tensor_split import Division, TensorSplit

_COLWISE, _ROWWISE = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
# Experts are divided by number, in models/expert_parallel.py: a part of a tensor with gates beside ups is no box.
_OF_EXPERTS = ("packed_colwise", "moe_tp_experts")


def divide_model(model: PackedCausalLM | PackedScalarLM, axis: TensorAxis) -> None:
    """Keeps this rank's part of every layer that the plan divides, in place, but for experts. Raises an error if the
    plan does not allow it."""
    division = _Division(model.hf, axis)
    planned = _planned(model.hf)
    for style, module in planned.values():
        if style == SUMMED:
            division.sum_gradients(module)
        else:
            division.linear(module, style)
    for parameter in _by_heads(model.hf):
        division.by_heads(parameter)
    for owner in {name.rpartition(".")[0] for name, (style, _) in planned.items() if style in _COLWISE}:
        division.share_input(model.hf.base_model.get_submodule(owner))
    embedding, head = model.hf.get_input_embeddings(), None
    if isinstance(model, PackedCausalLM):
        head = model.hf.get_output_embeddings()
        if len(head.weight) % axis.size:
            raise ModelError(
                f"{KEY}: {axis.size} ranks cannot divide {len(head.weight)} rows of the vocabulary. Set "
                f"model.pad_vocab_to to a multiple of {axis.size}."
            )
        division.head(head)
        model.head_spec = replace(model.head_spec, tensor=axis)
    if head is not None or len(embedding.weight) % axis.size == 0:  # a model that scores pads no rows
        division.embedding(embedding)
    model.split = division.apply()


def _planned(hf: PreTrainedModel) -> dict[str, tuple[str, nn.Module]]:
    """The modules of the body that the plan names, with how it divides each, by their names in the body."""
    config = hf.config.get_text_config()
    plan = _plan(hf)
    if (reason := unsupported_type(config.model_type)) is not None:
        raise UnsupportedModelError(f"{KEY}: {reason}")
    unknown = {style for style in plan.values() if style not in (*_COLWISE, *_ROWWISE, *_OF_EXPERTS, SUMMED)}
    if unknown or not plan:
        what = f"divides layers by {', '.join(sorted(unknown))}" if unknown else "is empty"
        raise UnsupportedModelError(
            f"{KEY}: transformers' plan for {config.model_type} {what}, which Podium does not know. Use "
            "placement.policy.shard instead."
        )
    patterns = [(_pattern(name), style) for name, style in plan.items() if style not in _OF_EXPERTS]
    found: dict[str, tuple[str, nn.Module]] = {}
    for name, module in hf.base_model.named_modules():
        style = next((style for pattern, style in patterns if pattern.fullmatch(name)), None)
        if style is not None:
            found[name] = (style, module)
    for name, _ in hf.base_model.named_modules():
        owner, _, leaf = name.rpartition(".")
        is_of_heads = leaf in ("q_norm", "k_norm") and found.get(f"{owner}.q_proj", ("",))[0] == "colwise"
        if is_of_heads and name not in found:
            raise UnsupportedModelError(
                f"{KEY}: the plan of this version of transformers leaves out {name}, whose gradient each rank would "
                f"have for its own heads only. Update transformers (tested: 5.22)."
            )
    return found


def _plan(hf: PreTrainedModel) -> dict[str, str]:
    """How modules are divided, by patterns of their names: transformers' plan and what it leaves out."""
    config = hf.config.get_text_config()
    added = {name: style for name, style in ADDED.get(config.model_type, {}).items() if style != BY_HEADS}
    return {**(getattr(config, "base_model_tp_plan", None) or {}), **added}


def _by_heads(hf: PreTrainedModel) -> list[nn.Parameter]:
    """Parameters outside of linear layers that have one number for each head."""
    added = ADDED.get(hf.config.get_text_config().model_type, {})
    patterns = [_pattern(name) for name, style in added.items() if style == BY_HEADS]
    named = hf.base_model.named_parameters()
    return [parameter for name, parameter in named if any(pattern.fullmatch(name) for pattern in patterns)]


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))


@dataclass(frozen=True, slots=True, eq=False)
class _Divided:
    parameter: Tensor  # the whole one
    dim: int


class _Division:
    """Collects what is divided, and changes the forward passes; `apply` then replaces the parameters."""

    def __init__(self, hf: PreTrainedModel, axis: TensorAxis) -> None:
        config = hf.config.get_text_config()
        if left := undivided(config.to_dict(), axis.size):
            raise ModelError(f"{KEY}: {axis.size} does not divide {' and '.join(left)} of {type(hf).__name__}.")
        self._hf, self._axis = hf, axis
        self._divided: dict[int, _Divided] = {}
        self._summed: set[int] = set()

    def sum_gradients(self, module: nn.Module) -> None:
        """A module that every rank has whole, and applies to its own heads."""
        self._summed |= {id(parameter) for parameter in module.parameters()}

    def by_heads(self, parameter: nn.Parameter) -> None:
        """A parameter with one number for each head."""
        self._cut(parameter, 0)

    def linear(self, module: nn.Module, style: str) -> None:
        """A linear layer, with an adapter or without."""
        base, adapters = _linear_of(module), _adapters_of(module)
        if style in _COLWISE:
            self._cut(base.weight, 0)
            if base.bias is not None:
                self._cut(base.bias, 0)
            for inner, outer in adapters:
                self._summed.add(id(inner.weight))
                self._cut(outer.weight, 0)
            if style != "colwise":
                _wrap(module, _joined(module.forward, self._axis))
        else:
            self._cut(base.weight, 1)
            for inner, outer in adapters:
                self._cut(inner.weight, 1)
                self._summed.add(id(outer.weight))
            inside = module.forward
            if base.bias is not None:  # added once, to the sum
                _wrap(base, lambda inputs: F.linear(inputs, base.weight))
                inside = base.forward if module is base else module.forward
            _wrap(module, _by_inputs(inside, base, self._axis, divides=style != "rowwise"))

    def share_input(self, owner: nn.Module) -> None:
        """A module (attention or MLP) that uses its input only for layers divided by their outputs. These have a part
        each of the input's gradient, which is added up once for all of them."""
        owner.register_forward_pre_hook(_copied_input(self._axis), with_kwargs=True)

    def embedding(self, embedding: nn.Embedding) -> None:
        """The look-up of a part of the vocabulary: other tokens get zeros, and the sum over the ranks has them all."""
        rows = self._axis.part(len(embedding.weight))
        self._cut(embedding.weight, 0)
        padding: int | None = embedding.padding_idx
        is_own = padding is not None and rows.start <= padding < rows.stop
        embedding.padding_idx = padding - rows.start if is_own else None
        _wrap(embedding, _of_own_tokens(embedding.forward, rows, self._axis))

    def head(self, head: nn.Linear) -> None:
        """Logits of a part of the vocabulary. The fused head reads the weight; transformers' own forward the module."""
        self._cut(head.weight, 0)
        inside, axis = head.forward, self._axis
        _wrap(head, lambda hidden: gather_from_axis(inside(hidden), axis))

    def apply(self) -> TensorSplit:
        """Replaces the divided parameters by this rank's parts."""
        divided = {name: self._divided[id(each)].dim for name, each in self._named() if id(each) in self._divided}
        divisions = {name: Division(self._axis, dim) for name, dim in divided.items()}
        summed = frozenset(name for name, each in self._named() if id(each) in self._summed)
        parts = {key: self._part(each) for key, each in self._divided.items()}
        for module in self._hf.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) in parts:
                    setattr(module, name, parts[id(parameter)])
        return TensorSplit(tensor=self._axis, divisions=divisions, summed=summed)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._hf.named_parameters())

    def _cut(self, parameter: Tensor, dim: int) -> None:
        self._divided[id(parameter)] = _Divided(parameter, dim)

    def _part(self, each: _Divided) -> nn.Parameter:
        rows = self._axis.part(each.parameter.shape[each.dim])
        part = each.parameter.detach().narrow(each.dim, rows.start, rows.stop - rows.start)
        return nn.Parameter(
            part.clone(memory_format=torch.contiguous_format), requires_grad=each.parameter.requires_grad
        )


def _linear_of(module: nn.Module) -> nn.Linear:
    base = module.get_base_layer() if hasattr(module, "lora_A") else module  # type: ignore[operator]
    if not isinstance(base, nn.Linear):
        raise UnsupportedModelError(f"{KEY}: transformers' plan divides a {type(base).__name__} as a linear layer.")
    return base


def _adapters_of(module: nn.Module) -> list[tuple[Any, Any]]:
    """The factors A and B of each adapter of a layer: y = Wx + s·B(A(x))."""
    if not hasattr(module, "lora_A"):
        return []
    inner: Any = module.lora_A
    outer: Any = module.lora_B
    return [(inner[name], outer[name]) for name in inner]


def _wrap(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.forward = forward


def _copied_input(axis: TensorAxis) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    def copied(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (copy_to_axis(args[0], axis), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": copy_to_axis(kwargs["hidden_states"], axis)}

    return copied


def _joined(inside: Callable[..., Tensor], axis: TensorAxis) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        joined: Tensor = gather_from_axis(inside(*args, **kwargs), axis)
        return joined

    return forward


def _by_inputs(
    inside: Callable[..., Tensor], base: nn.Linear, axis: TensorAxis, *, divides: bool
) -> Callable[..., Tensor]:
    def forward(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mine = scatter_to_axis(inputs, axis) if divides else inputs
        outputs: Tensor = reduce_from_axis(inside(mine, *args, **kwargs), axis)
        return outputs if base.bias is None else outputs + base.bias

    return forward


def _of_own_tokens(inside: Callable[..., Tensor], rows: slice, axis: TensorAxis) -> Callable[..., Tensor]:
    def forward(tokens: Tensor) -> Tensor:
        is_own = (tokens >= rows.start) & (tokens < rows.stop)
        found = inside(torch.where(is_own, tokens - rows.start, 0))
        summed: Tensor = reduce_from_axis(found.masked_fill(~is_own.unsqueeze(-1), 0), axis)
        return summed

    return forward
