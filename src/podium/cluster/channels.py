# SPDX-License-Identifier: Apache-2.0
"""Channels: workers of one role call workers of another directly, without the controller in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from podium.cluster.deadlines import Deadline
from podium.cluster.fanout import Pending, gather_answers
from podium.cluster.identity import WorkerId
from podium.cluster.meshes import MeshRegistry
from podium.cluster.messages import Invoke, OpenChannel, Reply
from podium.cluster.worker_pool import WorkerPool
from podium.errors import ClusterError, DeadlineError, RoleError

RoleT = TypeVar("RoleT")
Result = TypeVar("Result")
P = ParamSpec("P")


class WorkerHandle(Protocol):
    """A handle by which other workers call a worker; it is sent to them."""

    def control(self, order: Invoke, *arguments: Any, **named: Any) -> Awaitable[Reply]:
        """Calls a role's method on the other worker's control threads, which answer while its work thread is busy."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Channel:
    """The workers of a role as another worker sees them, in rank order."""

    role: str
    peers: tuple[tuple[WorkerId, WorkerHandle], ...]

    def __len__(self) -> int:
        return len(self.peers)

    async def call(
        self,
        rank: int,
        deadline_s: float,
        method: Callable[Concatenate[RoleT, P], Result],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Result:
        """Calls the worker of one rank. Raises RoleError for its failure, GoneError for its death, and DeadlineError
        after the deadline; the call itself is not cancelled."""
        worker, handle = self.peers[rank]
        order = Invoke(worker, self.role, method.__name__, "value")
        try:
            async with asyncio.timeout(deadline_s):
                reply = await handle.control(order, *args, **kwargs)
        except TimeoutError:
            raise DeadlineError(f"{worker} did not answer {self.role}.{method.__name__} in {deadline_s:g} s.") from None
        failure = reply.failure
        if failure is not None:
            raise RoleError(
                f"{worker} failed in {self.role}.{method.__name__}: {failure.kind}: {failure.text}\n{failure.trace}"
            ) from failure.error
        value: Result = reply.value
        return value


class Channels:
    """All channels of a layout. Opened again when either side has new workers."""

    def __init__(self, worker_pools: Mapping[str, WorkerPool], registry: Callable[[], MeshRegistry]) -> None:
        self._worker_pools, self._registry = worker_pools, registry
        self._known: list[tuple[str, str]] = []

    async def open_channel(
        self, role: str, to: str, deadline: Deadline, only: Collection[WorkerId] | None = None
    ) -> None:
        """From now on, the workers of `to`, or only some of them, can call those of `role`."""
        if (role, to) not in self._known:
            self._known.append((role, to))
        registry = self._registry()
        called = [self._worker_pools[worker.pool].living(worker) for worker in registry.workers_of(role)]
        order = OpenChannel(
            channel=Channel(role=role, peers=tuple((each.worker, each.process.handle()) for each in called))
        )
        wanted = [worker for worker in registry.workers_of(to) if only is None or worker in only]
        callers = [self._worker_pools[worker.pool].living(worker) for worker in wanted]
        if not callers:
            raise ClusterError(f"role {to} has no workers to open a channel to {role} for.")
        worker_pool = self._worker_pools[callers[0].worker.pool]
        pending = [Pending(worker=each.worker, answer=each.process.perform(order)) for each in callers]
        await gather_answers(pending, f"opening a channel from {to} to {role}", deadline, worker_pool, in_step=False)

    async def renew(self, pool: str, new: Collection[WorkerId], deadline: Deadline) -> None:
        """Called after `new` workers of a pool have started. New callers get the handles of the workers they call.
        Earlier callers have them already, and may be busy for long. Handles of new workers are sent to all their
        callers."""
        registry = self._registry()
        for role, to in list(self._known):
            if pool == registry.mesh(role).pool:
                dead = self._worker_pools[registry.mesh(to).pool].dead
                callers = [worker for worker in registry.workers_of(to) if worker.index not in dead]
                if callers:  # the others get the handles when they are replaced
                    await self.open_channel(role, to, deadline, only=callers)
            elif pool == registry.mesh(to).pool:
                await self.open_channel(role, to, deadline, only=new)
