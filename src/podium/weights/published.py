# SPDX-License-Identifier: Apache-2.0
"""A trained model's weights for publishing: whole tensors in the compute dtype, without padding rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from podium.engine.mesh import Mesh
from podium.engine.parameters import TrainedParameter
from podium.engine.sharding import is_copy, local_box, local_tensor, reshard, whole_shape
from podium.models.buffers import persistent_buffers
from podium.models.causal_lm import PackedCausalLM, padded_parameters
from podium.models.lora import has_adapter
from podium.models.tensor_axis import TensorAxis
from podium.models.tensor_shards import Box
from podium.weights.fingerprints import Piece, piece_fingerprint, piece_fingerprints, unsigned
from podium.weights.versions import TensorSpec, WeightVersion
from podium.weights.weight_transfers import BUCKET_BYTES, large, plan_buckets

# Renamed in torch 2.13, which warns of the old name.
_gather_whole = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """One published tensor and this rank's part of it."""

    spec: TensorSpec
    dtype: torch.dtype
    tensor: Tensor  # the parameter itself: its storage may be swapped, the object stays
    box: Box
    num_rows: int  # of this rank's part on the tensor axis, padding included
    is_copy: bool  # another rank has the same part, and counts it
    axis: TensorAxis | None = None  # over which it is divided, beside FSDP's shards
    dim: int = 0  # in which the axis divides it

    @property
    def local(self) -> Tensor:
        return local_tensor(self.tensor)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group over which it is sharded; None if each rank has it whole."""
        if not isinstance(self.tensor, DTensor):
            return None
        mesh = self.tensor.device_mesh
        return mesh.get_group(mesh.ndim - 1)  # FSDP's last axis is the one that shards

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row of this rank's part on the tensor axis."""
        return tuple(self.tensor.shape[1:])


