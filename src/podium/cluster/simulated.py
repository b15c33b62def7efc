# SPDX-License-Identifier: Apache-2.0
"""The cluster interface on a virtual clock: workers are tasks of one event loop, and their methods wait with
`asyncio.sleep`. For tests of schedules by the thousand, and for predictions.

A worker does one call at a time, as a work thread would; control calls run beside it. Workers take time to start if
they are told to, and faults happen to them at given times: see `simulated_faults`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, assert_never

from podium.cluster.host import RoleHost
from podium.cluster.layout import Pool
from podium.cluster.messages import Attached, Beat, Call, Handshake, Invoke, Reply, Whereabouts
from podium.cluster.objects import InlineStored, Stored
from podium.cluster.placement import Bundle, NodeState
from podium.cluster.simulated_faults import (
    NodeFault,
    SimulatedDeath,
    SimulatedDelay,
    SimulatedLoss,
    SimulatedNotice,
    SimulatedSilence,
    WorkerFault,
)
from podium.cluster.simulated_nodes import SimulatedNodes
from podium.cluster.transport import BundlePlace, ByReference, GoneError, LeftBehind
from podium.errors import ClusterError

Value = TypeVar("Value")

_NODE = "simulated"


class SimulatedTransport:
    """Tasks instead of processes. One node has room for everything but slots that need a GENERATOR_SLOT: these are on
    nodes that come and go."""

    has_collectives = True  # simulated roles only wait for each other
    can_be_ended = True

    def __init__(
        self, faults: Sequence[WorkerFault | NodeFault] = (), *, start_s: float = 0.0, num_nodes: int = 0,
        slots_per_node: int = 1,
    ) -> None:  # fmt: skip
        """`start_s`: until a process answers. `num_nodes`: nodes with `slots_per_node` times a GENERATOR_SLOT at the
        start. Heartbeats are watched if a worker will be silent."""
        self.can_be_silent = any(isinstance(fault, SimulatedSilence) for fault in faults)
        self._start_s = start_s
        self._processes: dict[tuple[str, int], SimulatedProcess] = {}  # by pool and slot, the newest
        self._nodes = SimulatedNodes(num_nodes, self._end_on, slots=slots_per_node)
        self._node_of: dict[SimulatedProcess, str] = {}
        loop = asyncio.get_running_loop()
        for fault in faults:
            if isinstance(fault, NodeFault):
                loop.call_at(fault.at_s, self._nodes.inject, fault)
            else:
                loop.call_at(fault.at_s, self._inject, fault)

    def on_failure(self, call: Callable[[ClusterError], object]) -> None:
        """Does nothing: there is no cluster that could fail."""

    def failure(self) -> ClusterError | None:
        """None: there is no cluster that could fail."""
        return None

    def is_process_missing(self, since_s: float) -> bool:
        """False: there are no processes."""
        return False

    def nodes(self) -> tuple[NodeState, ...]:
        """One node with room for everything, and those with a slot."""
        room = {"CPU": 1e9, "GPU": 0.0}
        return (NodeState(id=_NODE, name=_NODE, total=room, free=room), *self._nodes.states())

    async def nodes_changed(self) -> None:
        """Returns when a node has come, is being drained, has died or has a slot free."""
        await self._nodes.changed()

    async def reserve(
        self, bundles: Sequence[Bundle], nodes: Sequence[NodeState], deadline_s: float
    ) -> list[BundlePlace]:
        """Every bundle fits: the caller has looked."""
        self._nodes.take(node.id for node in nodes)
        return [BundlePlace(bundle=bundle, node=node, handle=None) for bundle, node in zip(bundles, nodes, strict=True)]

    def release(self, place: BundlePlace) -> None:
        """Its slot is free."""
        self._nodes.give_back(place.node.id)

    async def spawn(self, pool: Pool, slot: int, place: BundlePlace, name: str) -> SimulatedProcess:
        """Starts a worker."""
        process = SimulatedProcess(start_s=self._start_s, sends_beats=self.can_be_silent, node=place.node.name)
        self._processes[pool.name, slot] = process
        self._node_of[process] = place.node.id
        if not self._nodes.lives(place.node.id) and place.node.id != _NODE:
            process.kill()
        return process

    def _end_on(self, node: str) -> None:
        """A node dies with its workers."""
        for process in [each for each, its_node in self._node_of.items() if its_node == node]:
            process.kill()
            del self._node_of[process]

    async def left_behind(self, pools: Sequence[Pool]) -> LeftBehind:
        """Nothing: a simulation has one controller."""
        return LeftBehind()

    async def end_left(self) -> None:
        """Does nothing: a simulation has one controller."""

    async def at_once(self, answers: Sequence[Awaitable[Reply]]) -> list[Reply] | None:
        """None: answers are awaited one by one."""
        return None

    def store(self, value: Value) -> Stored[Value]:
        """The value itself."""
        return InlineStored(value)

    async def close(self) -> None:
        """Does nothing: tasks end with their workers."""

    def _inject(self, fault: WorkerFault) -> None:
        """Lets a fault happen to the worker that is in its slot now, which may be starting."""
        process = self._processes.get((fault.pool, fault.slot))
        if process is None:
            return
        match fault:
            case SimulatedDeath():
                process.kill()
            case SimulatedSilence():
                process.stop(fault.seconds)
            case SimulatedDelay():
                process.delay(fault.seconds, fault.late_s)
            case SimulatedLoss():
                process.lose_reply()
            case SimulatedNotice():
                process.ask_to_leave(fault.grace_s)
            case other:
                assert_never(other)


class SimulatedProcess:
    """A worker of a simulation."""

    def __init__(self, *, start_s: float = 0.0, sends_beats: bool = False, node: str = _NODE) -> None:
        """`sends_beats`: regularly, instead of a single heartbeat."""
        self._host = RoleHost(
            node=node, host="127.0.0.1", device="cpu", kind="cpu", own_process=False, forms_groups=False
        )
        self._start_s, self._sends_beats = start_s, sends_beats
        self._working = asyncio.Lock()  # fair: calls are done in the order in which they were made
        self._loop = asyncio.get_running_loop()
        self._gone = self._loop.create_future()
        self._is_leaving = self._loop.create_future()
        self._awake = asyncio.Event()  # not set: it is stopped
        self._awake.set()
        self._num_stops = 0
        self._late_until_s = self._late_s = 0.0
        self._loses_reply = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def handshake(self) -> Awaitable[Handshake]:
        """What the worker reports of itself, when it has started."""

        async def started() -> Handshake:
            await asyncio.sleep(self._start_s)
            await self._awake.wait()
            return self._host.handshake()

        return self._started(started)

    def perform(self, call: Call, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Does a call after those before it."""

        async def run() -> Reply:
            async with self._working:
                await self._awake.wait()
                reply = (await self._host.perform_async(call, *_resolved(arguments), **named))[0]
            await self._send()
            return reply

        return self._started(run)

    def perform_storing(self, call: Invoke, *arguments: Any, **named: Any) -> tuple[Awaitable[Reply], Stored[Any]]:
        """Does a call after those before it; its rows are stored."""
        stored = _Later()

        async def run() -> Reply:
            async with self._working:
                await self._awake.wait()
                reply, stored.rows = await self._host.perform_async(call, *_resolved(arguments), **named)
            await self._send()
            return reply

        return self._started(run), stored

    async def stream(self, call: Invoke, *arguments: Any, **named: Any) -> AsyncIterator[tuple[Reply, Stored[Any]]]:
        """Replies and rows of a method that yields, as they come."""
        arrivals: asyncio.Queue[tuple[Reply, Any, float]] = asyncio.Queue()

        async def run() -> None:
            async with self._working:
                await self._awake.wait()
                async with aclosing(self._host.stream_async(call, *_resolved(arguments), **named)) as replies:
                    async for reply, rows in replies:
                        arrivals.put_nowait((reply, rows, self._loop.time() + await self._leave()))

        running = self._started(run)
        arriving: asyncio.Future[tuple[Reply, Any, float]] | None = None
        try:
            while True:
                arriving = asyncio.ensure_future(arrivals.get())
                await asyncio.wait({arriving, running}, return_when=asyncio.FIRST_COMPLETED)
                if not arriving.done() and arrivals.empty():
                    await running  # raises GoneError: a living worker sends a last reply
                reply, rows, arrives_s = await arriving
                if arrives_s > self._loop.time():
                    await asyncio.sleep(arrives_s - self._loop.time())
                yield reply, InlineStored(rows)
                if reply.last:
                    return
        finally:
            running.cancel()
            if arriving is not None:
                arriving.cancel()

    def control(self, call: Invoke, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Runs a call beside the work."""

        async def run() -> Reply:
            reply = await self._host.control_async(call, *_resolved(arguments), **named)
            await self._send()
            return reply

        return self._started(run)

    def attach(self) -> Awaitable[Attached]:
        """Takes over the worker from another controller."""

        async def attach() -> Attached:
            return self._host.attach()

        return self._started(attach)

    def where(self) -> Awaitable[Whereabouts]:
        """Where the worker is now."""

        async def look() -> Whereabouts:
            return self._host.where()

        return self._started(look)

    async def beats(self, every_s: float) -> AsyncIterator[Beat]:
        """Heartbeats while it is not stopped. If nobody can be silent, one is enough: the end is noticed anyway."""
        while not self._gone.done():
            is_leaving = self._is_leaving.done()
            yield Beat(doing="", for_s=0.0, is_leaving=is_leaving)
            news = {self._gone} if is_leaving else {self._gone, self._is_leaving}
            timeout_s = every_s if self._sends_beats else None
            await asyncio.wait(news, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            await self._awake.wait()
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
        self._awake.set()  # its heartbeats end

    def ask_to_leave(self, grace_s: float) -> None:
        """Its next heartbeat says so. It ends by itself after this time."""
        if not self._gone.done() and not self._is_leaving.done():
            self._is_leaving.set_result(None)
            self._loop.call_later(grace_s, self.kill)

    def stop(self, seconds: float) -> None:
        """Stops it for so long: calls that run stay unanswered, and later ones do not begin."""
        if self._gone.done():
            return
        self._awake.clear()
        self._num_stops += 1
        self._loop.call_later(seconds, self._go_on, self._num_stops)

    def delay(self, seconds: float, late_s: float) -> None:
        """Lets all replies of the next seconds arrive late."""
        self._late_until_s, self._late_s = self._loop.time() + seconds, late_s

    def lose_reply(self) -> None:
        """Ends the worker when its next reply is ready, and instead of it."""
        self._loses_reply = True

    def _go_on(self, stop: int) -> None:
        if stop == self._num_stops:  # else it was stopped again meanwhile
            self._awake.set()

    async def _leave(self) -> float:
        """Waits until a reply can leave the worker. Returns how late it arrives."""
        if self._loses_reply:
            self.kill()
            raise asyncio.CancelledError
        await self._awake.wait()
        return self._late_s if self._loop.time() < self._late_until_s else 0.0

    async def _send(self) -> None:
        """Waits until a reply has arrived."""
        late_s = await self._leave()
        if late_s:
            await asyncio.sleep(late_s)

    def _started(self, work: Callable[[], Awaitable[Any]]) -> asyncio.Future[Any]:
        """A future of the work's result; GoneError if the worker is ended first."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        answer.add_done_callback(lambda future: future.cancelled() or future.exception())
        if self._gone.done():
            answer.set_exception(GoneError("it was ended"))
            return answer

        async def run() -> Any:
            await self._awake.wait()
            return await work()

        task = asyncio.ensure_future(run())
        self._tasks.add(task)

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
