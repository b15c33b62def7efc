# SPDX-License-Identifier: Apache-2.0
"""Collectives of one training step: which there are, how many bytes they move, and how long that takes. Torch-free.

The counts follow the engine: FSDP gathers each layer for the forward and for the backward pass and reduces its
gradient, models/tensor_axis.py sums over a tensor group, models/head_kernels.py exchanges numbers of the head,
models/context_parallel.py and ring_attention.py exchange what attention needs, models/expert_parallel.py sends tokens
to their experts. A dry run (podium/dry_run) counts the same collectives in the engine itself; the tests compare
both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from podium.planning.activations import HEAD_CHUNK
from podium.planning.devices import Device
from podium.planning.model_shape import ModelShape, TensorShape
from podium.planning.rings import Ring, counted_rank
from podium.planning.tensor_shapes import divided, divides_inputs, divides_outputs, with_own_experts
from podium.recipe.policy_mesh import MeshSizes

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "send"]
EXPERT_SHARD = "expert_shard"  # ranks among which FSDP shards the experts that they have in common
_FLOAT = 4
_FLAGS = 5  # loss, squared norm of the gradient, and three flags: one sum over all ranks a step
_COUNT = 8  # how many tokens go to an expert
_ROUTER_COLUMNS = 3  # beside counts and probabilities of each expert
_HIDDEN = ("shard", EXPERT_SHARD, "replicate", "all")  # FSDP moves what comes next while a layer computes
# Of the tensor that a collective is about, so much crosses a rank's link: with n ranks (n - 1) / n of it, an all-reduce
# twice. A broadcast or a message passes on all of it.
_PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind over groups of one axis, in one step of one rank."""

    kind: Kind
    axis: str  # replicate, shard, tensor, ...; all: every rank
    ranks: int  # of a group
    span: int  # ranks from the first to the last of a group, if these are numbered machine by machine
    calls: int
    num_bytes: int  # of the whole tensors: what is gathered, reduced or summed

    @property
    def sent_bytes(self) -> float:
        """What one rank sends, if the ranks form a ring."""
        passes = _PASSES.get(self.kind)
        return float(self.num_bytes) if passes is None else passes * self.num_bytes * (self.ranks - 1) / self.ranks

    def crosses_machines(self, device: Device) -> bool:
        """Whether a group has ranks on several machines that a network joins."""
        return device.network is not None and self.span > device.per_machine

    def seconds(self, device: Device) -> float:
        """Over the links of the devices within a machine (NVLink or the like), or over the network. There a ring passes
        each machine once, and the ranks of the group on that machine carry it together. In an all-to-all each of them
        sends its own values to all other machines."""
        if device.network is None or not self.crosses_machines(device):
            return self.sent_bytes / device.link
        together = max(1, self.ranks * device.per_machine // self.span)
        if self.kind == "all-to-all":
            beyond = self.num_bytes * (self.ranks - together) / self.ranks
            return max(beyond / min(device.link, device.network), (self.sent_bytes - beyond) / device.link)
        return self.sent_bytes / min(device.link, device.network * together)

    def times(self, count: int) -> Collective:
        """So many times as often."""
        return replace(self, calls=self.calls * count, num_bytes=self.num_bytes * count)


def added_up(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """One for each kind and axis, without groups of one rank."""
    sums: dict[tuple[str, str, int], Collective] = {}
    for each in collectives:
        if each.ranks < 2 or not each.calls:
            continue
        key = (each.axis, each.kind, each.ranks)
        before = sums.get(key)
        sums[key] = each if before is None else replace(
            before, calls=before.calls + each.calls, num_bytes=before.num_bytes + each.num_bytes
        )  # fmt: skip
    return tuple(sums[key] for key in sorted(sums))


def span_of(axis: str, ranks: int, sizes: MeshSizes) -> int:
    """From the first to the last rank of a group of this axis: the tensor axis varies fastest over ranks, then context,
    and a group of `shard` has all ranks that hold one copy of the model. Those of `experts` are neighbours."""
    if axis == "tensor":
        return ranks
    if axis in ("context", "experts"):
        return ranks * sizes.tensor
    return sizes.parts if axis in ("shard", EXPERT_SHARD) else sizes.devices


def seconds_of(collectives: Iterable[Collective], device: Device) -> tuple[float, float]:
    """(those of tensor, context and experts, for which computation waits, all others)."""
    apart = hidden = 0.0
    for each in collectives:
        if each.axis in _HIDDEN:
            hidden += each.seconds(device)
        else:
            apart += each.seconds(device)
    return apart, hidden


def step_collectives(
    shape: ModelShape, sizes: MeshSizes, *, passes: int, tokens: float, itemsize: int, checkpointed: bool = False,
    length: float | None = None,
) -> tuple[Collective, ...]:  # fmt: skip
    """Of one optimizer step in so many micro-batches (`passes`) of `tokens` on each group of ranks with its own data,
    in documents of `length` (default: one). Every token is trained, and routers send as many tokens to each rank. Of
    the first rank; where keys travel, of the one that sends most."""
    part = divided(shape, sizes.tensor)
    in_micro_batch = list(_of_shards(part, sizes, itemsize))
    own_tokens = -(-int(tokens) // sizes.context)
    if sizes.tensor > 1:
        in_micro_batch += _of_tensors(shape, sizes, own_tokens, itemsize, checkpointed)
    if sizes.context > 1:
        ring = Ring(context=sizes.context, tokens=int(tokens), length=int(length or tokens))
        in_micro_batch += _of_context(part, sizes, ring, itemsize, checkpointed)
    if sizes.experts > 1:
        in_micro_batch += _of_experts(shape, sizes, own_tokens, itemsize, checkpointed)
    found = [each.times(passes) for each in in_micro_batch]
    if sizes.tensor > 1:
        found += _of_summed_gradients(part, sizes)
    floats = _FLAGS
    if shape.num_experts:
        floats += _num_sparse(shape) * (2 * shape.num_experts + _ROUTER_COLUMNS) + 1
    everyone = "shard" if sizes.sharding == sizes.devices else "all"
    found.append(_collective("all-reduce", everyone, sizes.devices, sizes, 1, _FLOAT * floats))
    return added_up(found)


def _of_shards(part: ModelShape, sizes: MeshSizes, itemsize: int) -> Iterator[Collective]:
    """FSDP in one micro-batch: each layer is gathered twice, what is outside of the layers once; gradients are reduced
    in float32, and then summed over `replicate`. A rank with its own part of the experts gathers that one, over the
    ranks that have the same part."""
    own = with_own_experts(part, sizes.experts)
    experts = [each for each in own.tensors if each.part == "experts" and sizes.experts > 1]
    others = [each for each in own.tensors if each not in experts]
    layers = [each for each in others if each.in_layer]
    outside = [each for each in others if not each.in_layer]
    yield from _of_units(layers, "shard", sizes.sharding, sizes, units=part.num_layers, gathers=2, itemsize=itemsize)
    yield from _of_units(outside, "shard", sizes.sharding, sizes, units=1, gathers=1, itemsize=itemsize)
    if experts:
        yield from _of_units(
            experts, EXPERT_SHARD, sizes.sharding // sizes.experts, sizes, units=_num_sparse(part), gathers=2,
            itemsize=itemsize,
        )  # fmt: skip


def _of_units(
    tensors: Sequence[TensorShape], axis: str, ranks: int, sizes: MeshSizes, *, units: int, gathers: int, itemsize: int
) -> Iterator[Collective]:
    """Of all units of one kind: what FSDP gathers and reduces at once."""
    gathered = sum(_padded(each, ranks) for each in tensors)
    yield _collective("all-gather", axis, ranks, sizes, gathers * units, gathers * gathered * itemsize)
    reduced = sum(_padded(each, ranks) for each in tensors if each.is_trained)
    if reduced:
        yield _collective("reduce-scatter", axis, ranks, sizes, units, reduced * _FLOAT)
        yield _collective("all-reduce", "replicate", sizes.replicate, sizes, units, reduced * _FLOAT // ranks)


def _of_context(
    part: ModelShape, sizes: MeshSizes, ring: Ring, itemsize: int, checkpointed: bool
) -> Iterator[Collective]:
    """Context parallelism in one micro-batch. Where the heads divide, queries, keys and values are exchanged at once,
    and then the outputs: forward and backward, and again in a recomputed layer. Else keys and values travel, in
    backward with their gradients in float32. Of the head the ranks gather two numbers of each token, or its scores,
    whose gradients they reduce."""
    ranks, forwards = sizes.context, 2 if checkpointed else 1
    own, head_bytes = ring.stretch, part.head_dim * itemsize
    if part.num_heads % ranks == 0:
        copies = ranks // math.gcd(part.num_kv_heads, ranks)
        heads = 2 * part.num_heads + 2 * part.num_kv_heads * copies  # queries and outputs, keys and values
        times = (forwards + 1) * part.num_layers
        yield _collective("all-to-all", "context", ranks, sizes, 2 * times, times * heads * own * head_bytes)
    else:
        at, both = counted_rank(ranks), 2 * part.num_kv_heads * own
        keys = (forwards + 1) * sum(ring.sent_keys(at, window) for window in part.windows)
        gradients = sum(ring.sent_gradients(at, window) for window in part.windows)
        num_bytes = both * (keys * head_bytes + gradients * part.head_dim * _FLOAT)
        yield _collective("send", "context", ranks, sizes, keys + gradients, num_bytes)
    gathered = ranks * own * _FLOAT
    if part.num_labels is None:
        yield _collective("all-gather", "context", ranks, sizes, 2, 2 * gathered)
    else:
        yield _collective("all-gather", "context", ranks, sizes, 1, gathered * part.num_labels)
        yield _collective("reduce-scatter", "context", ranks, sizes, 1, gathered * part.num_labels)


def _of_experts(
    shape: ModelShape, sizes: MeshSizes, own_tokens: int, itemsize: int, checkpointed: bool
) -> Iterator[Collective]:
    """Expert parallelism in one micro-batch: in each layer with experts the ranks exchange how many tokens go to each
    of them, then the hidden states, and then the outputs; backward the gradients of both. A recomputed layer exchanges
    again. The first rank gets what does not divide by the ranks. Ranks of a tensor group share what they send."""
    forwards, layers = 2 if checkpointed else 1, _num_sparse(shape)
    sent = own_tokens * shape.experts_per_token // sizes.tensor
    got = -(-sent // sizes.experts) * sizes.experts
    calls = layers * (3 * forwards + 2)
    counts = forwards * shape.num_experts // sizes.tensor * _COUNT
    num_bytes = (forwards + 1) * (sent + got) * shape.hidden * itemsize + counts
    yield _collective("all-to-all", "experts", sizes.experts, sizes, calls, layers * num_bytes)


def _of_tensors(
    shape: ModelShape, sizes: MeshSizes, tokens: int, itemsize: int, checkpointed: bool
) -> Iterator[Collective]:
    """Tensor parallelism in one micro-batch: a matrix divided by its inputs sums its outputs in the forward pass. Those
    divided by their outputs sum the gradient of their input, in attention and in the MLP once for all. A recomputed
    layer sums again, but for the last sum, which nothing in the layer needs. Experts sum their outputs, and the
    gradients of their input and of their weights."""
    states = tokens * shape.hidden * itemsize
    linear = [each for each in shape.tensors if each.in_layer and len(each.shape) == 2 and each.part != "adapter"]
    inputs = sum(
        max((each.count for each in linear if each.part == part and divides_outputs(each)), default=0)
        for part in ("attention", "mlp")
    )
    sparse = _num_sparse(shape)
    inputs += sparse
    by_inputs = sparse + sum(each.count for each in linear if divides_inputs(each))
    again = by_inputs - shape.num_layers if checkpointed else 0
    embedding = next(each for each in shape.tensors if each.part == "embedding")
    if not embedding.is_trained:  # nothing needs the gradient of the first layer's input
        inputs -= 1
    sums = inputs + by_inputs + again + (1 if embedding.shape[0] % sizes.tensor == 0 else 0)
    num_bytes = sums * states
    sums += sparse
    num_bytes += sparse * tokens * shape.experts_per_token * itemsize
    if shape.num_labels is None:  # of each chunk the largest score, then two sums; and the gradient of the states
        sums += 2 * math.ceil(tokens / HEAD_CHUNK) + 1
        num_bytes += states + 3 * _FLOAT * tokens
    yield _collective("all-reduce", "tensor", sizes.tensor, sizes, sums, num_bytes)


def _of_summed_gradients(part: ModelShape, sizes: MeshSizes) -> Iterator[Collective]:
    """Norms of heads are whole on each rank, which has the gradient of its own heads alone; so is the factor of an
    adapter that is not divided. All are summed at once."""
    norms = ("qk_norm", "q_norm", "k_norm")
    summed = [
        each
        for each in part.tensors
        if each.is_trained and (each.name in norms or (each.part == "adapter" and not _is_divided(each)))
    ]
    if summed:
        held = sum(each.numel_of_rank(sizes.parts // sizes.tensor) for each in summed)
        yield _collective("all-reduce", "tensor", sizes.tensor, sizes, 1, _FLOAT * held)


def _num_sparse(shape: ModelShape) -> int:
    """Layers with experts."""
    return next((each.count for each in shape.tensors if each.part == "experts"), 0)


def _is_divided(each: TensorShape) -> bool:
    return divides_outputs(each) or divides_inputs(each)


def _padded(each: TensorShape, ranks: int) -> int:
    """Elements that a group gathers: each rank sends as many rows as the one that has most."""
    return each.numel_of_rank(ranks) * ranks


def _collective(kind: Kind, axis: str, ranks: int, sizes: MeshSizes, calls: int, num_bytes: int) -> Collective:
    span = span_of(axis, ranks, sizes)
    return Collective(kind=kind, axis=axis, ranks=ranks, span=span, calls=calls, num_bytes=num_bytes)
