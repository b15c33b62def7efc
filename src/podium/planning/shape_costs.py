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
from podium.planning.collectives import seconds_of, step_collectives
from podium.planning.devices import Device
from podium.planning.model_shape import ModelShape
from podium.planning.tensor_shapes import divided
from podium.recipe.policy_mesh import MeshSizes
from podium.recipe.schema import ActivationCheckpointing

_TILE = 128  # attention kernels compute whole tiles of queries and keys
_FLOAT = 4
# AdamW reads and writes master and moments.
_STATE_BYTES = 24
# Passes over float32 logits of a head's chunk: written, read for statistics and gradient; the gradient, in the compute
# dtype, is written and read by two products.
_LOGITS_PASSES, _LOGITS_GRADIENT_PASSES = 3, 3
# An adapter's small products pass over the input and the output of their layer: forward they read the input, write
# their own output and add it; backward they read the gradient twice and the input once, and add to its gradient.
_ADAPTER_PASSES = 6
# Sampling writes the float32 logits of a lane and reads them.
_SAMPLING_BYTES = 8
USUAL_PROMPT = 256  # tokens; before a run nothing is known of its prompts
_NO_TIME = LogNormal(median=0.0)
_EPISODES = 64  # of which the cost of a token is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The parts of one training step of one device, in seconds."""

    products_s: float
    attention_s: float
    activations_s: float
    logits_s: float
    optimizer_s: float
    sums_s: float = 0.0  # of the gradients of several micro-batches
    collectives_s: float = 0.0  # that computation does not hide
    moved_s: float = 0.0  # all of them, hidden or not

    @property
    def total_s(self) -> float:
        """Of the step."""
        return self.token_s_sum + self.constant_s

    @property
    def constant_s(self) -> float:
        """What does not grow with the tokens."""
        return self.optimizer_s + self.sums_s + self.collectives_s

    @property
    def token_s_sum(self) -> float:
        """What grows with the tokens."""
        return self.products_s + self.attention_s + self.activations_s + self.logits_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
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
    world: int = 1, passes: int = 1, checkpointing: ActivationCheckpointing = "none", watches_entropy: bool = False,
    itemsize: int | None = None, mesh: MeshSizes | None = None,
) -> StepTime:  # fmt: skip
    """One update of packed documents of these lengths on one of `world` devices, which hold `lengths` each, in so many
    micro-batches (`passes`). Each of them gathers sharded weights in forward and backward, and sums gradients over the
    devices; what is not hidden behind computation counts. `mesh`: the axes of the devices, instead of `world`, which
    shard; ranks that share their data share its computation."""
    mesh = mesh or MeshSizes(shard=world)
    world, sharers = mesh.devices, mesh.devices // mesh.data_ranks
    efficiency, size = device.efficiency, itemsize or _itemsize(device)
    tokens = float(sum(lengths))
    head = tokens if head_tokens is None else head_tokens
    flops = matrix_flops(shape, tokens, head)
    if checkpointing in ("layers", "all_but_attention"):  # the second forward
        flops += matrix_flops(shape, tokens, 0.0) / 3
    matrix = device.matrix_flops * efficiency.matrix
    attention = attention_flops(shape, lengths) * (4 / 3 if checkpointing == "layers" else 1.0)
    copying = device.bandwidth * efficiency.copying
    longest = int(max(lengths, default=0))
    part = divided(shape, mesh.tensor)
    kept = layer_bytes(part, length=longest, itemsize=size, compiled=device.kind == "cuda") * shape.num_layers
    kept_passes = kept * efficiency.activation_passes + _adapter_bytes(shape, size)
    logits = head * shape.vocab_rows if shape.num_labels is None else 0.0
    over_logits = _LOGITS_PASSES + (1 if watches_entropy else 0)
    products_s = flops / matrix / sharers
    trained = shape.trained_parameters / mesh.parts
    waited_s, moved_s = seconds_of(
        step_collectives(
            shape, mesh, passes=passes, tokens=tokens / passes, itemsize=size, checkpointed=checkpointing != "none",
            length=min(longest, tokens / passes),
        ),
        device,
    )  # fmt: skip
    return StepTime(
        products_s=products_s,
        attention_s=attention / (device.matrix_flops * efficiency.attention) / sharers,
        activations_s=tokens * kept_passes / copying / mesh.context,
        logits_s=logits / sharers * (_FLOAT * over_logits + size * _LOGITS_GRADIENT_PASSES) / copying,
        optimizer_s=_optimizer_bytes(size, sharded=world > 1, passes=passes) * trained / copying,
        sums_s=_sums_bytes(shape, size, parts=mesh.parts, sharded=world > 1, passes=passes) / copying,
        collectives_s=waited_s + max(0.0, moved_s - products_s),
        moved_s=waited_s + moved_s,
    )


