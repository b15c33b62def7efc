# SPDX-License-Identifier: Apache-2.0
"""Calls all, one, or each of a role's workers by the actual function: `group.call_all(Learner.update)`.

Typed handles are written by hand on top of this; nothing here depends on what a role does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from podium.cluster.deadlines import Deadline, wall_s
from podium.cluster.fanout import OverdueError, Pending, gather_answers, sending
from podium.cluster.identity import WorkerId
from podium.cluster.meshes import RoleMesh
from podium.cluster.messages import Invoke, Reply, RowsHead
from podium.cluster.objects import Stored
from podium.cluster.results import CallResult, Computed, Merged, ShardResult, merge
from podium.cluster.streams import merged
from podium.cluster.transport import ByReference, GoneError, Transport
from podium.cluster.worker_pool import WorkerPool
from podium.data.trajectories import RowsT, TrajectoryIds
from podium.errors import ClusterError, ResultError, RoleError, WorkerDiedError

if TYPE_CHECKING:
    from podium.cluster.workers import Workers

RoleT = TypeVar("RoleT")
Result = TypeVar("Result")
P = ParamSpec("P")


class Shard(Protocol):
    """The input of one rank: any object with trajectory ids."""

    @property
    def ids(self) -> TrajectoryIds:
        """Trajectories of the shard."""
        ...


ShardT = TypeVar("ShardT", bound=Shard)
Blocks = AsyncIterator[tuple[Reply, Stored[Any]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Opened:
    """A streaming call in flight on one worker."""

    name: str
    worker_pool: WorkerPool
    worker: WorkerId
    rank: int
    ids: TrajectoryIds | None  # None: unknown in advance
    blocks: Blocks


class RoleGroup(Generic[RoleT]):
    """The workers of one role. `within(seconds)` gives the same group with another deadline for its calls."""

    def __init__(
        self,
        started: Workers,
        transport: Transport,
        role: str,
        kind: type[RoleT],
        *,
        deadline_s: float,
        control_s: float | None = None,
    ) -> None:
        """`control_s`: deadline of control calls, if it is another."""
        self._started, self._transport = started, transport
        self._role, self._kind, self._deadline_s = role, kind, deadline_s
        self._control_s = deadline_s if control_s is None else control_s

    @property
    def mesh(self) -> RoleMesh:
        """The role's mesh."""
        return self._started.registry.mesh(self._role)

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """The current workers of the role, in rank order. Vacant ranks are left out."""
        return self._started.registry.workers_of(self._role)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of `workers`."""
        return self._started.registry.ranks_of(self._role)

    def worker(self, rank: int) -> WorkerId:
        """The worker of one rank of the role's mesh. Raises WorkerDiedError if its slot is vacant."""
        mesh = self.mesh
        if not 0 <= rank < len(mesh.slots):
            raise ClusterError(f"role {self._role} has the ranks 0 to {len(mesh.slots) - 1}, not {rank}.")
        worker = self._started.registry.worker(mesh.pool, mesh.slots[rank])
        if worker is None:
            raise WorkerDiedError(f"rank {rank} of role {self._role} has no worker now: its slot is vacant.")
        return worker

    def within(self, seconds: float, *, work_only: bool = False) -> RoleGroup[RoleT]:
        """The same group with another deadline for its calls. `work_only`: not for control calls, which answer soon."""
        control_s = self._control_s if work_only else seconds
        return RoleGroup(
            self._started, self._transport, self._role, self._kind, deadline_s=seconds, control_s=control_s
        )

    def requires(self, *methods: Callable[..., Any]) -> None:
        """Raises an error now if one of these is not a method of the role. A handle declares in its constructor which
        methods it calls."""
        for method in methods:
            self._name(method)

    async def call_all(
        self, method: Callable[Concatenate[RoleT, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[CallResult[Result], ...]:
        """Makes the same call on every worker; answers are in rank order."""
        return await self._call(self.workers, method, args, kwargs)

    async def call_one(
        self, rank: int, method: Callable[Concatenate[RoleT, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> CallResult[Result]:
        """Calls the worker of one rank of the role's mesh. Not for methods that use collectives."""
        return (await self._call((self.worker(rank),), method, args, kwargs))[0]

    async def control_all(
        self, method: Callable[Concatenate[RoleT, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[CallResult[Result], ...]:
        """Makes the same call on every worker's control thread, which answers while the work thread is busy. Useful to
        pause or cancel work. The role makes the two thread-safe."""
        return await self._call(self.workers, method, args, kwargs, control=True)

    async def control_one(
        self, rank: int, method: Callable[Concatenate[RoleT, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> CallResult[Result]:
        """Like `control_all`, on one worker."""
        return (await self._call((self.worker(rank),), method, args, kwargs, control=True))[0]

    async def call_sharded(
        self,
        method: Callable[Concatenate[RoleT, ShardT, P], Computed[RowsT]],
        shards: Sequence[ShardT],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Merged[RowsT]:
        """Sends one shard to each rank, or to each group of ranks with the same data. The rows of the answers stay in
        the object store."""
        name, worker_pool, together = self._name(method), self._worker_pool(), self.mesh.shape.same_data
        self._check_shards(shards)
        pending: list[Pending] = []
        rows: list[Stored[Any]] = []
        members = [worker_pool.member(worker) for worker in self.workers]
        serial = next(worker_pool.serials)
        with sending(pending, f"{self._role}.{name}", worker_pool):
            for rank, member in enumerate(members):
                order = Invoke(member.worker, self._role, name, "rows", serial)
                answer, stored = member.process.perform_storing(order, shards[rank // together], *args, **kwargs)
                pending.append(Pending(worker=member.worker, answer=answer))
                rows.append(stored)
        replies = await self._gather(pending, name, worker_pool)
        speaking = range(0, len(replies), together)
        results = [self._result(replies[rank], rank, rows[rank]) for rank in speaking]
        expected = [TrajectoryIds.concatenate([])] * len(replies)
        for rank, shard in zip(speaking, shards, strict=True):
            expected[rank] = shard.ids
        return merge(results, expected, self._started.registry, self._role)

    async def stream_one(
        self,
        rank: int,
        method: Callable[Concatenate[RoleT, ShardT, P], Iterable[Computed[RowsT]]],
        shard: ShardT,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncIterator[ShardResult[RowsT]]:
        """Yields blocks of one rank as its method yields them. Finished blocks stay readable if the worker dies later.
        The deadline is for the wait between two blocks. Ends with an error unless every id of the shard has come
        once."""
        self.worker(rank)
        self._check_repeats([shard])
        opened = self._open([(rank, shard)], self._name(method), args, kwargs)
        async for result in self._blocks(opened[0]):
            yield result

    async def stream_sharded(
        self,
        method: Callable[Concatenate[RoleT, ShardT, P], Iterable[Computed[RowsT]]],
        shards: Sequence[ShardT],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncIterator[ShardResult[RowsT]]:
        """Yields blocks of all ranks in order of arrival. The first failure ends it."""
        assert self.mesh.shape.same_data == 1, "ranks on the same data do not stream"
        self._check_shards(shards)
        opened = self._open(list(enumerate(shards)), self._name(method), args, kwargs)
        async for block in merged([self._blocks(each) for each in opened]):
            yield block

    async def stream_open(
        self, rank: int, method: Callable[Concatenate[RoleT, P], Iterable[Computed[RowsT]]], *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncIterator[ShardResult[RowsT]]:  # fmt: skip
        """Yields blocks of one rank whose trajectories are not known in advance, because the worker is given more while
        it runs. The caller checks what comes. The deadline is for the wait between two blocks."""
        member = self._worker_pool().member(self.worker(rank))
        name = self._name(method)
        order = Invoke(member.worker, self._role, name, "rows")
        opened = _Opened(
            name=name, worker_pool=self._worker_pool(), worker=member.worker, rank=rank, ids=None,
            blocks=member.process.stream(order, *args, **kwargs),
        )  # fmt: skip
        async for result in self._blocks(opened):
            yield result

    def _open(
        self, shards: Sequence[tuple[int, Shard]], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[_Opened]:
        """Sends a streaming call to all of these ranks, or to none."""
        worker_pool = self._worker_pool()
        members = [worker_pool.member(self.worker(rank)) for rank, _ in shards]
        opened: list[_Opened] = []
        with sending(opened, f"{self._role}.{name}", worker_pool):
            for (rank, shard), member in zip(shards, members, strict=True):
                order = Invoke(member.worker, self._role, name, "rows")
                opened.append(
                    _Opened(
                        name=name,
                        worker_pool=worker_pool,
                        worker=member.worker,
                        rank=rank,
                        ids=shard.ids,
                        blocks=member.process.stream(order, shard, *args, **kwargs),
                    )
                )
        return opened

    async def _blocks(self, opened: _Opened) -> AsyncIterator[ShardResult[Any]]:
        """Yields the blocks of one rank as they arrive."""
        waiting, began_s, has_ended = opened.ids, wall_s(), False
        try:
            while True:
                reply, rows = await self._next_block(opened)
                if reply.last:
                    break
                result: ShardResult[Any] = self._result(reply, opened.rank, rows)
                if waiting is not None:
                    waiting = self._tick_off(waiting, result)
                yield result
            has_ended = True
        finally:
            if not has_ended and (opened.worker_pool.dead or opened.worker_pool.broken):
                self._started.record_lost(f"{self._role}.{opened.name}", began_s, opened.worker)
        if waiting is not None and len(waiting):
            raise ResultError(
                f"{opened.worker} ended {self._role}.{opened.name} and these trajectories never came: {waiting}."
            )

    async def _call(
        self,
        workers: Sequence[WorkerId],
        method: Callable[..., Result],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        control: bool = False,
    ) -> tuple[CallResult[Result], ...]:
        name, worker_pool = self._name(method), self._worker_pool()
        members = [worker_pool.member(worker) for worker in workers]  # if one is dead, nothing is sent to the others
        if len(members) > 1:
            args = tuple(self._shared(value) for value in args)
            kwargs = {key: self._shared(value) for key, value in kwargs.items()}
        pending: list[Pending] = []
        serial = next(worker_pool.serials) if len(members) > 1 and not control else 0
        with sending(pending, f"{self._role}.{name}", worker_pool):
            for member in members:
                order = Invoke(member.worker, self._role, name, "value", serial)
                send = member.process.control if control else member.process.perform
                pending.append(Pending(worker=member.worker, answer=send(order, *args, **kwargs)))
        replies = await self._gather(pending, name, worker_pool, in_step=not control)
        return tuple(
            CallResult(worker=worker, value=reply.value) for worker, reply in zip(workers, replies, strict=True)
        )

    async def _gather(
        self, pending: Sequence[Pending], name: str, worker_pool: WorkerPool, *, in_step: bool = True
    ) -> list[Reply]:
        deadline, began_s = Deadline(self._deadline_s if in_step else self._control_s), wall_s()
        try:
            replies = await gather_answers(pending, f"in {self._role}.{name}", deadline, worker_pool, in_step=in_step)
        except (WorkerDiedError, OverdueError):
            for each in pending if in_step else ():
                self._started.record_lost(f"{self._role}.{name}", began_s, each.worker)
            raise
        for each, reply in zip(pending, replies, strict=True):
            self._check_sender(each.worker, reply, name)
        return replies

    def _check_sender(self, expected: WorkerId, reply: Reply, name: str) -> None:
        self._started.record(reply.spans)
        if reply.worker != expected or not self._started.registry.is_current(expected):
            now = self._started.registry.worker(expected.pool, expected.index)
            raise WorkerDiedError(
                f"an answer to {self._role}.{name} from {reply.worker} is refused: the call went to {expected}, and "
                f"its slot has {now or 'nobody'} now. An old incarnation has outdated weights and state."
            )

    def _shared(self, value: Any) -> Any:
        """Stores a large argument of a call to many workers once; a small one travels with each call."""
        large = getattr(value, "nbytes", 0) > _STORE_ABOVE
        return ByReference(stored=self._transport.store(value)) if large else value

    async def _next_block(self, opened: _Opened) -> tuple[Reply, Stored[Any]]:
        name, worker_pool, worker = opened.name, opened.worker_pool, opened.worker
        try:
            async with asyncio.timeout(self._deadline_s):
                reply, rows = await worker_pool.unless_dead(worker, anext(opened.blocks))
        except TimeoutError:
            report = await worker_pool.where([worker])
            what = f"{self._role}.{name}"
            worker_pool.breaks(f"a stream of {what} came to no end")
            raise OverdueError(
                f"{worker} has sent no block of {what} for {self._deadline_s:.1f} s. Where they are:\n{report}",
                [worker],
            ) from None
        except GoneError as gone:
            worker_pool.died(worker, str(gone))
            raise WorkerDiedError(
                f"{worker} died in {self._role}.{name}: {gone}. The blocks that it finished can still be read."
            ) from gone
        self._check_sender(worker, reply, name)
        if reply.failure is not None:
            failure = reply.failure
            if worker_pool.meets:
                await worker_pool.await_deaths([each.worker for each in worker_pool.members if each.worker != worker])
                dead = ", ".join(str(each.died) for each in worker_pool.members if each.died is not None)
                if dead:
                    raise WorkerDiedError(f"{dead}. So {worker} failed in {self._role}.{name}: {failure.text}")
                worker_pool.breaks(f"{worker} failed while others may wait for it in {self._role}.{name}")
            raise RoleError(
                f"{worker} failed in {self._role}.{name}: {failure.kind}: {failure.text}\n{failure.trace}"
            ) from failure.error
        return reply, rows

    def _tick_off(self, waiting: TrajectoryIds, result: ShardResult[RowsT]) -> TrajectoryIds:
        strange = result.ids.without(waiting)
        if len(strange) or len(result.ids.repeated()):
            raise ResultError(
                f"{result.worker} sent trajectories that it was not asked for, or sent them twice: "
                f"{strange if len(strange) else result.ids.repeated()}."
            )
        return waiting.without(result.ids)

    def _result(self, reply: Reply, rank: int, rows: Stored[Any]) -> ShardResult[Any]:
        head: RowsHead = reply.value
        assert reply.worker is not None
        return ShardResult(
            worker=reply.worker,
            rank=rank,
            ids=head.ids,
            lengths_N=head.lengths_N,
            stored=rows if head.stored else None,
            metrics=head.metrics,
            note=head.note,
        )

    def _worker_pool(self) -> WorkerPool:
        worker_pool = self._started.worker_pool(self.mesh.pool)
        if worker_pool.broken:
            raise WorkerDiedError(
                f"pool {worker_pool.pool.name} cannot be called: {worker_pool.broken}. "
                f"Recover it with `workers.recover({worker_pool.pool.name!r})`."
            )
        return worker_pool

    def _check_shards(self, shards: Sequence[Shard]) -> None:
        expected, together = self.mesh.shape.data_ranks, self.mesh.shape.same_data
        if len(shards) != expected:
            ranks = "ranks" if together == 1 else f"groups of {together} ranks"
            raise ClusterError(
                f"role {self._role} has {expected} {ranks} ({self.mesh.shape}) and is given {len(shards)} shards; "
                "cut one for each, empty ones too."
            )
        self._check_repeats(shards)

    def _check_repeats(self, shards: Sequence[Shard]) -> None:
        """Checks before the work starts that each trajectory is in one shard, once."""
        twice = TrajectoryIds.concatenate([shard.ids for shard in shards]).repeated()
        if len(twice):
            pairs = zip(self.workers, shards, strict=False)
            holders = [str(worker) for worker, shard in pairs if len(twice.without(shard.ids)) < len(twice)]
            raise ResultError(
                f"role {self._role}: given to several ranks, or twice to one ({', '.join(holders)}): {twice}"
            )

    def _name(self, method: Callable[..., Any]) -> str:
        name = getattr(method, "__name__", repr(method))
        if name.startswith("_") or not any(vars(base).get(name) is method for base in self._kind.__mro__):
            raise ClusterError(
                f"{getattr(method, '__qualname__', method)} is not a public method of {self._kind.__qualname__}, "
                f"which role {self._role} is."
            )
        return name


# Ray sends arguments up to this size inside the call, and stores larger ones once for every receiver.
_STORE_ABOVE = 100 * 1024
