# SPDX-License-Identifier: Apache-2.0
"""Weights for generation in which a low-rank adapter is merged: W + s·BA for each adapted layer. They are copies; the
model that keeps base and adapter apart does not change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from podium.errors import RolloutError
from podium.models.causal_lm import PackedCausalLM, build
from podium.models.lora import adapted_layers, merged_weight
from podium.recipe import ModelSection
from podium.rollout.native.holding import Holding, hold

_ALIGNMENT = 256  # bytes; kernels read whole vectors


class MergedCopy:
    """A plain model that shares every tensor with `source`, but for the weights of adapted layers: it has its own, each
    summed in float32 and then rounded to the dtype of the base. Its tensors keep their addresses from `restore` to
    `release` (on CUDA for good), so that captured graphs may read them; `fill` changes values only."""

    def __init__(self, source: PackedCausalLM, section: ModelSection, config: Any, device: torch.device) -> None:
        """`source`: with an adapter, whole on this device. Its layers are compiled here too if they are there."""
        if source.split is not None:
            raise RolloutError(
                "rollout.adapter: merged weights are whole on one device, and the generator's model is divided over a "
                "tensor axis. Set it to apart, or remove the generators' tensor parallelism."
            )
        self._adapted = dict(adapted_layers(source.hf))
        if not self._adapted:
            raise RolloutError("rollout.adapter: the generator's model has no adapter to merge. Remove it.")
        self._places: dict[str, slice] = {}
        end = 0
        for name, weight in self._base_weights():
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + math.prod(weight.shape) * weight.element_size()
            self._places[name] = slice(begin, end)
        self._holding: Holding = hold(end, device)
        self._is_filled = False
        plain = section.model_copy(update={"lora": None, "dropout": False})
        self.model = build(plain, config, device=torch.device("meta"), dtype=source.head_weight.dtype)
        self._weights = {name: self._weight_of(name, weight) for name, weight in self._base_weights()}
        self._share(source)

    @property
    def nbytes(self) -> int:
        """Device memory that it takes beside the source, while it is allocated."""
        return self._holding.nbytes

    def fill(self) -> None:
        """Merges the source's current adapter, unless that is done already."""
        if not self._is_filled:
            self.refill()

    @torch.no_grad()
    def refill(self) -> None:
        """Merges the source's current adapter, layer by layer."""
        for name, layer in self._adapted.items():
            self._weights[name].copy_(merged_weight(layer))
        self._is_filled = True

    def release(self) -> int:
        """Frees the memory and returns its size. The model must not run until it is restored and filled."""
        self._is_filled = False
        return self._holding.release()

    def restore(self) -> bool:
        """Takes the memory again; values are undefined until `fill`. Returns True if some address changed."""
        self._is_filled = False
        return self._holding.restore()

    def close(self) -> None:
        """Frees the memory for good."""
        self._is_filled = False
        self._holding.close()

    def _base_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self._adapted.items():
            yield name, layer.get_base_layer().weight

    def _weight_of(self, name: str, like: Tensor) -> nn.Parameter:
        values = self._holding.bytes[self._places[name]].view(like.dtype).view(like.shape)
        return nn.Parameter(values, requires_grad=False)

    def _share(self, source: PackedCausalLM) -> None:
        """Gives every module of the plain model the tensors of the same module of the source."""
        for name, module in self.model.hf.named_modules():
            layer = self._adapted.get(name)
            own = source.hf.get_submodule(name) if layer is None else layer.get_base_layer()
            for key in module._parameters:
                module._parameters[key] = own._parameters[key]
            for key in module._buffers:
                module._buffers[key] = own._buffers[key]
            if layer is not None:
                module._parameters["weight"] = self._weights[name]
        tensors = [*self.model.hf.named_parameters(), *self.model.hf.named_buffers()]
        assert not any(each.is_meta for _, each in tensors), "every tensor is the source's or merged"
        self.model.head_spec = source.head_spec
        if any(layer._compiled_call_impl is not None for layer in source.layers):
            for layer in self.model.layers:
                layer.compile()
        self.model.eval()
