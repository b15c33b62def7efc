# SPDX-License-Identifier: Apache-2.0
"""The process groups of a worker: its pool's default group, its roles' meshes, and links to other pools."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from podium.cluster.meshes import AXES, RoleMesh
from podium.cluster.messages import Connect, Join
from podium.engine.addresses import DeviceKind
from podium.engine.meeting import (
    MeetingServer,
    await_all,
    chosen_interface,
    first_line,
    join_default_group,
    open_store,
    use_interface_of,
)
from podium.errors import RendezvousError


def serve(host: str) -> MeetingServer:
    """Serves a store for the rendezvous, on this node's own address."""
    return MeetingServer(host)


def join(order: Join, host: str, kind: DeviceKind, meshes: tuple[RoleMesh, ...]) -> dict[str, DeviceMesh | None]:
    """Forms the pool's process group and the meshes of its roles, in the same order on all workers. Collective."""
    use_interface_of(host)
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    leave()
    join_default_group(
        order.meeting,
        kind=kind,
        rank=order.rank,
        world=order.world,
        device=device,
        deadline_s=order.deadline_s,
        timeout_s=order.timeout_s,
    )
    return {mesh.role: _device_mesh(mesh, kind, timedelta(seconds=order.timeout_s)) for mesh in meshes}


def leave() -> None:
    """Destroys the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device_mesh(mesh: RoleMesh, kind: DeviceKind, timeout: timedelta) -> DeviceMesh | None:
    """Axes of length 1 have no group. Every worker of the pool takes part, even without the role: forming a subgroup is
    collective over the default group."""
    axes = [axis for axis in AXES if mesh.shape.size(axis) > 1]
    if not axes:
        return None
    ranks = torch.tensor(mesh.slots).reshape([mesh.shape.size(axis) for axis in axes])
    devices = DeviceMesh(kind, ranks, mesh_dim_names=tuple(axes))
    if dist.get_rank() in mesh.slots:
        for axis in axes:  # torch creates subgroups with its own timeout, half an hour
            devices.get_group(axis)._get_backend(torch.device(kind))._set_default_timeout(timeout)
    return devices


class TransferGroup:
    """A link between workers that may be of different pools. It has its own group and store, so that neither pool's
    collectives wait for it and either can be rebuilt without the other."""

    def __init__(self, order: Connect, host: str, kind: DeviceKind) -> None:
        self.name, self.rank, self.world = order.name, order.rank, order.world
        self._device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
        timeout = timedelta(seconds=order.deadline_s)
        what = f"the link {order.name} of {order.world} workers"
        began = time.monotonic()
        try:
            store = open_store(order.meeting, order.world, order.deadline_s)
            # Each generation has its own keys, so it does not see values of an earlier one in the store.
            mine = PrefixStore(f"{order.name}/{order.generation}", store)
            await_all(mine, rank=order.rank, world=order.world, timeout_s=order.deadline_s, what=what)
            self._group: Any = _nccl(mine, order, timeout) if kind == "cuda" else _gloo(mine, order, timeout, host)
            number = torch.tensor([self.rank + 1.0], device=self._device)
            self._group.allreduce([number]).wait()
            if number.item() != self.world * (self.world + 1) / 2:
                raise RuntimeError(f"the probe all-reduce gave {number.item()}.")
            self._group._set_default_timeout(timedelta(seconds=order.timeout_s))
        except (RuntimeError, ValueError, dist.DistError) as error:
            raise RendezvousError(
                f"{what} was not formed: rank {order.rank} gave up after {time.monotonic() - began:.0f} s on "
                f"interface {chosen_interface()}: {first_line(error)}"
            ) from error

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Fills `tensor` on all ranks with the one of rank `source` of the link. Collective over the link."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([tensor], options).wait()
        return tensor

    def close(self) -> None:
        """Ends the link here, even if other workers of it are gone."""
        self._group = None


def _gloo(store: Store, order: Connect, timeout: timedelta, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(interface=use_interface_of(host))]
    return dist.ProcessGroupGloo(store, order.rank, order.world, options)


def _nccl(store: Store, order: Connect, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, order.rank, order.world, options)
