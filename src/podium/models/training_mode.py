# SPDX-License-Identifier: Apache-2.0
"""Train mode without the randomness of training: dropout, layer drop and router noise act only if a recipe enables
them.

All of these in transformers depend on the module's `training` flag, and some (the sampled experts of Phi-MoE) have no
probability that could be set to 0. So the modules stay in eval mode while they are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Self, assert_never

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from podium.models.activation_offload import ActivationOffload
from podium.models.context_axis import ContextAxis
from podium.models.fp8 import Fp8Layers
from podium.models.recomputing import recompute_selectively
from podium.models.routing import Routers, Routing
from podium.models.tensor_split import TensorSplit
from podium.recipe.schema import ActivationCheckpointing


class TrainedModule(nn.Module):
    """Base of the packed models. `train()` puts it into train mode as a whole; the layers within follow only with
    `dropout`. An adapter's own dropout always follows: its probability is the recipe's (model.lora.dropout)."""

    hf: PreTrainedModel
    layers: list[nn.Module]  # the decoder layers
    routers: Routers | None  # of a mixture of experts; None: the model is dense, or its routers are not known

    def __init__(self, *, dropout: bool) -> None:
        super().__init__()
        self.split: TensorSplit | None = None  # how the layers are divided over a tensor axis
        self.context: ContextAxis | None = None  # over which the tokens of each forward are divided
        self.offload: ActivationOffload | None = None  # of the layers' inputs
        self.fp8: Fp8Layers | None = None  # linear layers that can compute in fp8
        self._dropout = dropout

    @property
    def drops(self) -> bool:
        """Whether training drops activations at random: in the layers, or before an adapter."""
        adapters = (each for name, each in self.hf.named_modules() if "lora_dropout" in name.split("."))
        return self._dropout or any(isinstance(each, nn.Dropout) and each.p > 0 for each in adapters)

    def num_parameters(self, *, trained: bool = False) -> int:
        """Parameters of the whole model, over all ranks; `trained`: those that are."""
        split = self.split
        return sum(
            each.numel() if split is None else split.numel(name, each)
            for name, each in self.hf.named_parameters()
            if each.requires_grad or not trained
        )

    def train(self, mode: bool = True) -> Self:
        """Sets train mode; layers follow only with `dropout`."""
        super().train(mode and self._dropout)
        self.training = mode
        if mode and not self._dropout:
            for name, module in self.hf.named_modules():
                if "lora_dropout" in name.split(".") or _is_checkpointed(module):
                    module.training = True
        return self

    def route(self, routing: Routing | None) -> None:
        """Sets what the routers of a mixture do beside routing, until the next call. Nothing in a dense model."""
        if self.routers is not None:
            self.routers.enter(routing)

    @contextmanager
    def routed(self, routing: Routing | None) -> Iterator[None]:
        """A context of one forward. With gradients its effect lasts: layers may be recomputed in the backward pass, and
        who calls that ends it with `route(None)`."""
        self.route(routing)
        try:
            yield
        finally:
            if not torch.is_grad_enabled():
                self.route(None)

    def generating(self) -> AbstractContextManager[None]:
        """A context of an engine's forward: linear layers compute as the engine wants."""
        return nullcontext() if self.fp8 is None else self.fp8.computing(self.fp8.generation)

    def checkpoint_activations(self, what: ActivationCheckpointing = "layers", *, offload: bool = False) -> None:
        """Recomputes parts of every decoder layer in the backward pass, or all of it. `offload`: the inputs of whole
        layers wait in host memory. Before compiling and sharding."""
        match what:
            case "none":
                return
            case "selective":
                recompute_selectively(self.layers, "products")
            case "all_but_attention":
                recompute_selectively(self.layers, "attention")
            case "layers":
                self._recompute_layers(ActivationOffload() if offload else None)
            case other:
                assert_never(other)

    def _recompute_layers(self, offload: ActivationOffload | None) -> None:
        self.offload = offload
        self.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in self.hf.modules():
            if _is_checkpointed(module):
                call = _recomputed if self._dropout else partial(_recomputed_without_dropout, module)
                module._gradient_checkpointing_func = call if offload is None else partial(_offloaded, offload, call)
        self.train(self.training)


def _is_checkpointed(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer) and bool(module.gradient_checkpointing)


def _recomputed(run: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(run, *inputs, use_reentrant=False)


def _recomputed_without_dropout(layer: nn.Module, run: Callable[..., Any], *inputs: Any) -> Any:
    """transformers checkpoints a layer only in train mode. The computation itself, now and when it is repeated, is that
    of eval mode."""

    def forward(*inputs: Any) -> Any:
        layer.training = False
        try:
            return run(*inputs)
        finally:
            layer.training = True

    return checkpoint(forward, *inputs, use_reentrant=False)


def _offloaded(offload: ActivationOffload, recomputed: Callable[..., Any], *inputs: Any) -> Any:
    """Checkpointing saves the inputs under these hooks, and everything within under its own."""
    with offload.saving():
        return recomputed(*inputs)
