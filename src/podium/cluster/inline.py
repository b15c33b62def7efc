# SPDX-License-Identifier: Apache-2.0
"""The cluster interface in one process: every worker is a few threads. For debugging and single-device runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, TypeVar

from podium.cluster.host import RoleHost
from podium.cluster.layout import Pool
from podium.cluster.messages import Attached, Beat, Call, Handshake, Invoke, Reply, Whereabouts
from podium.cluster.objects import InlineStored, Stored
from podium.cluster.placement import Bundle, NodeState
from podium.cluster.transport import BundlePlace, ByReference, GoneError, LeftBehind
from podium.engine.addresses import DeviceKind
from podium.errors import ClusterError

Value = TypeVar("Value")

_NODE = "inline"


class InlineTransport:
    """Threads instead of Ray's processes. One node fits everything: threads share its devices."""

    has_collectives = False
    can_be_ended = False  # a debugger may have stopped it
    can_be_silent = True

    def __init__(self) -> None:
        self._gpus = _visible_gpus()
        self._processes: dict[str, InlineProcess] = {}
        self._places: list[BundlePlace] = []

    def on_failure(self, call: Callable[[ClusterError], object]) -> None:
        """Does nothing: threads fail with their process."""

    def failure(self) -> ClusterError | None:
        """None: there is no cluster that could fail."""
        return None

    def is_process_missing(self, since_s: float) -> bool:
        """False: there are no processes."""
        return False

    def nodes(self) -> tuple[NodeState, ...]:
        """One node with room for everything."""
        room = {"CPU": 1e6, "GPU": 1e6 if self._gpus else 0.0}
        return (NodeState(id=_NODE, name=_NODE, total=room, free=room),)

    async def nodes_changed(self) -> None:
        """Never returns: there is always this one node."""
        await asyncio.get_running_loop().create_future()

    async def reserve(
        self, bundles: Sequence[Bundle], nodes: Sequence[NodeState], deadline_s: float
    ) -> list[BundlePlace]:
        """Every bundle fits."""
        new = [BundlePlace(bundle=bundle, node=node, handle=None) for bundle, node in zip(bundles, nodes, strict=True)]
        self._places += new
        return new

    def release(self, place: BundlePlace) -> None:
        """Forgets the place."""
        self._places = [each for each in self._places if each is not place]

    async def spawn(self, pool: Pool, slot: int, place: BundlePlace, name: str) -> InlineProcess:
        """Starts a worker in threads of this process."""
        kind: DeviceKind = "cuda" if pool.each.gpus else "cpu"
        self._processes[name] = process = InlineProcess(name, "gpu0" if kind == "cuda" else "cpu", kind)
        return process

    async def left_behind(self, pools: Sequence[Pool]) -> LeftBehind:
        """Workers that live."""
        living = {name: each for name, each in self._processes.items() if not each.is_dead}
        return LeftBehind(processes=living, places=tuple(self._places))

    async def end_left(self) -> None:
        """Ends workers that live, and frees all places."""
        for process in self._processes.values():
            process.kill()
        self._places.clear()

    async def at_once(self, answers: Sequence[Awaitable[Reply]]) -> list[Reply] | None:
        """None: answers are awaited one by one."""
        return None

    def store(self, value: Value) -> Stored[Value]:
        """The value itself, in this process."""
        return InlineStored(value)

    async def close(self) -> None:
        """Does nothing: threads end with their processes."""


def _visible_gpus() -> bool:
    return os.path.exists("/dev/nvidia0")


