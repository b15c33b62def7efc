# SPDX-License-Identifier: Apache-2.0
"""The started workers of a layout: gives access to their roles, watches them, and replaces those that die."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar, assert_never

from podium.cluster.attaching import attach
from podium.cluster.blocking import in_thread
from podium.cluster.channels import Channels
from podium.cluster.deadlines import Deadline, wall_s
from podium.cluster.fanout import OverdueError
from podium.cluster.group import RoleGroup
from podium.cluster.hangs import Hang
from podium.cluster.health import Leave, Leaving, Rebuild, Respawn, WhereReport, WorkerHealth, remedy
from podium.cluster.identity import WorkerId
from podium.cluster.layout import Layout
from podium.cluster.links import Links
from podium.cluster.member import Timeouts
from podium.cluster.meshes import MeshRegistry
from podium.cluster.placing import place_pools
from podium.cluster.results import Span
from podium.cluster.transport import Transport
from podium.cluster.worker_pool import RESTORING, WorkerPool
from podium.errors import AttachError, ClusterError, DeadlineError, PlacementError, StartTimeoutError, WorkerDiedError
from podium.observe.timing import DIED, LOST, NESTED

RoleT = TypeVar("RoleT")
Tell = Callable[[str], object]
Restore = Callable[[tuple[WorkerId, ...]], Awaitable[None]]
HangListener = Callable[[Hang], object]
LeavingListener = Callable[[Leaving], object]

_ATTEMPTS = 3
_MOST_SPANS = 100_000


class Workers:
    """The started workers of a layout."""

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        timeouts: Timeouts,
        *,
        deadline_s: float,
        tell: Tell = lambda what: None,
    ) -> None:
        self._layout, self._transport, self._deadline_s = layout, transport, deadline_s
        self._placing, self._timeouts = asyncio.Lock(), timeouts
        self._worker_pools = {
            pool.name: WorkerPool(
                layout,
                pool,
                transport,
                timeouts,
                self._placing,
                tell,
                self._note_hang,
                self._note_leaving,
                self._note_gone,
            )
            for pool in layout.pools
        }
        meshes = {role.name: layout.mesh(role) for role in layout.roles}
        self.registry = MeshRegistry(meshes=meshes, workers={})
        self._links = Links(self._worker_pools, lambda: self.registry, timeout_s=timeouts.collective_s)
        self._channels = Channels(self._worker_pools, lambda: self.registry)
        self._restores: dict[str, Restore] = {}
        self._hang_listener: HangListener | None = None
        self._leaving_listener: LeavingListener = lambda leaving: None
        self.num_attached = 0  # workers that another controller has started
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)

    async def start(self) -> None:
        """Places and starts all pools, then builds their roles."""
        deadline, worker_pools = Deadline(self._deadline_s), list(self._worker_pools.values())
        starting: list[asyncio.Task[None]] = []
        try:
            await place_pools(worker_pools, self._transport, self._placing, self._timeouts, deadline, grows=False)
            starting += [
                asyncio.create_task(self._until_it_stands(worker_pool, worker_pool.start, deadline))
                for worker_pool in worker_pools
            ]
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            self.end()
            raise

    async def attach(self) -> None:
        """Takes over what another controller has left, and starts what is missing."""
        left = await self._transport.left_behind(self._layout.pools)
        attached = await attach(list(self._worker_pools.values()), self._layout, left)
        self.num_attached = sum(attached.values())
        if not self.num_attached:
            raise AttachError("no worker of the controller before this one can be attached.")
        for name, worker_pool in self._worker_pools.items():
            self.registry = self.registry.with_workers([member.worker for member in worker_pool.members])
            try:
                await self.recover(name)
            except (WorkerDiedError, DeadlineError, PlacementError) as error:
                raise AttachError(f"workers of pool {name} cannot be replaced: {error}") from error

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of all pools."""
        return tuple(self._worker_pools)

    def is_damaged(self, pool: str) -> bool:
        """Whether a worker of this pool is dead, or others cannot go on without one."""
        worker_pool = self.worker_pool(pool)
        return bool(worker_pool.dead or worker_pool.broken or worker_pool.unfinished)

    def worker_pool(self, pool: str) -> WorkerPool:
        """The pool of this name. Raises a ClusterError if the name is unknown."""
        if pool not in self._worker_pools:
            raise ClusterError(f"there is no pool {pool!r}; the pools are {', '.join(self._worker_pools)}.")
        return self._worker_pools[pool]

    def role(self, name: str, kind: type[RoleT]) -> RoleGroup[RoleT]:
        """The workers of a role. `kind` is the class that the layout gives it, or a base of it."""
        spec = next((role for role in self._layout.roles if role.name == name), None)
        if spec is None or not issubclass(spec.kind, kind):
            roles = ", ".join(f"{role.name} ({role.kind.__name__})" for role in self._layout.roles)
            raise ClusterError(f"there is no role {name!r} that is a {kind.__name__}; the layout has {roles}.")
        return RoleGroup(self, self._transport, name, spec.kind, deadline_s=self._deadline_s)

    async def connect(self, name: str, roles: Sequence[str], *, deadline_s: float = 60.0) -> None:
        """Forms a link between the workers of these roles, ranks counted in this order: a separate process group and
        store. It is formed again whenever one of their pools is recovered."""
        await self._links.connect(name, tuple(roles), Deadline(deadline_s))

    async def open_channel(self, role: str, *, to: str, deadline_s: float = 60.0) -> None:
        """From now on, the workers of `to` can call those of `role` directly (`context.channel(role)`), even while
        those work. The channel is opened again whenever one of the pools is recovered."""
        await self._channels.open_channel(role, to, Deadline(deadline_s))

    def restore_with(self, role: str, restore: Restore) -> None:
        """Registers how new workers of a role get their state; called after every respawn."""
        self.registry.mesh(role)
        self._restores[role] = restore

    def report_hangs_to(self, listener: HangListener) -> None:
        """`listener` gets every hang before its workers are ended."""
        self._hang_listener = listener

    async def _note_hang(self, hang: Hang) -> None:
        """Adds the workers of the other pools: one of them may be what is waited for."""
        pools = [pool for pool in self._worker_pools if pool not in hang.where]
        reports = await asyncio.gather(*(self.where(pool) for pool in pools))
        if self._hang_listener is not None:
            self._hang_listener(replace(hang, where={**hang.where, **dict(zip(pools, reports, strict=True))}))

    def report_leaving_to(self, listener: LeavingListener) -> None:
        """`listener` is told of every worker that will be gone soon, as long as it still works."""
        self._leaving_listener = listener

    def _note_leaving(self, leaving: Leaving) -> None:
        self._leaving_listener(leaving)

    def _note_gone(self, worker: WorkerId) -> None:
        self._spans.append(Span(DIED, wall_s(), wall_s(), worker))

    def vacate(self, pool: str, slots: Sequence[int], *, frees_places: bool = False) -> None:
        """Ends the workers of these slots and goes on without them: calls to all workers and links leave them out, and
        channels when they are renewed. `frees_places`: their places are not kept for their successors."""
        if slots:
            self.worker_pool(pool).vacate(slots, frees_places=frees_places)
            self.registry = self.registry.without(pool, slots)
            self._links.outdate(pool)

    async def renew_channels(self, pool: str) -> None:
        """Tells those that call workers of this pool directly who they are now."""
        await self._channels.renew(pool, (), Deadline(self._deadline_s))

    async def fill(self, pool: str, *, deadline_s: float = 300.0) -> tuple[int, ...]:
        """Starts workers in vacant slots, in as many as there is room for now. They are called only when `admit` has
        been. Returns the slots. A failure leaves none of them running, and the others are not concerned."""
        return await self.worker_pool(pool).fill(Deadline(deadline_s))

    async def admit(self, pool: str) -> tuple[WorkerId, ...]:
        """From now on the workers that `fill` has started are workers like the others. Returns them."""
        worker_pool = self.worker_pool(pool)
        new = tuple(each.worker for each in worker_pool.members if each.slot in worker_pool.ready)
        if new:
            worker_pool.vacant -= {worker.index for worker in new}
            self.registry = self.registry.with_workers(new)
            self._links.outdate(pool)
            await self._channels.renew(pool, new, Deadline(self._deadline_s))
        return new

    async def nodes_changed(self, pool: str) -> None:
        """Waits until it is worth filling slots again. Reports workers of the pool whose nodes are being drained."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.worker_pool(pool).avoids_for_s):
                await self._transport.nodes_changed()
        self.worker_pool(pool).note_nodes(await in_thread(self._transport.nodes))

    async def renew_links(self, *, deadline_s: float = 60.0) -> None:
        """Forms links again whose workers were replaced by a `recover` that did not."""
        await self._links.renew(Deadline(deadline_s))

    async def recover(
        self, pool: str, *, everyone: bool = False, renews_links: bool = True, deadline_s: float = 300.0
    ) -> tuple[WorkerId, ...]:
        """Recovers a pool after a death. Replaces its dead workers, or all of them if they use collectives (or
        `everyone` is set). Returns the new workers (none, if nothing was wrong). A failure, including one in links or
        restoring, can be retried. Without `renews_links` the others of its links may go on with their work: call
        `renew_links` before the links are used."""
        worker_pool, deadline = self.worker_pool(pool), Deadline(deadline_s)
        if pool in RESTORING.get():
            raise ClusterError(
                f"pool {pool} is being recovered already: what restores its workers cannot call recover."
            )
        async with self._alone(worker_pool, deadline):  # a second caller then finds nothing left to recover
            slots = worker_pool.present if everyone else self._to_replace(worker_pool)
            if slots:
                worker_pool.unfinished |= set(slots)
                await self._until_it_stands(worker_pool, lambda left: worker_pool.replace(slots, left), deadline)
            return await self._finish(worker_pool, deadline, renews_links=renews_links)

    @asynccontextmanager
    async def _alone(self, worker_pool: WorkerPool, deadline: Deadline) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(deadline.left_s):
                await worker_pool.recovering.acquire()
        except TimeoutError:
            raise DeadlineError(
                f"another recovery of pool {worker_pool.pool.name} is under way and was not done in "
                f"{deadline.seconds:.0f} s."
            ) from None
        try:
            yield
        finally:
            worker_pool.recovering.release()

    def _to_replace(self, worker_pool: WorkerPool) -> tuple[int, ...]:
        choice = remedy(
            collectives=worker_pool.pool.collectives,
            num_slots=worker_pool.pool.slots,
            dead=worker_pool.dead,
            broken=bool(worker_pool.broken),
        )
        match choice:
            case Leave():
                return ()
            case Respawn(slots=slots):
                return slots
            case Rebuild():
                return tuple(range(worker_pool.pool.slots))
            case other:
                assert_never(other)

    async def _finish(self, worker_pool: WorkerPool, deadline: Deadline, *, renews_links: bool) -> tuple[WorkerId, ...]:
        """Gives new workers their links and, from the owners of their roles, their state."""
        pool, new = (
            worker_pool.pool.name,
            tuple(each.worker for each in worker_pool.members if each.slot in worker_pool.unfinished),
        )
        if not new:
            return ()
        self._links.outdate(pool)
        if renews_links:  # not those of other pools: they may wait for this one, busy with their work
            await self._links.renew(deadline, pool=pool)
        await self._channels.renew(pool, new, deadline)
        for role, restore in self._restores.items():
            mesh = self.registry.mesh(role)
            mine = tuple(worker for worker in new if mesh.pool == pool and worker.index in mesh.slots)
            if mine:
                await self._restored(role, restore, mine, deadline)
        worker_pool.unfinished.clear()
        return new

    async def _restored(self, role: str, restore: Restore, new: tuple[WorkerId, ...], deadline: Deadline) -> None:
        mark = RESTORING.set(RESTORING.get() | {self.registry.mesh(role).pool})
        try:
            async with asyncio.timeout(deadline.left_s):
                await restore(new)
        except TimeoutError:
            raise DeadlineError(
                f"role {role}: its owner did not restore {', '.join(map(str, new))} in what was left of "
                f"{deadline.seconds:.0f} s for the recovery."
            ) from None
        finally:
            RESTORING.reset(mark)

    def record(self, spans: Sequence[Span]) -> None:
        """Keeps spans that came with a reply."""
        self._spans.extend(spans)

    def record_lost(self, call: str, began_s: float, worker: WorkerId) -> None:
        """Keeps the span of a call that did not return: until the worker died, or until now."""
        died = next((each.died for each in self.worker_pool(worker.pool).members if each.worker == worker), None)
        ended_s = wall_s() if died is None else died.at_s
        self._spans.append(Span(f"{call}{NESTED}{LOST}", began_s, max(began_s, ended_s), worker))

    def take_spans(self) -> tuple[Span, ...]:
        """Spans of all workers that came with replies since the last call, the newest hundred thousand of them."""
        taken = tuple(self._spans)
        self._spans.clear()
        return taken

    async def end_worker(self, worker: WorkerId) -> None:
        """Ends one worker's process, as a fault would; `recover` replaces it."""
        worker_pool = self.worker_pool(worker.pool)
        member = worker_pool.member(worker)
        member.process.kill()
        worker_pool.mark_dead(member, "it was ended by the controller")

    async def end_overdue(self, error: OverdueError) -> bool:
        """Ends the workers that did not answer in time, so that `recover` replaces them. Returns False where that would
        not stop their work: workers of one process are threads."""
        if not self._transport.can_be_ended:
            return False
        for worker in error.workers:
            with suppress(WorkerDiedError):  # it has died meanwhile
                await self.end_worker(worker)
        return True

    def health(self) -> Mapping[str, tuple[WorkerHealth, ...]]:
        """Health by pool, from heartbeats alone: sends no calls."""
        return {name: worker_pool.health() for name, worker_pool in self._worker_pools.items()}

    async def where(self, pool: str) -> WhereReport:
        """Asks every worker of a pool what its threads are doing. Workers answer while they work."""
        return await self.worker_pool(pool).where()

    def end(self) -> None:
        """Ends the workers of all pools."""
        for worker_pool in self._worker_pools.values():
            worker_pool.end()

    async def _until_it_stands(
        self, worker_pool: WorkerPool, raise_it: Callable[[Deadline], Awaitable[Any]], deadline: Deadline
    ) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await raise_it(deadline)
                break
            except WorkerDiedError as error:
                if attempt == _ATTEMPTS or deadline.over or isinstance(error, StartTimeoutError):
                    raise
        present = [each.worker for each in worker_pool.members if each.slot not in worker_pool.vacant]
        self.registry = self.registry.with_workers(present)
