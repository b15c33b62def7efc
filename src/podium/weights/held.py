# SPDX-License-Identifier: Apache-2.0
"""The tensors that a model computes with, by their published names, and how to fill them in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from podium.models.buffers import persistent_buffers
from podium.models.causal_lm import PackedCausalLM
from podium.models.weights import is_adapter
from podium.weights.transports import Delivery


def held_tensors(model: PackedCausalLM) -> dict[str, Tensor]:
    """The tensors of a weight version: whole tensors, padding rows included. For a model with an adapter, only the
    adapter, because its base never changes."""
    everything = all_tensors(model)
    adapter = {name: tensor for name, tensor in everything.items() if is_adapter(name)}
    return adapter or everything


def all_tensors(model: PackedCausalLM) -> dict[str, Tensor]:
    """Like `held_tensors`, including a frozen base."""
    parameters = {name: parameter.detach() for name, parameter in model.hf.named_parameters()}
    return {**parameters, **persistent_buffers(model.hf)}


@torch.no_grad()
def fill_held(tensors: Mapping[str, Tensor], delivery: Delivery) -> None:
    """Changes values but not addresses, so that captured graphs stay valid. Padding rows become zero."""
    for name, tensor in delivery.tensors():
        held = tensors[name]
        if held.shape == tensor.shape:
            held.copy_(tensor)
        else:
            held[: len(tensor)].copy_(tensor)
            held[len(tensor) :].zero_()
