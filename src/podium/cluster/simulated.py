# SPDX-License-Identifier: Apache-2.0
"""The cluster interface on a virtual clock: workers are tasks of one event loop, and their methods wait with
`asyncio.sleep`. For tests of schedules by the thousand, and for predictions.

A worker does one call at a time, as a work thread would; control calls run beside it. A worker can be killed at any
moment, which ends its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from podium.cluster.host import RoleHost
from podium.cluster.layout import Pool
from podium.cluster.messages import Beat, Call, Handshake, Invoke, Reply, Whereabouts
from podium.cluster.objects import InlineStored, Stored
from podium.cluster.placement import Bundle, NodeState
from podium.cluster.transport import BundlePlace, ByReference, GoneError
from podium.errors import ClusterError

Value = TypeVar("Value")

_NODE = "simulated"


class SimulatedTransport:
    """Tasks instead of processes. One node has room for everything."""

    has_collectives = True  # simulated roles only wait for each other
    can_be_ended = False
    can_be_silent = False

    def on_failure(self, call: Callable[[ClusterError], object]) -> None:
        """Does nothing: there is no cluster that could fail."""

    def failure(self) -> ClusterError | None:
        """None: there is no cluster that could fail."""
        return None

    def is_process_missing(self, since_s: float) -> bool:
        """False: there are no processes."""
        return False

    def nodes(self) -> tuple[NodeState, ...]:
        """One node with room for everything."""
        room = {"CPU": 1e9, "GPU": 0.0}
        return (NodeState(id=_NODE, name=_NODE, total=room, free=room),)

    async def reserve(
        self, bundles: Sequence[Bundle], nodes: Sequence[NodeState], deadline_s: float
    ) -> list[BundlePlace]:
        """Every bundle fits."""
        return [BundlePlace(bundle=bundle, node=node, handle=None) for bundle, node in zip(bundles, nodes, strict=True)]

    def release(self, place: BundlePlace) -> None:
        """Does nothing: no place is reserved."""

    async def spawn(self, pool: Pool, slot: int, place: BundlePlace, name: str) -> SimulatedProcess:
        """Starts a worker."""
        return SimulatedProcess()

    async def at_once(self, answers: Sequence[Awaitable[Reply]]) -> list[Reply] | None:
        """None: answers are awaited one by one."""
        return None

    def store(self, value: Value) -> Stored[Value]:
        """The value itself."""
        return InlineStored(value)

    async def close(self) -> None:
        """Does nothing: tasks end with their workers."""


class SimulatedProcess:
    """A worker of a simulation."""

    def __init__(self) -> None:
        self._host = RoleHost(
            node=_NODE, host="127.0.0.1", device="cpu", kind="cpu", own_process=False, forms_groups=False
        )
        self._working = asyncio.Lock()  # fair: calls are done in the order in which they were made
        self._gone = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    def handshake(self) -> Awaitable[Handshake]:
        """What the worker reports of itself."""
        return self._started(self._now(self._host.handshake))

    def perform(self, call: Call, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Does a call after those before it."""

        async def run() -> Reply:
            async with self._working:
                return (await self._host.perform_async(call, *_resolved(arguments), **named))[0]

        return self._started(run())

    def perform_storing(self, call: Invoke, *arguments: Any, **named: Any) -> tuple[Awaitable[Reply], Stored[Any]]:
        """Does a call after those before it; its rows are stored."""
        stored = _Later()

        async def run() -> Reply:
            async with self._working:
                reply, stored.rows = await self._host.perform_async(call, *_resolved(arguments), **named)
            return reply

        return self._started(run()), stored

    async def stream(self, call: Invoke, *arguments: Any, **named: Any) -> AsyncIterator[tuple[Reply, Stored[Any]]]:
        """Replies and rows of a method that yields, as they come."""
        arrivals: asyncio.Queue[tuple[Reply, Any]] = asyncio.Queue()

        async def run() -> None:
            async with self._working:
                async for item in self._host.stream_async(call, *_resolved(arguments), **named):
                    arrivals.put_nowait(item)

        running = self._started(run())
        try:
            while True:
                arriving = asyncio.ensure_future(arrivals.get())
                await asyncio.wait({arriving, running}, return_when=asyncio.FIRST_COMPLETED)
                if not arriving.done() and arrivals.empty():
                    arriving.cancel()
                    await running  # raises GoneError: a living worker sends a last reply
                reply, rows = await arriving
                yield reply, InlineStored(rows)
                if reply.last:
                    return
        finally:
            running.cancel()

    def control(self, call: Invoke, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Runs a call beside the work."""
        return self._started(self._host.control_async(call, *_resolved(arguments), **named))

    def where(self) -> Awaitable[Whereabouts]:
        """Where the worker is now."""
        return self._started(self._now(self._host.where))

    async def beats(self, every_s: float) -> AsyncIterator[Beat]:
        """One heartbeat; then waits for the end."""
        yield Beat(doing="", for_s=0.0)
        await asyncio.shield(self._gone)
        raise GoneError("it was ended")

    def look(self) -> None:
        """None: there is no process to look at."""

    def handle(self) -> SimulatedProcess:
        """The handle for other workers: the worker itself."""
        return self

    def kill(self) -> None:
        """Ends the worker and its calls."""
        if not self._gone.done():
            self._gone.set_result(None)
        for task in self._tasks:
            task.cancel()

    async def _now(self, call: Callable[[], Value]) -> Value:
        return call()

    def _started(self, work: Any) -> asyncio.Future[Any]:
        """A future of the work's result; GoneError if the worker is ended first."""
        if self._gone.done():
            work.close()
            gone: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            gone.set_exception(GoneError("it was ended"))
            return gone
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def settle(done: asyncio.Task[Any]) -> None:
            self._tasks.discard(done)
            if answer.done():
                return
            if done.cancelled():
                answer.set_exception(GoneError("it was ended"))
            elif (error := done.exception()) is not None:
                answer.set_exception(GoneError(f"it left with {error!r}"))
                self.kill()
            else:
                answer.set_result(done.result())

        task.add_done_callback(settle)
        answer.add_done_callback(lambda future: future.cancelled() or future.exception())
        return answer


class _Later(InlineStored[Any]):
    """Rows that are available once the call has been answered."""

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def rows(self) -> Any:
        return self._value[0]

    @rows.setter
    def rows(self, rows: Any) -> None:
        self._value = [rows]


def _resolved(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.stored.read() if isinstance(each, ByReference) else each for each in arguments)
