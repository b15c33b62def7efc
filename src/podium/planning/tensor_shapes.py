# SPDX-License-Identifier: Apache-2.0
"""The shape of the part of a model that one rank of a tensor axis has (models/tensor_parallel.py), or of a group that
divides experts. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from podium.planning.model_shape import ModelShape, TensorShape

# Divided by their outputs, which are rows of the weight, and by their inputs, which are its columns.
_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
_BY_INPUTS = ("o_proj", "down_proj")
_DENSE = ("attention", "mlp", "adapter")


def divides_outputs(each: TensorShape) -> bool:
    """Whether its outputs are divided: each rank has some rows of the weight. Of an adapter, its second factor is."""
    name, _, factor = each.name.partition(".")
    return each.part in _DENSE and name in _BY_OUTPUTS and factor in ("", "lora_B")


def divides_inputs(each: TensorShape) -> bool:
    """Whether its inputs are divided: each rank has some columns of the weight. Of an adapter, its first factor is."""
    name, _, factor = each.name.partition(".")
    return each.part in _DENSE and name in _BY_INPUTS and factor in ("", "lora_A")


def divided(shape: ModelShape, tensor: int) -> ModelShape:
    """What one of `tensor` ranks computes with: its heads, its part of the MLP and of the vocabulary. Of a mixture it
    has a part of the experts, which get their part of the tokens on average. Hidden states keep their width; copies of
    them for experts count whole, and so does a bias outside of experts, which no model has more than a few of."""
    if tensor == 1:
        return shape
    return replace(
        shape,
        vocab_rows=shape.vocab_rows // tensor if shape.num_labels is None else shape.vocab_rows,
        num_heads=shape.num_heads // tensor,
        num_kv_heads=shape.num_kv_heads // tensor,
        mlp_width=shape.mlp_width // tensor,
        tensors=tuple(_part(each, tensor) for each in shape.tensors),
    )


def with_own_experts(shape: ModelShape, experts: int) -> ModelShape:
    """What one of `experts` ranks that divide the experts of a mixture gathers and computes: its own ones
    (models/expert_parallel.py)."""
    tensors = (
        replace(each, shape=(each.shape[0] // experts, *each.shape[1:])) if each.part == "experts" else each
        for each in shape.tensors
    )
    return shape if experts == 1 else replace(shape, tensors=tuple(tensors))


def _part(each: TensorShape, tensor: int) -> TensorShape:
    rows, *columns = each.shape
    is_vocabulary = each.part == "embedding" or (each.part == "head" and each.name == "lm_head")
    if divides_outputs(each) or each.part == "experts" or (is_vocabulary and rows % tensor == 0):
        return replace(each, shape=(rows // tensor, *columns))
    if divides_inputs(each):
        return replace(each, shape=(rows, columns[0] // tensor))
    return each
