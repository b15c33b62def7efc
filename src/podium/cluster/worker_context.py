# SPDX-License-Identifier: Apache-2.0
"""The context of a role: its worker, mesh, device, links and channels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from podium.cluster.identity import WorkerId
from podium.cluster.meshes import Axis, RoleMesh
from podium.cluster.spans import SpanRecorder
from podium.errors import ClusterError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from podium.cluster.channels import Channel
    from podium.cluster.rendezvous import TransferGroup

RoleT = TypeVar("RoleT")


class Interruptible(ABC):
    """A role whose calls wait for more from their controller. They end when that one is dead and another one attaches
    to the worker: first `abandon`, and `reset` once no call runs any more."""

    @abstractmethod
    def abandon(self) -> None:
        """Calls that are running end soon, without a result. On a thread of its own."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets what the calls of an earlier controller have left. On the work thread."""


@dataclass(kw_only=True, eq=False)
class WorkerContext:
    """What a role knows about its worker."""

    worker: WorkerId  # the next incarnation once another controller has attached
    role: str
    mesh: RoleMesh
    device: str  # for torch.device
    devices: DeviceMesh | None  # of the role's axes that are larger than 1; None if it has one rank
    recorder: SpanRecorder
    transfers: Mapping[str, TransferGroup]  # the worker updates it as links are formed and closed
    channels: Mapping[str, Channel]  # the worker updates it as the controller opens channels
    colocated_roles: Mapping[str, Any]  # roles of this worker by name, as far as they are built: in the layout's order

    @property
    def rank(self) -> int:
        """This worker's rank in the role's mesh."""
        return self.mesh.rank_of(self.worker.index)

    @property
    def world(self) -> int:
        """Ranks of the role's mesh."""
        return self.mesh.shape.world

    def group(self, axis: Axis) -> ProcessGroup | None:
        """The process group along one axis; None if the axis has length 1."""
        if self.mesh.shape.size(axis) == 1:
            return None
        assert self.devices is not None
        return self.devices.get_group(axis)

    def transfer(self, name: str) -> TransferGroup:
        """The link of this name, which may span pools."""
        if name not in self.transfers:
            raise ClusterError(
                f"{self.worker} has no link {name!r}; it has {', '.join(self.transfers) or 'none'}. "
                "The controller makes it with `workers.connect`."
            )
        return self.transfers[name]

    def channel(self, role: str) -> Channel:
        """The workers of another role, to call them directly."""
        if role not in self.channels:
            raise ClusterError(
                f"{self.worker} has no channel to {role!r}; the controller opens it with `workers.open_channel`."
            )
        return self.channels[role]

    def colocated_role(self, role: str, kind: type[RoleT]) -> RoleT:
        """Another role of this worker, to share its objects. It must come before this one in the layout."""
        other = self.colocated_roles.get(role)
        if not isinstance(other, kind):
            here = ", ".join(f"{name} ({type(each).__name__})" for name, each in self.colocated_roles.items()) or "none"
            raise ClusterError(
                f"{self.worker} has no role {role!r} that is a {kind.__name__}; built before {self.role} are: {here}."
            )
        return other

    def span(self, name: str) -> AbstractContextManager[None]:
        """Accounts the time inside to `name`. The span travels with the reply and appears in the report of `where`."""
        return self.recorder.span(name)

    def add_span(self, name: str, begin_s: float, end_s: float, values: Mapping[str, float] | None = None) -> None:
        """Adds a span that has ended, by `cluster.deadlines.wall_s`, with numbers about it."""
        self.recorder.add(name, begin_s, end_s, values)