def gathering_s(shape: ModelShape, device: Device, *, world: int, passes: int, itemsize: int | None = None) -> float:
    """Collectives of one update, hidden or not: every micro-batch gathers sharded layers twice and what is outside of
    them once, and sums gradients in float32."""
    size = itemsize or _itemsize(device)
    found = step_collectives(shape, MeshSizes(shard=world), passes=passes, tokens=0.0, itemsize=size)
    return sum(seconds_of(found, device))


def scoring_s(shape: ModelShape, device: Device, lengths: Sequence[float], *, head_tokens: float) -> float:
    """Log-probs of these documents: a forward pass, whose logits are written and read once."""
    step, cost = training_step(shape, device, lengths, head_tokens=head_tokens), shape.cost()
    body = 2.0 * (cost.trained_matrix + cost.frozen_matrix) * sum(lengths)
    products_s = (body + 2.0 * cost.head_matrix * head_tokens) / (device.matrix_flops * device.efficiency.matrix)
    logits = head_tokens * shape.vocab_rows * 2 * _FLOAT if shape.num_labels is None else 0.0
    logits_s = logits / (device.bandwidth * device.efficiency.copying)
    return products_s + (step.attention_s + step.activations_s) / 3 + logits_s


def _optimizer_bytes(itemsize: int, *, sharded: bool, passes: int) -> int:
    """Of one trained parameter: the gradient is read for its norm and for the update, and masters that are no
    parameters are copied to those."""
    has_copy = not sharded and itemsize != _FLOAT
    gradient = itemsize if has_copy and passes == 1 else _FLOAT
    return _STATE_BYTES + 2 * gradient + (itemsize if has_copy else 0)


def _sums_bytes(shape: ModelShape, itemsize: int, *, parts: int, sharded: bool, passes: int) -> float:
    """Gradients of several micro-batches are added up in float32, and the gradient of the head is begun and cast in
    each. A single device turns the first one into float32, and reads and writes the sum with every further one; sharded
    gradients are float32 and added in place."""
    if passes == 1:
        return 0.0
    if not sharded and itemsize != _FLOAT:
        each = (itemsize + _FLOAT) + (passes - 1) * (itemsize + 2 * _FLOAT)
    else:
        each = (passes - 1) * 3 * _FLOAT
    cost = shape.cost()
    head = cost.head_matrix * (2 * _FLOAT + itemsize) * (passes - 1) if cost.head_trained else 0
    return each * shape.trained_parameters / parts + head


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
    sampling_s = _SAMPLING_BYTES * shape.vocab_rows / (device.bandwidth * efficiency.copying)
    prefill = matrix_flops(shape, 1.0, 0.0) / 3.0
    return GenerationCost(
        weights_s=weights / reading + fixed_s,
        lane_s=cached / reading + computing_s + sampling_s,
        prefill_tokens_s=device.matrix_flops * efficiency.matrix / prefill,
    )


def first_tokens_s(shape: ModelShape, device: Device) -> float:
    """What a generation takes beside its decoding steps and the products of its prompts: messages, and a step whose
    kernels are started one by one."""
    return device.efficiency.rollout_s + shape.num_layers * device.efficiency.prefill_layer_s


