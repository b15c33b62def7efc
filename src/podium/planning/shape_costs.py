# SPDX-License-Identifier: Apache-2.0
"""What generating, updating and publishing cost by the shape of the model and the peaks of the device. Torch-free.

A training step is products, attention, and passes over memory (kept activations, logits, optimizer state), one after
the other. A decoding step reads the weights once and the keys and values of every lane, and each layer takes a fixed
time beside that. The shares of the peaks are the device's (devices.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from podium.controller.simulation.costs import CostModel, GenerationCost, LogNormal, UpdateCost
from podium.planning.activations import layer_bytes
from podium.planning.devices import Device
from podium.planning.model_shape import ModelShape

_TILE = 128  # attention kernels compute whole tiles of queries and keys
_FLOAT = 4
# AdamW reads and writes master and moments, reads the gradient and writes the compute copy.
_OPTIMIZER_BYTES = 28
# Passes over float32 logits of a head's chunk: written, read for statistics and gradient; the gradient, in the compute
# dtype, is written and read by two products.
_LOGITS_PASSES, _LOGITS_GRADIENT_PASSES = 3, 3
# An adapter's small products pass over the input and the output of their layer: forward they read the input, write
# their own output and add it; backward they read the gradient twice and the input once, and add to its gradient.
_ADAPTER_PASSES = 6
_NO_TIME = LogNormal(median=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The parts of one training step of one device, in seconds."""

    products_s: float
    attention_s: float
    activations_s: float
    logits_s: float
    optimizer_s: float
    collectives_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Of the step."""
        return self.token_s_sum + self.optimizer_s + self.collectives_s

    @property
    def token_s_sum(self) -> float:
        """What grows with the tokens."""
        return self.products_s + self.attention_s + self.activations_s + self.logits_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The episodes of a controlled run, as far as they are known before it runs."""

    prompt_tokens: float
    answer_tokens: LogNormal
    samples_per_prompt: int
    grading_s: LogNormal = _NO_TIME
    uniform_share: float = 0.0

    @property
    def mean_answer(self) -> float:
        """Mean tokens of an answer, below its cap."""
        answer = self.answer_tokens
        return min(answer.median * math.exp(answer.sigma**2 / 2), answer.cap)

    @property
    def mean_context(self) -> float:
        """Tokens in the cache of a running lane, on average over its answer."""
        return self.prompt_tokens + self.mean_answer / 2

    @property
    def mean_length(self) -> float:
        """Tokens of an episode."""
        return self.prompt_tokens + self.mean_answer


def training_step(
    shape: ModelShape, device: Device, lengths: Sequence[float], *, head_tokens: float | None = None,
    world: int = 1, checkpointed: bool = False, watches_entropy: bool = False, itemsize: int | None = None,
) -> StepTime:  # fmt: skip
    """One update of packed documents of these lengths on one of `world` devices, which hold `lengths` each. Sharded
    weights are gathered in forward and backward, and gradients are summed once; what is not hidden behind computation
    counts."""
    efficiency, size = device.efficiency, itemsize or _itemsize(device)
    tokens = float(sum(lengths))
    head = tokens if head_tokens is None else head_tokens
    flops = matrix_flops(shape, tokens, head)
    if checkpointed:  # the second forward
        flops += matrix_flops(shape, tokens, 0.0) / 3
    matrix = device.matrix_flops * efficiency.matrix
    attention = attention_flops(shape, lengths) * (4 / 3 if checkpointed else 1.0)
    copying = device.bandwidth * efficiency.copying
    longest = int(max(lengths, default=0))
    kept = layer_bytes(shape, length=longest, itemsize=size, compiled=device.kind == "cuda") * shape.num_layers
    kept_passes = kept * efficiency.activation_passes + _adapter_bytes(shape, size)
    logits = head * shape.vocab_rows if shape.num_labels is None else 0.0
    passes = _LOGITS_PASSES + (1 if watches_entropy else 0)
    products_s = flops / matrix
    trained = shape.trained_parameters / world
    collectives_s = 0.0
    if world > 1:
        moved = (2 * size * shape.num_parameters + _FLOAT * shape.trained_parameters) * (world - 1) / world
        collectives_s = max(0.0, moved / device.link - products_s)
    return StepTime(
        products_s=products_s,
        attention_s=attention / (device.matrix_flops * efficiency.attention),
        activations_s=tokens * kept_passes / copying,
        logits_s=logits * (_FLOAT * passes + size * _LOGITS_GRADIENT_PASSES) / copying,
        optimizer_s=_OPTIMIZER_BYTES * trained / copying,
        collectives_s=collectives_s,
    )