class InlineProcess:
    """A worker of this process. Killing it fails its pending calls and drops its late answers. The thread cannot be
    ended and finishes its call."""

    def __init__(self, name: str, device: str, kind: DeviceKind) -> None:
        self._host = RoleHost(node=_NODE, host="127.0.0.1", device=device, kind=kind, own_process=False)
        self._work = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._control = ThreadPoolExecutor(max_workers=8, thread_name_prefix=f"{name} control")
        self._ask = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name} ask")
        self._dead = threading.Event()
        self._waiting: set[Future[Any]] = set()
        self._lock = threading.Lock()

    def handshake(self) -> Awaitable[Handshake]:
        """What the worker reports of itself."""
        return self._submit(self._ask, self._host.handshake)

    @property
    def is_dead(self) -> bool:
        """Whether it was ended."""
        return self._dead.is_set()

    def attach(self) -> Awaitable[Attached]:
        """Takes over the worker from another controller."""
        return self._submit(self._ask, self._host.attach)

    def perform(self, call: Call, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Runs a call in the work thread."""

        def run() -> Reply:
            return self._host.perform(call, *_resolved(arguments), **_resolved_named(named))[0]

        return self._submit(self._work, run)

    def perform_storing(self, call: Invoke, *arguments: Any, **named: Any) -> tuple[Awaitable[Reply], Stored[Any]]:
        """Runs a call in the work thread; its rows are stored."""
        rows: list[Any] = []
        stored = _Later(rows)

        def run() -> Reply:
            reply, result = self._host.perform(call, *_resolved(arguments), **_resolved_named(named))
            rows.append(result)
            return reply

        return self._submit(self._work, run), stored

    def stream(self, call: Invoke, *arguments: Any, **named: Any) -> AsyncIterator[tuple[Reply, Stored[Any]]]:
        """Replies and rows of a method that yields, as they come."""
        loop, arrivals = asyncio.get_running_loop(), asyncio.Queue[tuple[Reply, Any]]()

        def run() -> None:
            for item in self._host.stream(call, *_resolved(arguments), **_resolved_named(named)):
                if self._dead.is_set():
                    return
                loop.call_soon_threadsafe(arrivals.put_nowait, item)

        return self._blocks(arrivals, asyncio.ensure_future(self._submit(self._work, run)))

    async def _blocks(
        self, arrivals: asyncio.Queue[tuple[Reply, Any]], running: asyncio.Future[None]
    ) -> AsyncIterator[tuple[Reply, Stored[Any]]]:
        try:
            while True:
                arriving = asyncio.ensure_future(arrivals.get())
                both: set[asyncio.Future[Any]] = {arriving, running}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not arriving.done() and arrivals.empty():
                    arriving.cancel()
                    await running  # raises GoneError: a living worker always sends a last reply
                    return
                reply, rows = await arriving
                yield reply, InlineStored(rows)
                if reply.last:
                    return
        finally:
            running.cancel()

    def control(self, call: Invoke, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Runs a call beside the work thread."""
        return self._submit(
            self._control, lambda: self._host.control(call, *_resolved(arguments), **_resolved_named(named))
        )

    def where(self) -> Awaitable[Whereabouts]:
        """Where the worker's threads are now."""
        return self._submit(self._ask, self._host.where)

    async def beats(self, every_s: float) -> AsyncIterator[Beat]:
        """Heartbeats until the worker ends."""
        beats: Iterator[Beat] = self._host.beats(0.0)
        while not self._dead.is_set() and (beat := next(beats, None)) is not None:
            yield beat
            await asyncio.sleep(every_s)
        raise GoneError("it was ended")

    def look(self) -> None:
        """None: there is no process to look at."""

    def handle(self) -> InlineProcess:
        """The handle for other workers: the worker itself."""
        return self

    def kill(self) -> None:
        """Ends the worker; a running call is abandoned."""
        self._end("it was ended")

    def _end(self, reason: str) -> None:
        with self._lock:
            was_dead = self._dead.is_set()
            self._dead.set()
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(GoneError(reason))
        for pool in (self._work, self._control, self._ask):
            pool.shutdown(wait=False, cancel_futures=True)
        if not was_dead:
            threading.Thread(target=self._drop_roles, name="ending", daemon=True).start()

    def _drop_roles(self) -> None:
        """When the last call has returned."""
        for pool in (self._work, self._control, self._ask):
            pool.shutdown()
        self._host.drop_roles()

    def _submit(self, pool: ThreadPoolExecutor, run: Callable[[], Value]) -> Awaitable[Value]:
        """A future that is resolved by the thread or by `kill`, whichever comes first."""
        promise: Future[Value] = Future()
        with self._lock:
            if self._dead.is_set():
                promise.set_exception(GoneError("it was ended"))
                return asyncio.wrap_future(promise)
            self._waiting.add(promise)

        def work() -> None:
            try:
                value = run()
            except Exception as error:
                self._settle(promise, None, error)
            except BaseException as error:
                self._end(f"it left with {error!r}")  # as a process would
            else:
                self._settle(promise, value, None)

        pool.submit(work)
        return asyncio.wrap_future(promise)

    def _settle(self, promise: Future[Any], value: Any, error: BaseException | None) -> None:
        with self._lock:
            if promise not in self._waiting:
                return  # killed meanwhile: an answer of a dead incarnation
            self._waiting.discard(promise)
        with contextlib.suppress(InvalidStateError):  # the caller has stopped waiting
            if error is not None:
                promise.set_exception(error)
            else:
                promise.set_result(value)


class _Later(InlineStored[Any]):
    """Rows that are available once the call has been answered."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__(None)
        self._value = rows


def _resolved(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.stored.read() if isinstance(each, ByReference) else each for each in arguments)


def _resolved_named(named: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(named, _resolved(tuple(named.values())), strict=True))
