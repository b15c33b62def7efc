# SPDX-License-Identifier: Apache-2.0
"""This rank's position: device, rank, world, axes, and the collectives that the engine needs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from podium.engine.addresses import DeviceKind, Meeting
from podium.engine.meeting import join_default_group
from podium.errors import LaunchError
from podium.models.context_axis import ContextAxis
from podium.models.expert_axis import ExpertAxis, ExpertGroups
from podium.models.tensor_axis import TensorAxis
from podium.recipe import PlacementSection
from podium.recipe.policy_mesh import MeshSizes, nearest, section_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One rank among `world`. A world of one has no process group and no overhead, unless a test gives it one."""

    rank: int
    world: int
    device: torch.device
    # Of FSDP: `shard`, or `replicate` and `shard`; ranks of a context group shard too. Other tensor parts have others.
    devices: DeviceMesh | None
    tensor: TensorAxis | None = None  # ranks that compute one model together, on the same data
    context: ContextAxis | None = None  # ranks that compute parts of the same tokens
    experts: ExpertGroups | None = None  # ranks that hold the experts of a mixture between them, and exchange tokens
    expert_devices: DeviceMesh | None = None  # of FSDP, over ranks that hold the same experts

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether ranks meet in collectives, and FSDP holds the parameters."""
        return self.devices is not None

    @property
    def data_ranks(self) -> int:
        """Number of ranks that get different data."""
        return self.world // self._ranks_of_data

    @property
    def data_rank(self) -> int:
        """This rank's number among those; ranks of one tensor or context group have the same."""
        return self.rank // self._ranks_of_data

    @property
    def _ranks_of_data(self) -> int:
        return self._tensor_size * (1 if self.context is None else self.context.size)

    @property
    def _tensor_size(self) -> int:
        return 1 if self.tensor is None else self.tensor.size

    @property
    def token_rank(self) -> int:
        """This rank's number among those that compute different tokens; ranks of one tensor group have the same."""
        return self.rank // self._tensor_size

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank counts what its tokens give: one of a tensor group does, all of a context group do."""
        return self.tensor is None or self.tensor.rank == 0

    @property
    def speaks_for_data(self) -> bool:
        """Whether this rank counts what its data gives: one of a tensor group and of a context group does."""
        return self.counts_tokens and (self.context is None or self.context.rank == 0)

    @property
    def replica(self) -> int:
        """Which of the groups of ranks that each hold the whole model this rank belongs to."""
        return 0 if self.devices is None or self.devices.ndim == 1 else self.devices.get_local_rank(0)

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over all ranks."""
        if self.is_sharded:
            dist.all_reduce(values)
        return values

    def sum_of_data(self, values: Tensor) -> Tensor:
        """Element-wise sum over the ranks with different data, of values that the other ranks of their groups have
        too. On all ranks."""
        return self.sum(values if self.speaks_for_data else torch.zeros_like(values))

    def sum_of_tokens(self, values: Tensor) -> Tensor:
        """Element-wise sum over the ranks with different tokens, of values that a tensor group computes alike: losses
        and what objectives count. On all ranks."""
        return self.sum(values if self.counts_tokens else torch.zeros_like(values))

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Element-wise sum over the ranks with different tokens, for each tensor part by itself."""
        if self.tensor is None:
            return self.sum(values)
        assert self.devices is not None
        for axis in range(self.devices.ndim):
            dist.all_reduce(values, group=self.devices.get_group(axis))
        return values

    def gather(self, value: Any) -> list[Any]:
        """One small Python value from every rank, in rank order, on every rank."""
        if not self.is_sharded:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.is_sharded:
            dist.barrier()


def device_kind(placement: PlacementSection) -> DeviceKind:
    """`auto` is CUDA if there is a device."""
    if placement.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return placement.device


def check_devices(placement: PlacementSection, ranks: int) -> None:
    """Raises an error before anything starts if there are more ranks than devices."""
    kind = device_kind(placement)
    if kind == "cuda":
        available = torch.cuda.device_count()
        if available == 0:
            raise LaunchError(
                "placement.device: cuda is asked for and this machine has no CUDA device. Use cpu or auto."
            )
    else:
        available = os.cpu_count() or 1
    if ranks > available:
        what = "CUDA devices" if kind == "cuda" else "CPU cores"
        raise LaunchError(
            f"placement.devices: {ranks} ranks are asked for and this machine has {available} {what}. "
            f"Each rank needs one of its own; use --devices {available} or fewer."
        )


def check_tensor_groups(sizes: MeshSizes, *, first_rank: int, local_world: int) -> None:
    """Raises an error before anything starts if tensor groups do not end where this machine's ranks do: they add up
    activations in every layer, for which links between machines are too slow. `first_rank`: of this machine."""
    if first_rank % sizes.tensor == 0 and local_world % sizes.tensor == 0:
        return
    fits = frozenset(size for size in range(1, local_world + 1) if local_world % size == 0 and first_rank % size == 0)
    raise LaunchError(
        f"placement.policy.tensor: the {sizes.tensor} ranks of a tensor group share a machine, and this one has ranks "
        f"{first_rank} to {first_rank + local_world - 1} (LOCAL_WORLD_SIZE {local_world}). Start a multiple of "
        f"{sizes.tensor} ranks on each machine, or use placement.policy "
        f"{nearest(section_of(sizes), sizes.devices, fits)}."
    )


def join(
    placement: PlacementSection,
    *,
    rank: int,
    world: int,
    local_rank: int,
    meeting: Meeting | None = None,
    sizes: MeshSizes | None = None,
) -> Mesh:
    """Joins this rank: picks the device and, if there are several ranks, forms the process group at `meeting` or by
    torchrun's environment. `sizes`: of the mesh's axes; default: all ranks shard."""
    kind = device_kind(placement)
    device = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if world == 1:
        return Mesh(rank=0, world=1, device=device, devices=None)
    join_default_group(
        meeting,
        kind=kind,
        rank=rank,
        world=world,
        device=device,
        deadline_s=placement.timeout_s,
        timeout_s=placement.collective_s,
    )
    mesh = Mesh(
        rank=rank, world=world, device=device, devices=init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    )
    return mesh if sizes is None else with_axes(mesh, sizes, timeout_s=placement.collective_s)


def with_axes(mesh: Mesh, sizes: MeshSizes, *, timeout_s: float) -> Mesh:
    """The same ranks with these axes, all of which have joined one default process group. Collective."""
    assert sizes.devices == mesh.world
    # Ranks of a context group have different tokens and the same weights, so FSDP takes them as ranks that shard.
    ranks = torch.arange(mesh.world).view(sizes.replicate, sizes.shard * sizes.context, sizes.tensor)
    context = None
    if sizes.context > 1:
        group = _axis_group(ranks.view(sizes.data_ranks, sizes.context, sizes.tensor), 1, timeout_s)
        context = ContextAxis(group=group, rank=mesh.rank // sizes.tensor % sizes.context, size=sizes.context)
        context.sum(torch.zeros(1, device=mesh.device))  # NCCL wants all to meet before some send to some
    if ranks.shape[1] == mesh.world:
        return _with_experts(replace(mesh, context=context), sizes, timeout_s)
    devices = _of_fsdp(ranks, mesh, timeout_s)
    tensor = None
    if sizes.tensor > 1:
        group = _axis_group(ranks, 2, timeout_s)
        tensor = TensorAxis(group=group, rank=mesh.rank % sizes.tensor, size=sizes.tensor)
    return _with_experts(replace(mesh, devices=devices, tensor=tensor, context=context), sizes, timeout_s)


def _with_experts(mesh: Mesh, sizes: MeshSizes, timeout_s: float) -> Mesh:
    """Neighbours among the ranks that shard, with their tensor groups, hold all experts between them. Those
    with the same tensor part exchange tokens. Collective."""
    if sizes.experts == 1:
        return mesh
    num_holders = sizes.experts * sizes.tensor
    ranks = torch.arange(mesh.world).view(sizes.replicate, -1, num_holders)
    devices, group = _of_fsdp(ranks, mesh, timeout_s), _axis_group(ranks, 2, timeout_s)
    rank = mesh.rank % num_holders
    exchange = ExpertAxis(group=group, rank=rank // sizes.tensor, size=sizes.experts)
    if mesh.tensor is None:
        return replace(mesh, experts=ExpertGroups(holders=exchange, exchange=exchange), expert_devices=devices)
    holders = TensorAxis(group=group, rank=rank, size=num_holders)
    same_part = _axis_group(ranks.view(-1, sizes.experts, sizes.tensor), 1, timeout_s)
    groups = ExpertGroups(holders=holders, exchange=replace(exchange, group=same_part), tensor=mesh.tensor)
    return replace(mesh, experts=groups, expert_devices=devices)


def _of_fsdp(ranks_RSP: Tensor, mesh: Mesh, timeout_s: float) -> DeviceMesh:
    """The ranks over which FSDP replicates (R) and shards (S) this rank's part (P). Collective."""
    shards = _axis_group(ranks_RSP, 1, timeout_s)
    if ranks_RSP.shape[0] == 1:
        return DeviceMesh.from_group(shards, mesh.device.type, mesh_dim_names=("shard",))
    groups, names = [_axis_group(ranks_RSP, 0, timeout_s), shards], ("replicate", "shard")
    own_RS = ranks_RSP[:, :, mesh.rank % ranks_RSP.shape[2]].contiguous()
    return DeviceMesh.from_group(groups, mesh.device.type, mesh=own_RS, mesh_dim_names=names)


