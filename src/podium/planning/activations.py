# SPDX-License-Identifier: Apache-2.0
"""Bytes that a forward pass keeps for the backward pass, and those of the head. Torch-free."""

# E hidden width · I width of the MLP · Q query heads × head width · K key-value heads × head width · V vocabulary rows

from __future__ import annotations

from typing import assert_never

from podium.planning.model_shape import ModelShape
from podium.recipe.schema import ActivationCheckpointing

HEAD_CHUNK = 4096  # of HeadSpec.chunk_tokens in models/head.py
LOGITS_CHUNK = 1024  # of HeadSpec.logits_chunk_tokens
_FLOAT = 4
_PLAIN_ATTENTION = ("gemma2", "gpt_oss")  # soft-capped scores and sinks have no fused kernel
_OFFLOADED_LAYERS = 3  # whose inputs are on the device where they wait in host memory
_FOUR_NORMS = ("gemma2", "gemma3_text")


def layer_bytes(shape: ModelShape, *, length: int, itemsize: int, compiled: bool) -> float:
    """Of one token in one layer. `length`: of its document, which counts where attention keeps its scores."""
    scores = 0.0
    if shape.family in _PLAIN_ATTENTION:
        scores = 2 * _FLOAT * shape.num_heads * length
    scales = 2 + (shape.num_heads + shape.num_kv_heads if shape.norms_queries else 0)
    statistics = _FLOAT * (shape.num_heads + scales)  # log-sums of attention, and of norms
    if compiled:
        return itemsize * _compiled_elements(shape) + statistics + scores
    return _eager_bytes(shape, itemsize) + statistics + scores


def _compiled_elements(shape: ModelShape) -> float:
    """What torch's compiler keeps of a layer. The counts agree with the peak memory of the 0.6B and 1.7B runs on an
    H200 (docs/planning.md); other families were not measured."""
    attention = (3 if shape.norms_queries else 2) * shape.query_width + 2 * shape.key_width
    return 5 * shape.hidden + 3 * shape.mlp_width + attention + _routed_elements(shape)


def _eager_bytes(shape: ModelShape, itemsize: int) -> float:
    """A norm keeps its input in float32 and the normalized input, a product its input. The MLP keeps gate, its
    activation, up and their product; attention keeps queries, keys, values and its output."""
    norms = 4 if shape.family in _FOUR_NORMS else 2
    norm = (_FLOAT + itemsize) * norms * shape.hidden + 2 * itemsize * shape.hidden
    attention = itemsize * (2 * shape.query_width + 2 * shape.key_width)
    if shape.norms_queries:
        attention += (_FLOAT + itemsize) * (shape.query_width + shape.key_width)
    return norm + attention + itemsize * (4 * shape.mlp_width + _routed_elements(shape))


def _routed_elements(shape: ModelShape) -> int:
    """Tokens are copied to each of their experts, and back."""
    return 2 * shape.experts_per_token * shape.hidden


def kept_bytes(
    shape: ModelShape, checkpointing: ActivationCheckpointing, *, length: int, itemsize: int, compiled: bool
) -> float:
    """Of one token in one layer, between its forward and its backward pass."""
    has_kernel = shape.family not in _PLAIN_ATTENTION
    attention = itemsize * shape.query_width + _FLOAT * shape.num_heads if has_kernel else 0.0  # and its log-sums
    match checkpointing:
        case "none":
            return layer_bytes(shape, length=length, itemsize=itemsize, compiled=compiled)
        case "layers":
            return itemsize * shape.hidden
        case "all_but_attention":
            return itemsize * shape.hidden + attention
        case "selective":
            return itemsize * (shape.hidden + _product_elements(shape)) + attention
        case other:
            assert_never(other)


def _product_elements(shape: ModelShape) -> int:
    """Outputs of the products of a layer: queries, keys, values and what attention gives to the residual; gate, up and
    down of the MLP, or of all experts of a token, and the router's logits."""
    downs = shape.experts_per_token or 1
    attention = shape.query_width + 2 * shape.key_width + shape.hidden
    return attention + 2 * shape.mlp_width + downs * shape.hidden + shape.num_experts


def activation_bytes(
    shape: ModelShape,
    tokens: int,
    *,
    length: int,
    itemsize: int,
    compiled: bool,
    checkpointing: ActivationCheckpointing = "none",
    offloaded: bool = False,
) -> int:
    """Of a micro-batch at the end of its forward pass. What checkpointing does not keep is computed again for one layer
    at a time. Of offloaded inputs a few are on the device: one leaves or comes back while the next one is needed."""
    layer = layer_bytes(shape, length=length, itemsize=itemsize, compiled=compiled)
    ends = (_FLOAT + 3 * itemsize) * shape.hidden  # the last norm, and the states before the head with their gradient
    kept = kept_bytes(shape, checkpointing, length=length, itemsize=itemsize, compiled=compiled)
    again = 0.0 if checkpointing == "none" else layer
    num_layers = min(shape.num_layers, _OFFLOADED_LAYERS) if offloaded else shape.num_layers
    return int(tokens * (kept * num_layers + again + ends))


def head_bytes(shape: ModelShape, tokens: int, *, itemsize: int, compiled: bool, divergence: bool = False) -> int:
    """Logits of the chunk, of the chunk before it and their gradients, and the sum of the head's own gradient."""
    if shape.num_labels is not None:
        return 0
    head = next((each for each in shape.tensors if each.part == "head"), None)
    weight = head or next(each for each in shape.tensors if each.part == "embedding")
    own = _FLOAT * weight.numel if weight.is_trained else 0
    if divergence:  # student's, teachers' and mixed distributions, and the gradient
        return 6 * _FLOAT * min(tokens, LOGITS_CHUNK) * shape.vocab_rows + own
    one = min(tokens, HEAD_CHUNK) * shape.vocab_rows
    chunks = 2 if tokens > HEAD_CHUNK else 1
    if compiled:
        return one * (chunks * _FLOAT + itemsize) + own
    # Eager float32 turns logits into their gradient in place, and logsumexp needs a copy of them.
    return one * _FLOAT * (chunks + 1) + own
