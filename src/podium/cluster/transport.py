# SPDX-License-Identifier: Apache-2.0
"""The protocol of what runs workers: Ray, or threads of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from podium.cluster.layout import Pool
from podium.cluster.messages import Beat, Handshake, Invoke, Order, Reply, Whereabouts
from podium.cluster.objects import Stored
from podium.cluster.placement import Bundle, NodeState
from podium.cluster.processes import ProcessInfo
from podium.errors import ClusterError, WorkerDiedError

Value = TypeVar("Value")


class GoneError(WorkerDiedError):
    """Raised by calls when the process (or its node) is gone; the group turns it into an error for the user."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BundlePlace:
    """A bundle that has its node: `handle` is the transport's own."""

    bundle: Bundle
    node: NodeState
    handle: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class ByReference:
    """An argument that is stored already: the worker's method gets the object itself."""

    stored: Stored[Any]


class Process(Protocol):
    """One incarnation of one worker. Every call raises `GoneError` when the process dies."""

    def handshake(self) -> Awaitable[Handshake]:
        """Waits until the worker runs; what it reports of itself."""
        ...

    def perform(self, order: Order, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """An order whose answer comes to the controller whole."""
        ...

    def perform_storing(self, order: Invoke, *arguments: Any, **named: Any) -> tuple[Awaitable[Reply], Stored[Any]]:
        """An order whose rows stay in the object store."""
        ...

    def stream(self, order: Invoke, *arguments: Any, **named: Any) -> AsyncIterator[tuple[Reply, Stored[Any]]]:
        """An order whose answers come one after the other, rows to the store."""
        ...

    def control(self, order: Invoke, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """A role's method on a control thread, answered while work is busy."""
        ...

    def where(self) -> Awaitable[Whereabouts]:
        """Answered while work is busy."""
        ...

    def beats(self, every_s: float) -> AsyncIterator[Beat]:
        """Heartbeats, one every `every_s`; GoneError when the worker is gone."""
        ...

    def look(self) -> ProcessInfo | None:
        """The process as the kernel shows it; None where it is not on this machine, or not a process."""
        ...

    def handle(self) -> Any:
        """How other workers can call this one (a Card of cluster/channels.py)."""
        ...

    def kill(self) -> None:
        """Ends the process now; its slot is free soon after."""
        ...


class Transport(Protocol):
    """Starts processes where they are placed, and stores objects."""

    has_collectives: bool  # whether workers of one pool can form a process group

    def on_failure(self, call: Callable[[ClusterError], object]) -> None:
        """`call` is called once in the event loop when what carries the workers, not one of them, has failed."""
        ...

    def failure(self) -> ClusterError | None:
        """Looks now whether what carries the workers has failed."""
        ...

    def is_process_missing(self, since_s: float) -> bool:
        """Whether a process died since then (by time.monotonic) before it became a worker. Its pool is unknown, so all
        pools that wait for processes must start again."""
        ...

    def nodes(self) -> tuple[NodeState, ...]:
        """The living nodes with their free resources."""
        ...

    async def reserve(
        self, bundles: Sequence[Bundle], nodes: Sequence[NodeState], deadline_s: float
    ) -> list[BundlePlace]:
        """Takes the bundles on exactly these nodes."""
        ...

    def release(self, place: BundlePlace) -> None:
        """Gives a reserved place back."""
        ...

    async def spawn(self, pool: Pool, slot: int, place: BundlePlace, name: str) -> Process:
        """`name` is how the process is called where it has no WorkerId yet."""
        ...

    async def at_once(self, answers: Sequence[Awaitable[Reply]]) -> list[Reply] | None:
        """All answers, if they come within a moment: waiting for many together costs less than for each. None: not all
        are there, or one is an error; they can still be awaited."""
        ...

    def store(self, value: Value) -> Stored[Value]:
        """Puts a value where all workers can read it."""
        ...

    async def close(self) -> None:
        """Ends what the transport started."""
        ...
