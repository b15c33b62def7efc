# SPDX-License-Identifier: Apache-2.0
"""The protocol for running workers: on Ray, or in threads of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from podium.cluster.layout import Pool
from podium.cluster.messages import Attached, Beat, Call, Handshake, Invoke, Reply, Whereabouts
from podium.cluster.objects import Stored
from podium.cluster.placement import Bundle, NodeState
from podium.cluster.processes import ProcessInfo
from podium.errors import ClusterError, WorkerDiedError

Value = TypeVar("Value")


class GoneError(WorkerDiedError):
    """Raised by calls when the process (or its node) is gone; the group turns it into an error for the user."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BundlePlace:
    """A bundle with its node: `handle` belongs to the transport."""

    bundle: Bundle
    node: NodeState
    handle: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class ByReference:
    """An argument that is already stored: the worker's method gets the object itself."""

    stored: Stored[Any]


class Process(Protocol):
    """One incarnation of one worker. Every call raises `GoneError` when the process dies."""

    def handshake(self) -> Awaitable[Handshake]:
        """Waits until the worker runs; returns its report about itself."""
        ...

    def attach(self) -> Awaitable[Attached]:
        """Takes over a worker from a controller that is gone; answered while work is busy."""
        ...

    def perform(self, call: Call, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Runs a call whose whole reply goes to the controller."""
        ...

    def perform_storing(self, call: Invoke, *arguments: Any, **named: Any) -> tuple[Awaitable[Reply], Stored[Any]]:
        """Runs a call whose rows stay in the object store."""
        ...

    def stream(self, call: Invoke, *arguments: Any, **named: Any) -> AsyncIterator[tuple[Reply, Stored[Any]]]:
        """Runs a call that yields replies one after the other; rows go to the store."""
        ...

    def control(self, call: Invoke, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Runs a role's method on a control thread, which answers while work is busy."""
        ...

    def where(self) -> Awaitable[Whereabouts]:
        """Where the worker's threads are; answered while work is busy."""
        ...

    def beats(self, every_s: float) -> AsyncIterator[Beat]:
        """Heartbeats, one every `every_s`; GoneError when the worker is gone."""
        ...

    def look(self) -> ProcessInfo | None:
        """The process as the kernel reports it; None if it is not on this machine, or not a process."""
        ...

    def handle(self) -> Any:
        """The handle by which other workers call this one (a WorkerHandle of cluster/channels.py)."""
        ...

    def kill(self) -> None:
        """Ends the process now; its slot is free soon after."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LeftBehind:
    """What a controller that is gone has left."""

    processes: Mapping[str, Process] = field(default_factory=dict)  # by the name with which each was started
    places: Sequence[BundlePlace] = ()


class Transport(Protocol):
    """Starts processes in their places, and stores objects."""

    has_collectives: bool  # whether workers of one pool can form a process group
    can_be_ended: bool  # whether ending a worker stops its work, so that one that hangs can be replaced
    can_be_silent: bool  # whether a worker can live and not answer, so that its heartbeats are watched

    def on_failure(self, call: Callable[[ClusterError], object]) -> None:
        """`call` is called once in the event loop when the cluster itself, not one of its workers, has failed."""
        ...

    def failure(self) -> ClusterError | None:
        """Checks now whether the cluster itself has failed."""
        ...

    def is_process_missing(self, since_s: float) -> bool:
        """Whether a process died since then (by time.monotonic) before it became a worker. Its pool is unknown, so all
        pools that wait for processes must start again."""
        ...

    def nodes(self) -> tuple[NodeState, ...]:
        """The living nodes with their free resources."""
        ...

    async def nodes_changed(self) -> None:
        """Returns when it is worth looking at `nodes` again: some may have come, gone, or have other resources free."""
        ...

    async def reserve(
        self, bundles: Sequence[Bundle], nodes: Sequence[NodeState], deadline_s: float
    ) -> list[BundlePlace]:
        """Reserves the bundles on exactly these nodes."""
        ...

    def release(self, place: BundlePlace) -> None:
        """Releases a reserved place."""
        ...

    async def spawn(self, pool: Pool, slot: int, place: BundlePlace, name: str) -> Process:
        """Starts a process. `name` identifies it until it has a WorkerId."""
        ...

    async def left_behind(self, pools: Sequence[Pool]) -> LeftBehind:
        """What another controller has left for these pools."""
        ...

    async def end_left(self) -> None:
        """Ends all workers that another controller has left, also those that are starting, and frees their places."""
        ...

    async def at_once(self, answers: Sequence[Awaitable[Reply]]) -> list[Reply] | None:
        """All answers, if they come within a moment: waiting for many together costs less than for each. None: some are
        missing or one is an error; they can still be awaited."""
        ...

    def store(self, value: Value) -> Stored[Value]:
        """Stores a value where all workers can read it."""
        ...

    async def close(self) -> None:
        """Ends everything that the transport started."""
        ...
