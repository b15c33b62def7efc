# SPDX-License-Identifier: Apache-2.0
"""This rank's position: device, rank, world, and the collectives that the engine needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from podium.engine.addresses import DeviceKind, Meeting
from podium.engine.meeting import join_default_group
from podium.errors import LaunchError
from podium.recipe import PlacementSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One rank among `world`. A world of one has no process group and no overhead."""

    rank: int
    world: int
    device: torch.device
    devices: DeviceMesh | None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over all ranks."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """One small Python value from every rank, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world > 1:
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


def join(
    placement: PlacementSection, *, rank: int, world: int, local_rank: int, meeting: Meeting | None = None
) -> Mesh:
    """Joins this rank: picks the device and, if there are several ranks, forms the process group at `meeting` or by
    torchrun's environment."""
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
        timeout_s=placement.timeout_s,
    )
    return Mesh(
        rank=rank, world=world, device=device, devices=init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    )


def adopt(*, rank: int, world: int, device: str, devices: DeviceMesh | None) -> Mesh:
    """The mesh of a rank whose process group exists already: a worker of a cluster, whose pool is one process group."""
    assert (world == 1) == (devices is None)
    return Mesh(rank=rank, world=world, device=torch.device(device), devices=devices)


def leave(mesh: Mesh) -> None:
    """Ends the process group, if there is one."""
    if mesh.world > 1 and dist.is_initialized():
        dist.destroy_process_group()