class PublishedWeights:
    """Reads the current weights where they are trained. A tied head is its embedding, named once. Frozen parameters and
    the buffers that a checkpoint holds are included. With an adapter, only the adapter is published: others have read
    the base from the same files. Methods marked "collective" run on all ranks of the mesh together."""

    def __init__(
        self,
        model: PackedCausalLM,
        trained: Sequence[TrainedParameter],
        mesh: Mesh,
        dtype: torch.dtype,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`dtype` is the model's compute dtype (tensors that it keeps in float32 are published in float32).
        `bucket_bytes` bounds the size gathered at a time (except for a single tensor that is larger)."""
        self._mesh, self._bucket_bytes = mesh, bucket_bytes
        reshard(model)
        padded = padded_parameters(model)
        chosen = {each.name for each in trained}
        parameters = {
            name: _of_parameter(
                name, parameter, padded.get(name), _published_dtype(model, parameter, dtype), model, mesh
            )
            for name, parameter in model.hf.named_parameters()
        }
        self._parts = [parameters[each.name] for each in trained]
        others = [part for name, part in parameters.items() if name not in chosen]
        others += [_of_buffer(name, buffer, mesh) for name, buffer in persistent_buffers(model.hf).items()]
        self._frozen = others if has_adapter(model.hf) else []
        self._parts += [] if self._frozen else others

    @property
    def manifest(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of each tensor, in order."""
        return tuple(part.spec for part in self._parts)

    @property
    def frozen(self) -> FrozenWeights:
        """Weights that do not change between versions, for a copy that has read no files."""
        return FrozenWeights(self._frozen, self._bucket_bytes)

    def describe(self, number: int) -> WeightVersion:
        """These weights as version `number`. Each rank computes fingerprints of its part. Collective."""
        return self._described(number, self._parts)

    def describe_frozen(self) -> WeightVersion:
        """Like `describe`, for weights that do not change: others use it to check that they read the same.
        Collective."""
        return self._described(0, self._frozen)

    @torch.no_grad()
    def _described(self, number: int, parts: Sequence[_Part]) -> WeightVersion:
        sums = piece_fingerprints([_own_rows(part) for part in parts], self._mesh.device)
        for index, part in enumerate(parts):
            if part.axis is not None and part.dim > 0:
                sums[index] = self._gathered(part, part.axis)
        fingerprints = unsigned(self._mesh.sum(sums))
        manifest = tuple(part.spec for part in parts)
        return WeightVersion(number=number, manifest=manifest, fingerprints=tuple(fingerprints))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in the manifest's order, on all ranks. Collective: all iterate to the end."""
        return _tensors(self._parts, self._bucket_bytes)

    def _gathered(self, part: _Part, axis: TensorAxis) -> Tensor:
        """Of whole rows, which one rank counts; other parts of a tensor have only a piece of each row. Collective."""
        local, whole = axis.gather(part.local, part.dim), Box.whole(part.spec.shape)
        if part.is_copy or axis.rank != 0:
            return torch.zeros((), dtype=torch.int64, device=self._mesh.device)
        box = Box((part.box.starts[0], *whole.starts[1:]), (part.box.stops[0], *whole.stops[1:]))
        return piece_fingerprint(local, box, part.spec.shape, part.dtype)


class FrozenWeights:
    """The base of an adapter, delivered like versions; empty without an adapter."""

    def __init__(self, parts: Sequence[_Part], bucket_bytes: int) -> None:
        self._parts, self._bucket_bytes = parts, bucket_bytes

    @property
    def manifest(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and shape of each tensor, in order."""
        return tuple(part.spec for part in self._parts)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: all iterate to the end."""
        return _tensors(self._parts, self._bucket_bytes)


def _own_rows(part: _Part) -> Piece | None:
    """What this rank counts by itself."""
    if part.is_copy or (part.axis is not None and part.dim > 0):
        return None
    return Piece.of_rows(part.local, part.box, part.spec.shape, part.dtype)


def _tensors(parts: Sequence[_Part], size: int) -> Iterator[tuple[str, Tensor]]:
    by_name = {part.spec.name: part for part in parts}
    for bucket in plan_buckets(tuple(part.spec for part in parts), size, alone_bytes=large(size)):
        yield from _whole([by_name[spec.name] for spec in bucket.specs])


def _of_parameter(
    name: str, parameter: Tensor, real_rows: int | None, dtype: torch.dtype, model: PackedCausalLM, mesh: Mesh
) -> _Part:
    split = model.split
    shape = whole_shape(name, parameter, split)
    division = None if split is None else split.divisions.get(name)
    return _Part(
        spec=TensorSpec(
            name=name, shape=shape if real_rows is None else (real_rows, *shape[1:]), dtype=_name_of(dtype)
        ),
        dtype=dtype,
        tensor=parameter,
        box=local_box(name, parameter, split),
        num_rows=parameter.shape[0] if shape else 1,
        is_copy=is_copy(name, parameter, mesh, split),
        axis=None if division is None else division.axis,
        dim=0 if division is None else division.dim,
    )


def _published_dtype(model: PackedCausalLM, parameter: Tensor, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, except for tensors that compute in another dtype than the embedding: these are not sharded."""
    embedding = model.hf.get_input_embeddings().weight
    same = isinstance(parameter, DTensor) if isinstance(embedding, DTensor) else parameter.dtype == embedding.dtype
    return dtype if same else parameter.dtype


def _of_buffer(name: str, buffer: Tensor, mesh: Mesh) -> _Part:
    """Buffers keep their dtype, as they do in every forward pass."""
    shape = tuple(buffer.shape)
    return _Part(
        spec=TensorSpec(name=name, shape=shape, dtype=_name_of(buffer.dtype)),
        dtype=buffer.dtype,
        tensor=buffer,
        box=Box.whole(shape),
        num_rows=shape[0] if shape else 1,
        is_copy=not mesh.is_main,
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def _whole(parts: Sequence[_Part]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one bucket. Sharded tensors are gathered in one collective for each group of ranks, as bytes in
    the published dtype."""
    by_group: dict[dist.ProcessGroup, list[_Part]] = {}  # experts have another one than the rest
    for part in parts:
        if part.group is not None:
            by_group.setdefault(part.group, []).append(part)
    gathered = {group: _Gathered(sharded) for group, sharded in by_group.items()}
    for part in parts:
        values = part.local.to(part.dtype) if part.group is None else gathered[part.group].whole(part)
        if part.axis is not None:
            values = part.axis.gather(values[: part.num_rows], part.dim)
        yield part.spec.name, values[: part.spec.shape[0]] if part.spec.shape else values


class _Gathered:
    """The shards of some tensors from all ranks: one row per rank, with one range per tensor."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        group = parts[0].group
        assert group is not None
        assert all(part.group == group for part in parts)
        self._world = group.size()
        self._stretches: dict[str, slice] = {}
        end = 0
        for part in parts:
            start = -(-end // 16) * 16
            end = start + self._rows_each(part) * _row_bytes(part)
            self._stretches[part.spec.name] = slice(start, end)
        mine = torch.empty(end, dtype=torch.uint8, device=parts[0].local.device)
        for part in parts:
            local = part.local.reshape(-1)
            mine[self._stretches[part.spec.name]].view(part.dtype)[: local.numel()].copy_(local)
        self._bytes = torch.empty(self._world, end, dtype=torch.uint8, device=mine.device)
        _gather_whole(self._bytes.view(-1), mine, group=group)

    def whole(self, part: _Part) -> Tensor:
        """All rows, including padding and the filling of the last ranks after them."""
        flat = self._bytes[:, self._stretches[part.spec.name]].reshape(-1)  # a view, where it is alone
        return flat.view(part.dtype).view(self._world * self._rows_each(part), *part.row_shape)

    def _rows_each(self, part: _Part) -> int:
        return -(-part.num_rows // self._world)


def _row_bytes(part: _Part) -> int:
    return math.prod(part.row_shape) * part.dtype.itemsize
