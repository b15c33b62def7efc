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
    """The first message of a worker process."""

    node: str
    host: str  # address of its node
    device: str  # "cpu" or "gpu3"
    kind: DeviceKind
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """The first message of a worker to a controller that has not started it."""

    worker: WorkerId | None  # its identity from now on; None: it has never had one
    roles: frozenset[str]  # that are built
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """Waits until nothing of an earlier controller runs, and lets the roles forget what is left of it. The answer is
    the serial number of the last call to all workers of a role that the worker has begun."""

    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Assigns the worker's identity and its pool, whose roles have these meshes."""

    worker: WorkerId
    meshes: tuple[RoleMesh, ...]
    grace_s: float | None = None  # after SIGTERM; see `Pool.grace_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMeeting:
    """Serves the store for the rendezvous of a process group or a link. It stays until the next one of that name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Forms the pool's process group and its roles' meshes."""

    meeting: TcpMeeting
    rank: int
    world: int
    deadline_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Imports the modules of the worker's roles, before anything waits for them."""

    modules: tuple[str, ...]
    tokenizers_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Builds this role; its class and arguments travel beside the call. `methods` are those that the controller may
    call."""

    role: str
    methods: Mapping[str, tuple[str, ...]]  # name -> parameters
    implementation: str | None = None  # "module:Class", if the class that travels is an interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Forms a link (a process group beside the pool's own, which may span pools)."""

    name: str
    generation: int
    meeting: TcpMeeting
    rank: int
    world: int
    deadline_s: float
    timeout_s: float  # timeout of later transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Leaves the link."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenChannel:
    """Opens a channel: from now on the worker can call the channel's workers."""

    channel: Any  # a Channel, whose module imports this one


@dataclass(frozen=True, slots=True)
class Invoke:
    """Calls a method of a role; the arguments travel beside the call."""

    worker: WorkerId  # the intended worker
    role: str
    method: str
    wants: Literal["value", "rows"]
    serial: int = 0  # of a call to all workers of the role, the same for each; 0: to one of them

    def __reduce__(self) -> tuple[Any, ...]:
        """Dataclasses with slots are slow to pickle, and this is in every message."""
        return Invoke, (self.worker, self.role, self.method, self.wants, self.serial)


Call = Settle | Import | OpenMeeting | Join | Build | Connect | Disconnect | OpenChannel | Clear | Invoke


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception of the worker's own code: its text, and the exception itself if it is one of Podium's."""

    kind: str
    text: str
    trace: str
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsHead:
    """What the controller knows about stored rows."""

    ids: TrajectoryIds
    lengths_N: Ints
    stored: bool
    metrics: tuple[Metric, ...]
    note: Any


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's reply to a call."""

    worker: WorkerId | None  # None before it has settled
    value: Any
    failure: Failure | None
    spans: tuple[Span, ...]
    last: bool = True  # of a stream: the last reply

    def __reduce__(self) -> tuple[Any, ...]:
        """Dataclasses with slots are slow to pickle, and this is in every message."""
        return Reply, (self.worker, self.value, self.failure, self.spans, self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A heartbeat: what the work thread is doing, for how long, and since when its call has not advanced."""

    doing: str
    for_s: float
    stalled_s: float = 0.0  # 0 between calls
    is_leaving: bool = False  # it got SIGTERM, and ends by itself after its grace period


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """The reply to `where`."""

    threads: tuple[ThreadPlace, ...]
    dump: str = ""  # of a worker that could not answer: its stacks as its process wrote them, innermost call first
    # Names and dumps of the processes that it has started: tokenizers, user code.
    helpers: tuple[tuple[str, str], ...] = ()
