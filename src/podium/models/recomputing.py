# SPDX-License-Identifier: Apache-2.0
"""What the backward pass computes again instead of keeping it: selective activation checkpointing of decoder layers.

A policy looks at the operations of a layer's forward pass and keeps the outputs of the expensive ones. The backward
pass runs the layer again, takes these outputs from memory and recomputes the rest. In a compiled layer the same policy
decides what the compiler keeps, so the checkpoint is inside the layer's own forward, which is what gets compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Kept = Literal["attention", "products"]
"""What is kept of a layer: the outputs of attention, or those of matrix products as well."""

# By name: not every release of torch has all of them.
_ATTENTION = (
    "torch_attn::_varlen_attn",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)
# Without batched products: those of attention that is written out have the size of tokens squared.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")
_GROUPED = ("aten::_grouped_mm", "aten::_scaled_grouped_mm")  # of experts


def recompute_selectively(layers: list[nn.Module], kept: Kept) -> None:
    """Changes the forward pass of these layers. Before they are compiled and sharded."""
    # transformers adds biases of experts to their products in place, and then these are no longer what was kept.
    has_biases = any(name.endswith("_proj_bias") for layer in layers for name, _ in layer.named_parameters())
    attention = frozenset(_overloads(_ATTENTION))
    products = frozenset(_overloads(_PRODUCTS if has_biases else _PRODUCTS + _GROUPED))
    # The second product of an adapter is as wide as its layer and costs next to nothing.
    ranks = frozenset(_adapter_ranks(layers))

    def policy(_: SelectiveCheckpointContext, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = op in attention or (kept == "products" and op in products and _is_costly(op, args, ranks))
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward, contexts)


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any], *inputs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)

    def run(*inputs: Any) -> Any:
        return forward(*inputs, **options)

    return checkpoint(run, *inputs, use_reentrant=False, context_fn=contexts)


def _is_costly(op: OpOverload, args: tuple[Any, ...], ranks: frozenset[int]) -> bool:
    """Whether a product is one of many tokens with a matrix that is no adapter's. Sizes may be symbols of a compiler:
    they are compared, and not read."""
    matrices = [each for each in args if isinstance(each, Tensor) and each.dim() >= 2]
    if op.name().startswith("aten::_scaled"):
        matrices = matrices[:2]  # scales follow
    if len(matrices) < 2 or matrices[-2].shape[0] == 1:  # sums over tokens are products with one row
        return False
    return all(matrices[-1].shape[-2] != rank for rank in ranks)


def _adapter_ranks(layers: list[nn.Module]) -> Iterator[int]:
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and "lora_B" in name.split("."):
                yield module.in_features


def _overloads(names: tuple[str, ...]) -> Iterator[OpOverload]:
    """The operations of these names that this release of torch has."""
    for name in names:
        space, _, short = name.partition("::")
        packet = getattr(getattr(torch.ops, space), short, None)
        if packet is not None:
            yield from (getattr(packet, overload) for overload in packet.overloads())