def neighbours(mesh: Mesh, size: int, *, timeout_s: float) -> TensorAxis:
    """Another tensor axis over the same ranks, beside those of the mesh: so many ranks with neighbouring numbers.
    Collective."""
    group = _axis_group(torch.arange(mesh.world).view(-1, size), 1, timeout_s)
    return TensorAxis(group=group, rank=mesh.rank % size, size=size)


def _axis_group(ranks: Tensor, axis: int, timeout_s: float) -> dist.ProcessGroup:
    """This rank's group along one axis. Only its ranks form it: among 1,024 ranks there are hundreds of groups.
    Collective."""
    lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    timeout, rank = timedelta(seconds=timeout_s), dist.get_rank()
    formed: dict[bool, dist.ProcessGroup] = {}
    is_alone = _all_have_as_many_groups()
    for line in lines:
        if rank in line or not is_alone:
            formed[rank in line] = dist.new_group(line, timeout=timeout, use_local_synchronization=is_alone)
    return formed[True]


def _all_have_as_many_groups() -> bool:
    """Whether ranks can form groups without the others: torch then names a group by its ranks and by the number of
    groups that each of them has. A role on some workers of a pool may have left these numbers different."""
    count = len(dist.distributed_c10d._world.pg_names)
    most = torch.tensor([count, -count])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.sum()) == 0


def adopt(*, rank: int, world: int, device: str, devices: DeviceMesh | None) -> Mesh:
    """The mesh of a rank whose process group exists already: a worker of a cluster, whose pool is one process group."""
    assert (world == 1) == (devices is None)
    return Mesh(rank=rank, world=world, device=torch.device(device), devices=devices)


def leave(mesh: Mesh) -> None:
    """Ends the process group, if there is one."""
    if mesh.is_sharded and dist.is_initialized():
        dist.destroy_process_group()