def publish_s(shape: ModelShape, device: Device, *, devices: int = 2, itemsize: int | None = None) -> float:
    """New weights for generators with devices of their own: sent once, and verified on both sides. `devices`: of the
    whole run."""
    size = shape.num_parameters * (itemsize or _itemsize(device))
    if shape.has_adapter:
        size = shape.trained_parameters * (itemsize or _itemsize(device))
    return size / device.link_between(devices) + 2 * size / (device.bandwidth * device.efficiency.copying)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateShape:
    """How a learner goes through a batch, and what changes hands on a device that it shares with a generator."""

    num_learners: int = 1
    episodes: float = 64.0  # of a device in one optimizer step
    passes: int = 1  # their micro-batches
    optimizer_steps: int = 1
    epochs: int = 1
    scores: int = 0  # forward passes beside, of models of the same shape
    checkpointing: ActivationCheckpointing = "none"
    update_bytes: int = 0  # what an update takes and gives back
    cache_bytes: int = 0  # keys and values, and copies of sharded weights

    @property
    def changing_bytes(self) -> int:
        """What leaves the device and comes to it between an update and the next generation."""
        return self.update_bytes + self.cache_bytes


_PLAIN = UpdateShape()


def cost_model(
    shape: ModelShape, device: Device, episodes: Episodes, *, layout: Literal["colocated", "split", "elastic"],
    update: UpdateShape = _PLAIN, devices: int = 2, itemsize: int | None = None,
) -> CostModel:  # fmt: skip
    """Costs for the simulated cluster. An update trains prompts with their answers, and the head sees answers only. The
    simulator counts tokens of answers, so the cost of a token includes its share of the prompt. A device that is shared
    gives the memory of one side to the other, which takes time: an update begins with none of its own. `devices`: of
    the whole run."""
    length, answer, efficiency = episodes.mean_length, episodes.mean_answer, device.efficiency
    lengths, head_tokens = [length] * _EPISODES, _EPISODES * answer
    step = training_step(
        shape, device, lengths, head_tokens=head_tokens, world=update.num_learners, passes=update.passes,
        checkpointing=update.checkpointing, watches_entropy=True, itemsize=itemsize,
    )  # fmt: skip
    token_s = update.epochs * step.token_s_sum
    if update.scores:
        token_s += update.scores * scoring_s(shape, device, lengths, head_tokens=head_tokens)
    is_shared = layout != "split"
    taken_s = update.update_bytes * efficiency.memory_s if is_shared else 0.0
    # Collectives hide behind the products of the batch that there is.
    moved_s = gathering_s(shape, device, world=update.num_learners, passes=update.passes, itemsize=itemsize)
    waited_s = max(0.0, moved_s - step.products_s * update.episodes / _EPISODES)
    each_s = step.optimizer_s + step.sums_s + waited_s
    constant_s = efficiency.update_s + taken_s + update.epochs * update.optimizer_steps * each_s
    generation = generation_cost(shape, device, episodes.mean_context, itemsize=itemsize)
    # The prompts of a group are read once and shared; their prefill is spread over the answers' tokens.
    prefill_s = episodes.prompt_tokens / episodes.samples_per_prompt / generation.prefill_tokens_s
    generation = replace(generation, lane_s=generation.lane_s + prefill_s / max(answer, 1.0))
    # Before its first tokens a generation is a pause of its devices.
    latency_s = first_tokens_s(shape, device)
    switch_s = efficiency.switch_s + update.changing_bytes * efficiency.memory_s
    if update.num_learners > 1:  # every device gathers a whole copy of the weights
        copied = shape.num_parameters * (itemsize or _itemsize(device))
        switch_s += copied / device.link_between(update.num_learners)
    published_s = publish_s(shape, device, devices=devices, itemsize=itemsize)
    return CostModel(
        generation=generation,
        answer_tokens=episodes.answer_tokens,
        update=UpdateCost(token_s=token_s / head_tokens, constant_s=constant_s),
        grading_s=replace(episodes.grading_s, median=episodes.grading_s.median + efficiency.grading_s),
        publish_s=published_s + latency_s if layout != "colocated" else 0.0,
        switch_s=(switch_s + latency_s) / 2 if is_shared else 0.0,  # each way
        uniform_share=episodes.uniform_share,
    )


def _adapter_bytes(shape: ModelShape, itemsize: int) -> float:
    """Of one token in all layers: A is [rank, inputs] and B is [outputs, rank]."""
    widths = sum(max(each.shape) * each.count for each in shape.tensors if each.part == "adapter")
    return _ADAPTER_PASSES * itemsize * widths


def _itemsize(device: Device) -> int:
    return 2 if device.kind == "cuda" else 4
