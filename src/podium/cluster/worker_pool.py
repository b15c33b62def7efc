# SPDX-License-Identifier: Apache-2.0
"""The processes of one pool: started together, watched, and ended together or replaced one by one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from podium.cluster.deadlines import Deadline, wall_s
from podium.cluster.fanout import Pending, awaited, gather_answers
from podium.cluster.hangs import Hang, stuck_workers
from podium.cluster.health import Died, Leaving, WhereReport, WorkerHealth, worker_health
from podium.cluster.identity import WorkerId, process_name
from podium.cluster.layout import Layout, Pool
from podium.cluster.member import Member, Timeouts, ask_where
from podium.cluster.messages import Beat, Reply
from podium.cluster.placement import Bundle, NodeState
from podium.cluster.places import Places
from podium.cluster.placing import place_pools, place_vacant
from podium.cluster.readying import LOOK_AGAIN_S, await_handshakes, make_ready
from podium.cluster.silence import Silence
from podium.cluster.transport import BundlePlace, GoneError, Process, Transport
from podium.errors import DeadlineError, PodiumError, WorkerDiedError

log = logging.getLogger("podium.cluster")

Value = TypeVar("Value")

# Pools whose owners are restoring state in this context: only they may call workers without state.
RESTORING: ContextVar[frozenset[str]] = ContextVar("RESTORING", default=frozenset())

# How long it may take until the death of a node is known.
_DEATH_S = 5.0


class WorkerPool:
    """The workers of one pool."""

    def __init__(
        self,
        layout: Layout,
        pool: Pool,
        transport: Transport,
        timeouts: Timeouts,
        placing: asyncio.Lock,
        tell: Callable[[str], object] = lambda what: None,
        on_hang: Callable[[Hang], Awaitable[None]] | None = None,
        on_leaving: Callable[[Leaving], object] = lambda leaving: None,
        on_gone: Callable[[WorkerId], object] = lambda worker: None,
    ) -> None:
        """`on_hang` is awaited before workers that hang are ended; `on_leaving` is told of workers that will be gone
        soon, `on_gone` of those that are dead or ended."""
        self.pool, self.broken, self._tell, self._on_hang, self._on_leaving = pool, "", tell, on_hang, on_leaving
        self._on_gone = on_gone
        self._layout, self._transport, self._timeouts = layout, transport, timeouts
        self._placing, self.recovering = placing, asyncio.Lock()
        self._places = Places(pool, transport)
        self._members: dict[int, Member] = {}
        self._incarnations: dict[int, int] = {}
        self.serials = itertools.count(1)  # of calls to all workers of a role
        self._ends_hung = False  # whether that is under way
        self.unfinished: set[int] = set()  # slots whose new worker has no links or no state yet
        self.vacant = set(range(pool.num_first, pool.slots))  # slots without a worker that can be called
        self._filled: set[int] = set()  # those of them whose new worker has its roles

    @property
    def members(self) -> list[Member]:
        """Members by slot, also those that were started in vacant slots."""
        return [self._members[slot] for slot in sorted(self._members)]

    @property
    def present(self) -> tuple[int, ...]:
        """Slots that are not vacant."""
        return tuple(slot for slot in range(self.pool.slots) if slot not in self.vacant)

    @property
    def ready(self) -> tuple[int, ...]:
        """Vacant slots in which `fill` has started a worker that lives, and does not leave already."""
        started = [each for each in self.members if each.slot in self.vacant & self._filled]
        return tuple(each.slot for each in started if each.died is None and each.leaving is None)

    @property
    def meets(self) -> bool:
        """Whether its workers form a process group."""
        return self.pool.collectives and self.pool.slots > 1

    @property
    def dead(self) -> tuple[int, ...]:
        """Slots whose worker is gone, or that a failed recovery has left empty."""
        members = self._members
        return tuple(slot for slot in self.present if slot not in members or members[slot].died is not None)

    def member(self, worker: WorkerId) -> Member:
        """The member, if it is still this worker, is alive, and has its links and state."""
        member = self.living(worker)
        if worker.index in self.unfinished and self.pool.name not in RESTORING.get():
            raise WorkerDiedError(
                f"{worker} is new, and its links or its state are not restored. Wait for the recovery that does it; if "
                f"that failed, try `workers.recover({self.pool.name!r})` again."
            )
        return member

    def living(self, worker: WorkerId) -> Member:
        """The member, if it is still this worker and is alive."""
        member = self._members.get(worker.index)
        if member is None or member.worker != worker:
            raise WorkerDiedError(f"{worker} is gone" + (f"; {member.worker} has its slot now." if member else "."))
        if member.died is not None:
            raise WorkerDiedError(f"{member.died}. Replace it with `workers.recover({self.pool.name!r})`.")
        return member

    def enlist(self, worker: WorkerId, process: Process) -> None:
        """Takes a worker that has started into its slot, and watches it."""
        member = Member(slot=worker.index, worker=worker, process=process)
        self._members[worker.index], self._incarnations[worker.index] = member, worker.incarnation
        member.watcher = asyncio.create_task(self._watch(member), name=f"watch {worker}")

    def take_over(self, places: Sequence[BundlePlace], incarnations: Mapping[int, int]) -> None:
        """Goes on with the places and the incarnations of a pool that another controller has started."""
        self._places.take_over(places)
        self._incarnations |= incarnations

    async def start(self, deadline: Deadline) -> None:
        """Places, starts, joins and builds the whole pool. A failure leaves nothing running."""
        try:
            await self._place(deadline)
            await self._start(self.present, deadline)
        except BaseException:
            self.end()
            raise
        self.broken = ""

    async def replace(self, slots: Sequence[int], deadline: Deadline) -> None:
        """Starts new workers in these slots. For a pool with collectives, these are all slots: survivors are ended
        first, because they hold the resources that the new ones need."""
        for slot in slots:
            self._end_member(slot)
        await self._place(deadline)
        try:
            await self._start(slots, deadline)
        except BaseException:
            for slot in slots:
                self._end_member(slot)
            raise
        self.broken = ""

    def vacate(self, slots: Sequence[int], *, frees_places: bool) -> None:
        """Ends the workers of these slots, which are vacant from now on. Without `frees_places` their places are kept
        for their successors."""
        self.vacant |= set(slots)
        self.unfinished -= set(slots)
        self._filled -= set(slots)
        for slot in slots:
            self._end_member(slot)
        if frees_places:
            self._places.leave(slots)

    async def fill(self, deadline: Deadline) -> tuple[int, ...]:
        """Starts workers in vacant slots, in as many as there is room for now. Nobody calls them before the slots are
        taken from `vacant`. Returns the slots; a failure leaves none of them running."""
        for slot in self.vacant.intersection(self._members) - set(self.ready):
            self._end_member(slot)
        self._filled.intersection_update(self.ready)
        slots = await place_vacant(self, self._transport, self._placing, deadline)
        try:
            if slots:
                await self._start(slots, deadline)
                self._filled.update(slots)
        except BaseException:
            for slot in slots:
                self._end_member(slot)
            raise
        return slots

    @property
    def avoids_for_s(self) -> float | None:
        """Seconds until a node may be used again whose workers have left; None: there is none."""
        return self._places.avoids_for_s

    def note_nodes(self, nodes: Sequence[NodeState]) -> None:
        """Reports workers whose node is being drained."""
        draining = {node.id for node in nodes if node.is_draining}
        for slot, place in self._places.by_slot.items():
            if place.node.id in draining and slot in self._members:
                self._note_leaving(self._members[slot], "its node is being drained")

    def end(self) -> None:
        """Ends all processes and releases their places."""
        for slot in list(self._members):
            self._end_member(slot)
        self._places.release()

    def breaks(self, reason: str) -> None:
        """Marks the workers as out of step with each other: no call can be answered until the pool is recovered."""
        if self.meets and not self.broken:
            self.broken = reason

    def health(self) -> tuple[WorkerHealth, ...]:
        """The health of every member."""
        return tuple(self._health(each) for each in self.members)

    async def where(self, workers: Sequence[WorkerId] | None = None) -> WhereReport:
        """Asks the members (or some of them) where they are. Members that do not answer within two seconds are None."""
        return await ask_where([each for each in self.members if workers is None or each.worker in workers])

    async def await_deaths(self, workers: Sequence[WorkerId]) -> None:
        """Gives a death time to be noticed: a worker that does not answer may be dead, and a node's death shows later
        than the errors that it causes in its peers. Returns at once for workers that answer."""
        report = await self.where(workers)
        silent = [worker for worker, answer in report.answers.items() if answer is None or answer.dump]
        limit = Deadline(_DEATH_S)
        while not limit.over and any(each.worker in silent and each.died is None for each in self.members):
            await asyncio.sleep(LOOK_AGAIN_S / 5)

    async def unless_dead(self, worker: WorkerId, answer: Awaitable[Value]) -> Value:
        """Awaits a worker's answer, or raises GoneError as soon as its death is known."""
        member = self._members.get(worker.index)
        if member is None or member.worker != worker:
            return await answer
        asking = asyncio.ensure_future(awaited(answer))
        both: set[asyncio.Future[Any]] = {asking, member.death}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            # Of a worker that was ended here, its transport only knows that it is gone: the recorded cause says why.
            if member.death.done() and (not asking.done() or isinstance(asking.exception(), GoneError)):
                raise GoneError(member.death.result().cause)
            return asking.result()
        finally:
            asking.cancel()

    async def at_once(self, answers: Sequence[Awaitable[Reply]]) -> list[Reply] | None:
        """All answers, if they come within a moment; else None."""
        return await self._transport.at_once(answers)

    async def send_all(
        self,
        slots: Sequence[int],
        call: Callable[[int], tuple[Any, ...]],
        what: str,
        deadline: Deadline,
    ) -> list[Reply]:
        """Sends the same kind of call to several members at once; `call(slot)` is the call and its arguments."""
        pending = [
            Pending(worker=member.worker, answer=member.process.perform(*call(member.slot)))
            for member in (self._members[slot] for slot in slots)
        ]
        return await gather_answers(pending, what, deadline, self)

    def unplaced(self, nodes: Sequence[NodeState]) -> list[Bundle]:
        """Bundles without a node, including those whose node is gone. Those of vacant slots are not wanted."""
        missing = self._places.missing(nodes, self._members)
        return [bundle for bundle in missing if not self.vacant.intersection(bundle.slots)]

    def vacant_bundles(self, nodes: Sequence[NodeState]) -> tuple[list[int], list[Bundle], list[NodeState]]:
        """Vacant slots without a worker that have a place already, the bundles of those that have none, and nodes where
        they may be placed."""
        bundles = self._places.missing(nodes, self._members)
        placeless = {slot for bundle in bundles for slot in bundle.slots}
        empty = self.vacant - set(self._members)
        wanted = [bundle for bundle in bundles if empty.issuperset(bundle.slots)]
        return sorted(empty - placeless), wanted, self._places.inviting(nodes)

    async def reserve(self, bundles: Sequence[Bundle], nodes: Sequence[NodeState], deadline: Deadline) -> None:
        """Reserves places for the bundles on these nodes."""
        await self._places.reserve(bundles, nodes, deadline)

    async def _place(self, deadline: Deadline) -> None:
        # A first start does not wait for missing nodes. A recovery does: one may be on its way.
        await place_pools(
            [self], self._transport, self._placing, self._timeouts, deadline, grows=bool(self._incarnations)
        )

    async def _start(self, slots: Sequence[int], deadline: Deadline) -> None:
        limit = deadline.at_most(self._timeouts.start_s)
        self._tell(f"{self.pool.name}: starting {len(slots)} {'process' if len(slots) == 1 else 'processes'}")
        places = self._places.by_slot
        processes: dict[int, Process] = {}
        began_s = time.monotonic()  # Ray starts processes from the first `spawn` on, and one may die before the last
        try:
            async with asyncio.timeout(limit.left_s):
                for slot in slots:
                    self._incarnations[slot] = self._incarnations.get(slot, -1) + 1
                    name = process_name(self.pool.name, slot, self._incarnations[slot])
                    processes[slot] = await self._transport.spawn(self.pool, slot, places[slot], name)
            handshakes = await await_handshakes(self.pool, self._transport, processes, began_s, limit)
        except BaseException as error:
            for process in processes.values():
                process.kill()
            if isinstance(error, TimeoutError):
                raise DeadlineError(
                    f"pool {self.pool.name}: Ray did not take the workers in {limit.seconds:.0f} s."
                ) from None
            raise
        for slot, handshake in handshakes.items():
            worker = WorkerId(self.pool.name, slot, handshake.node, handshake.device, self._incarnations[slot])
            self.enlist(worker, processes[slot])
        await make_ready(self, self._layout, slots, self._timeouts, deadline, limit, self._tell)

    async def _watch(self, member: Member) -> None:
        """Consumes the member's heartbeats. Ends when the process is gone, or when none has come for the heartbeat
        timeout (if workers of this cluster can be silent). Otherwise only cancelling unblocks it, when the member is
        ended on purpose."""
        beats = member.process.beats(self._timeouts.beat_s)
        coming: asyncio.Future[Beat] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(awaited(anext(beats)))
                silence = Silence(
                    member.process.look,
                    warn_s=self._timeouts.silent_s,
                    timeout_s=self._timeouts.heartbeat_timeout_s,
                    busy_s=self._timeouts.hang_s if self._transport.can_be_ended else None,
                )
                slice_s = silence.slice_s if self._transport.can_be_silent else None
                while not (await asyncio.wait({coming}, timeout=slice_s))[0]:
                    silence.look()
                    if silence.should_warn():
                        log.warning("%s: %s", self._health(member), silence.guess)
                    if silence.is_over:
                        where = {self.pool.name: await self.where()}
                        await self._end_with(Hang(workers=(member.worker,), cause=silence.cause, where=where))
                        return
                member.beat, member.heard_s = await coming, time.monotonic()
                if member.beat.is_leaving:
                    self._note_leaving(member, "it got SIGTERM")
                if self._is_stalled(member) and not (member.died or self.broken or self._ends_hung):
                    await self._end_hung(member)
        except PodiumError as error:
            self.mark_dead(member, str(error))
        finally:
            if coming is not None:
                coming.cancel()

    def _note_leaving(self, member: Member, cause: str) -> None:
        """Reports once that a worker will be gone soon."""
        if member.leaving is None and member.died is None:
            member.leaving = Leaving(worker=member.worker, cause=cause)
            self._on_leaving(member.leaving)

    def _is_stalled(self, member: Member, *, share: float = 1.0) -> bool:
        """Whether its call has not advanced for this share of the timeout."""
        limit_s = self._timeouts.hang_s if self._transport.can_be_ended else None
        return limit_s is not None and member.beat is not None and member.beat.stalled_s >= share * limit_s

    async def _end_hung(self, member: Member) -> None:
        """Ends workers that hang, when all have said where they are. Where workers meet in collectives, that of
        `member` may only wait for another one."""
        assert member.beat is not None
        self._ends_hung = True
        try:
            report = await self.where()
            # What the others wait for may have advanced a little longer than they.
            stalled = [each.worker for each in self.members if self._is_stalled(each, share=0.5)]
            workers = stuck_workers(report, stalled) if self.meets else (member.worker,)
            beat = next(each.beat for each in self.members if each.worker == workers[0])
            await self._end_with(Hang.of(beat or member.beat, workers, report))
        finally:
            self._ends_hung = False

    async def _end_with(self, hang: Hang) -> None:
        try:
            if self._on_hang is not None:
                await self._on_hang(hang)
        finally:  # whatever becomes of the report
            for worker in hang.workers:
                self.died(worker, hang.cause)

    def _health(self, each: Member) -> WorkerHealth:
        return worker_health(each.worker, each.beat, each.heard_s, each.died, time.monotonic())

    def died(self, worker: WorkerId, cause: str) -> None:
        """Records the death of a worker by its name; a worker that has already been replaced is ignored."""
        for member in self.members:
            if member.worker == worker:
                self.mark_dead(member, cause)

    def mark_dead(self, member: Member, cause: str) -> None:
        """Records a death once, and kills the process: a worker that only lost its connection must not continue."""
        if member.died is None and self._members.get(member.slot) is member:
            member.died = Died(worker=member.worker, cause=cause, at_s=wall_s())
            self._on_gone(member.worker)
            self.breaks(f"{member.worker} died ({cause})")
            log.warning("%s", member.died)
            with contextlib.suppress(GoneError):
                member.process.kill()
            if not member.death.done():
                member.death.set_result(member.died)

    def _end_member(self, slot: int) -> None:
        member = self._members.pop(slot, None)
        if member is None:
            return
        if member.died is None:
            self._on_gone(member.worker)
        if member.watcher is not None:
            member.watcher.cancel()
        with contextlib.suppress(GoneError):
            member.process.kill()