def matrix_flops(shape: ModelShape, tokens: float, head_tokens: float) -> float:
    """Products of forward and backward, without attention."""
    cost = shape.cost()
    body = 6.0 * cost.trained_matrix + 4.0 * cost.frozen_matrix
    return body * tokens + (6.0 if cost.head_trained else 4.0) * cost.head_matrix * head_tokens


def attention_flops(shape: ModelShape, lengths: Sequence[float]) -> float:
    """Forward and backward of attention in whole tiles: a document of 130 tokens costs two rows of them."""
    per_pair = 12.0 * shape.query_width
    return sum(per_pair * _tiled_pairs(length, window) for length in lengths for window in shape.windows)


def _tiled_pairs(length: float, window: int | None) -> float:
    rows = math.ceil(length / _TILE)
    reach = rows if window is None else min(rows, math.ceil(window / _TILE) + 1)
    tiles = reach * (reach + 1) / 2 + (rows - reach) * reach
    return tiles * _TILE * _TILE


def generation_cost(
    shape: ModelShape, device: Device, context: float, *, itemsize: int | None = None
) -> GenerationCost:
    """Decoding with lanes of `context` tokens on average, and the speed of prefill."""
    efficiency, size = device.efficiency, itemsize or _itemsize(device)
    reading = device.bandwidth * efficiency.decoding
    cached = sum(min(context, window or context) for window in shape.windows) * 2 * shape.key_width * size
    weights = shape.active_parameters() * size
    fixed_s = shape.num_layers * efficiency.decode_layer_s + efficiency.decode_s
    computing_s = 0.0
    if efficiency.decode_matrix:
        computing_s = 2.0 * shape.active_parameters() / (device.matrix_flops * efficiency.decode_matrix)
    prefill = matrix_flops(shape, 1.0, 0.0) / 3.0
    return GenerationCost(
        weights_s=weights / reading + fixed_s,
        lane_s=cached / reading + computing_s,
        prefill_tokens_s=device.matrix_flops * efficiency.matrix / prefill,
    )


def publish_s(shape: ModelShape, device: Device, *, itemsize: int | None = None) -> float:
    """New weights for generators with devices of their own: sent once, and verified on both sides."""
    size = shape.num_parameters * (itemsize or _itemsize(device))
    if shape.has_adapter:
        size = shape.trained_parameters * (itemsize or _itemsize(device))
    return size / device.link + 2 * size / (device.bandwidth * device.efficiency.copying)


def cost_model(
    shape: ModelShape, device: Device, workload: Workload, *, layout: Literal["colocated", "split", "elastic"],
    num_learners: int = 1, checkpointed: bool = False, itemsize: int | None = None,
) -> CostModel:  # fmt: skip
    """Costs for the simulated cluster. An update trains prompts with their answers, and the head sees answers only. The
    simulator counts tokens of answers, so the cost of a token includes its share of the prompt."""
    length, answer = workload.mean_length, workload.mean_answer
    # Costs of a token are linear, so any number of episodes tells them.
    step = training_step(
        shape, device, [length] * 64, head_tokens=64 * answer, world=num_learners, checkpointed=checkpointed,
        watches_entropy=True, itemsize=itemsize,
    )  # fmt: skip
    constant_s = device.efficiency.update_s + step.optimizer_s + step.collectives_s
    generation = generation_cost(shape, device, workload.mean_context, itemsize=itemsize)
    # The prompts of a group are read once and shared; their prefill is spread over the answers' tokens.
    prefill_s = workload.prompt_tokens / workload.samples_per_prompt / generation.prefill_tokens_s
    generation = replace(generation, lane_s=generation.lane_s + prefill_s / max(answer, 1.0))
    return CostModel(
        generation=generation,
        answer_tokens=workload.answer_tokens,
        update=UpdateCost(token_s=step.token_s_sum / (64 * answer), constant_s=constant_s),
        grading_s=workload.grading_s,
        publish_s=publish_s(shape, device, itemsize=itemsize) if layout != "colocated" else 0.0,
        switch_s=device.efficiency.switch_s / 2 if layout != "split" else 0.0,  # each way
        uniform_share=workload.uniform_share,
    )


def _adapter_bytes(shape: ModelShape, itemsize: int) -> float:
    """Of one token in all layers: A is [rank, inputs] and B is [outputs, rank]."""
    widths = sum(max(each.shape) * each.count for each in shape.tensors if each.part == "adapter")
    return _ADAPTER_PASSES * itemsize * widths


def _itemsize(device: Device) -> int:
    return 2 if device.kind == "cuda" else 4
