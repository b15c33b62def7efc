# SPDX-License-Identifier: Apache-2.0
"""One worker as a Ray actor: calls are sent to it, and Ray's errors are translated."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import ray

from podium.cluster.messages import Attached, Beat, Call, Handshake, Invoke, Reply, Whereabouts
from podium.cluster.objects import Stored
from podium.cluster.processes import ProcessInfo, kill, look
from podium.cluster.ray_arguments import STORE_IS_FULL, RayStored, full_store, pack
from podium.cluster.ray_compat import death_reason
from podium.cluster.transport import GoneError
from podium.errors import ClusterError, PodiumError, StoreError

_DEATHS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
)
# For the reason why a stream ended, which is here already if there is one.
_WHY_S = 5.0


class RayProcess:
    """One actor."""

    def __init__(
        self,
        actor: Any,
        *,
        suspect_node: Callable[[], None] = lambda: None,
        came_up: Callable[[Any, ProcessInfo | None], None] = lambda actor, process: None,
        kill: Callable[[Any], None] = lambda actor: None,
        is_here: bool = False,
        info: ProcessInfo | None = None,
    ) -> None:
        """`is_here`: on this machine, where the kernel reports on it. `info`: its process, if that is known."""
        self._actor, self._suspect_node, self._is_here = actor, suspect_node, is_here
        self._came_up, self._kill = came_up, kill
        self._info = info

    @property
    def actor(self) -> Any:
        """Ray's handle of the actor."""
        return self._actor

    async def handshake(self) -> Handshake:
        """Waits until the worker runs; returns its report about itself."""
        handshake: Handshake = await self._answer(self._actor.handshake.remote())
        self._info = look(handshake.pid) if self._is_here else None
        self._came_up(self._actor, self._info)
        return handshake

    async def attach(self) -> Attached:
        """Takes over the worker from another controller."""
        attached: Attached = await self._answer(self._actor.attach.remote())
        self._info = look(attached.pid) if self._is_here else None
        self._came_up(self._actor, self._info)
        return attached

    def look(self) -> ProcessInfo | None:
        """The worker's process now, if it is on this machine."""
        return look(self._info.pid) if self._info is not None else None

    def perform(self, call: Call, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Sends a call to the work thread."""
        return self._answer(_sent(self._actor.perform, call, arguments, named))

    def perform_storing(self, call: Invoke, *arguments: Any, **named: Any) -> tuple[Awaitable[Reply], Stored[Any]]:
        """Sends a call to the work thread; its rows stay in the object store."""
        reply, rows = _sent(self._actor.perform_storing, call, arguments, named)
        return self._answer(reply), RayStored(rows)

    def stream(self, call: Invoke, *arguments: Any, **named: Any) -> AsyncIterator[tuple[Reply, Stored[Any]]]:
        """Replies and rows of a method that yields, as they come."""
        return self._blocks(_sent(self._actor.stream.options(num_returns="streaming"), call, arguments, named))

    async def _blocks(self, items: Any) -> AsyncIterator[tuple[Reply, Stored[Any]]]:
        while True:
            # A reply shows that its rows, which were sent before, have come whole.
            rows = await self._next(items)
            try:
                reply = await self._answer(await self._next(items))
            except GoneError:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WHY_S):
                        await self.answer(rows)  # rows that could not be stored end a stream, and say why
                raise
            yield reply, RayStored(rows)
            if reply.last:
                return

    def control(self, call: Invoke, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Sends a call that runs beside the work thread."""
        return self._answer(_sent(self._actor.control, call, arguments, named))

    def where(self) -> Awaitable[Whereabouts]:
        """Where the worker's threads are now."""
        return self._answer(self._actor.where.remote())

    async def beats(self, every_s: float) -> AsyncIterator[Beat]:
        """Heartbeats until the worker is gone, which raises GoneError."""
        items = self._actor.beats.options(num_returns="streaming").remote(every_s)
        while True:
            yield await self._answer(await self._next(items))

    def _answer(self, ref: Any) -> PendingReply:
        return PendingReply(self, ref)

    async def answer(self, ref: Any) -> Any:
        """Awaits an object of Ray; translates its errors into Podium's."""
        try:
            return await ref
        except ray.exceptions.RayError as error:
            raise self._translated(error) from None

    async def _next(self, items: Any) -> Any:
        try:
            return await anext(items)
        except StopAsyncIteration:
            raise GoneError("its stream ended before its last word") from None
        except ray.exceptions.RayError as error:
            raise self._translated(error) from None

    def _translated(self, error: ray.exceptions.RayError) -> PodiumError:
        """Translates an error of Ray. It does not come from the role, whose exceptions the role host catches. Either
        arguments or answers cannot be pickled, or the worker has ended."""
        if isinstance(error, STORE_IS_FULL):
            return full_store()
        if isinstance(error, ray.exceptions.ObjectLostError):
            lost = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            return StoreError(f"an argument is lost with the node that held it: {str(lost).splitlines()[0]}")
        if isinstance(error, ray.exceptions.RayTaskError):
            return ClusterError(f"a call could not be carried to or from its worker: {error.cause!r}\n{error}")
        if isinstance(error, ray.exceptions.ActorUnavailableError):
            self._suspect_node()
        if isinstance(error, _DEATHS):
            return GoneError(death_reason(error))
        return ClusterError(f"an answer came and cannot be read here: {error}")

    def handle(self) -> RayWorkerHandle:
        """The handle by which other workers call this one."""
        return RayWorkerHandle(self._actor)

    def kill(self) -> None:
        """Kills the worker, even a stopped one."""
        self._kill(self._actor)
        now = self.look()
        if now is not None and now.is_stopped and self._info is not None:
            kill(self._info)  # Ray asks it to exit, and a stopped process does not react


class RayWorkerHandle:
    """An actor as other workers call it; pickles as its handle."""

    def __init__(self, actor: Any) -> None:
        self._process = RayProcess(actor)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayWorkerHandle, (self._process.actor,)

    def control(self, call: Invoke, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Sends a call that runs beside the work thread."""
        return self._process.control(call, *arguments, **named)


class PendingReply(Awaitable[Any]):
    """A worker's pending reply, to be awaited alone or together with others."""

    def __init__(self, process: RayProcess, ref: Any) -> None:
        self._process, self.ref = process, ref

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._process.answer(self.ref).__await__()


def _sent(method: Any, call: Call, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    try:
        packed, references = pack(arguments, named)
        return method.remote(call, packed, *references)
    except (TypeError, pickle.PicklingError):
        what = f"{call.role}.{call.method}" if isinstance(call, Invoke) else type(call).__name__.lower()
        bad = [f"number {at}" for at, value in enumerate(arguments) if not _travels(value)]
        bad += [key for key, value in named.items() if not _travels(value)]
        kinds = {type(value).__name__ for value in (*arguments, *named.values()) if not _travels(value)}
        # Ray's own message shows the values, which may be secret.
        raise ClusterError(
            f"{what}: its argument {', '.join(bad)} ({', '.join(sorted(kinds))}) cannot be pickled."
        ) from None


def _travels(value: Any) -> bool:
    try:
        pack((value,), {})
    except Exception:
        return False
    return True
