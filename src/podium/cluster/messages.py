# SPDX-License-Identifier: Apache-2.0
"""The messages between controller and worker: calls, and their replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from podium.cluster.identity import WorkerId
from podium.cluster.meshes import RoleMesh
from podium.cluster.results import Metric, Span
from podium.cluster.spans import ThreadPlace
from podium.data.trajectories import Ints, TrajectoryIds
from podium.engine.addresses import DeviceKind, TcpMeeting


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """A worker process's first words."""

    node: str
    host: str  # address of its node
    device: str  # "cpu" or "gpu3"
    kind: DeviceKind
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """You are this worker from now on; you belong to this pool, whose roles have these meshes."""

    worker: WorkerId
    meshes: tuple[RoleMesh, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMeeting:
    """Serve the store where a process group or a link meets; it stays until the next one of that name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Form the pool's process group and its roles' meshes."""

    meeting: TcpMeeting
    rank: int
    world: int
    deadline_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Import what your roles are made of, before anything waits for it."""

    modules: tuple[str, ...]
    tokenizers_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Build this role; its class and arguments travel beside the order. `methods` is what the controller may call."""

    role: str
    methods: Mapping[str, tuple[str, ...]]  # name -> parameters
    implementation: str | None = None  # "module:Class", where the class that travels is an interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Form a link (a process group beside the pool's own, that may span pools)."""

    name: str
    generation: int
    meeting: TcpMeeting
    rank: int
    world: int
    deadline_s: float
    timeout_s: float  # of later transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Leave the link."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenChannel:
    """You can call the workers of this line from now on."""

    channel: Any  # a Line; its class knows these orders


@dataclass(frozen=True, slots=True)
class Invoke:
    """Call a method of a role; the arguments travel beside the order."""

    worker: WorkerId  # whom the controller means
    role: str
    method: str
    wants: Literal["value", "rows"]

    def __reduce__(self) -> tuple[Any, ...]:
        """Dataclasses with slots are slow to pickle, and this is in every message."""
        return Invoke, (self.worker, self.role, self.method, self.wants)


Order = Settle | Import | OpenMeeting | Join | Build | Connect | Disconnect | OpenChannel | Invoke


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception of the worker's own code: its words, and itself where it is one of Podium's."""

    kind: str
    text: str
    trace: str
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsHead:
    """What the controller learns of stored rows."""

    ids: TrajectoryIds
    lengths_N: Ints
    stored: bool
    metrics: tuple[Metric, ...]
    note: Any


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's answer to an order."""

    worker: WorkerId | None  # None before it has settled
    value: Any
    failure: Failure | None
    spans: tuple[Span, ...]
    last: bool = True  # of a stream: nothing comes after it

    def __reduce__(self) -> tuple[Any, ...]:
        """Dataclasses with slots are slow to pickle, and this is in every message."""
        return Reply, (self.worker, self.value, self.failure, self.spans, self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life: what the work thread is doing, and for how long."""

    doing: str
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """The answer to `where are you`."""

    threads: tuple[ThreadPlace, ...]
