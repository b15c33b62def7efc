# SPDX-License-Identifier: Apache-2.0
"""Takes over the workers of a controller that is gone. Its calls are void: those that have not begun are refused, and
those that run are waited for. A worker that does not get free in time is ended, and is replaced like one that died."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from podium.cluster.deadlines import Deadline
from podium.cluster.identity import read_process_name
from podium.cluster.layout import Layout
from podium.cluster.member import Member
from podium.cluster.messages import Attached, Clear
from podium.cluster.transport import GoneError, LeftBehind, Process
from podium.cluster.worker_pool import WorkerPool
from podium.errors import ClusterError, counted

# Workers answer beside their work.
_ANSWER_S = 10.0
# For a call that is running, an update for instance. To start a worker again costs about as much.
_FREE_S = 30.0


async def attach(worker_pools: Sequence[WorkerPool], layout: Layout, left: LeftBehind) -> Mapping[str, int]:
    """Takes over what is `left` for these pools. Returns how many workers of each pool are attached. The others are
    dead, and the caller recovers their pools."""
    found = _by_slot(left)
    await asyncio.gather(*(_attach_pool(each, layout, left, found) for each in worker_pools))
    await asyncio.gather(*(_clear_pool(each) for each in worker_pools))  # now all refuse what is void
    return {each.pool.name: sum(member.died is None for member in each.members) for each in worker_pools}


def _by_slot(left: LeftBehind) -> Mapping[tuple[str, int], tuple[int, Process]]:
    """The newest incarnation of each slot. Others were about to be ended."""
    found: dict[tuple[str, int], tuple[int, Process]] = {}
    for name, process in left.processes.items():
        read = read_process_name(name)
        if read is None:
            continue
        pool, slot, incarnation = read
        before = found.get((pool, slot))
        if before is None or before[0] < incarnation:
            found[pool, slot] = incarnation, process
        older = process if before is not None and before[0] > incarnation else before[1] if before is not None else None
        if older is not None:
            older.kill()
    return found


async def _attach_pool(
    worker_pool: WorkerPool, layout: Layout, left: LeftBehind, found: Mapping[tuple[str, int], tuple[int, Process]]
) -> None:
    pool, meshes = worker_pool.pool, layout.meshes_of(worker_pool.pool.name)
    mine = {slot: each for slot in range(pool.slots) if (each := found.get((pool.name, slot))) is not None}
    places = {place.bundle.slots: place for place in left.places if place.bundle.pool == pool.name}
    worker_pool.take_over(tuple(places.values()), {slot: incarnation for slot, (incarnation, _) in mine.items()})
    answers = await asyncio.gather(*(_answer(process) for _, process in mine.values()))
    for (slot, (_, process)), attached in zip(mine.items(), answers, strict=True):
        roles = {mesh.role for mesh in meshes if slot in mesh.slots}
        worker = None if attached is None else attached.worker
        is_placed = any(slot in slots for slots in places)
        if attached is None or worker is None or attached.roles != roles or not is_placed:
            process.kill()  # dead, or its start was not finished
        else:
            worker_pool.enlist(worker, process)
    attached_slots = {member.slot for member in worker_pool.members}
    worker_pool.vacant -= attached_slots
    if attached_slots and pool.grace_s is not None:  # it can go on with fewer, and the others are filled later
        worker_pool.vacant = set(range(pool.slots)) - attached_slots


async def _answer(process: Process) -> Attached | None:
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await process.attach()
    except (TimeoutError, ClusterError):
        return None


async def _clear_pool(worker_pool: WorkerPool) -> None:
    deadline = Deadline(_FREE_S)
    serials = await asyncio.gather(*(_cleared(worker_pool, member, deadline) for member in worker_pool.members))
    if len(set(serials)) > 1:
        worker_pool.breaks("a call of an earlier controller has reached some workers only")
    if worker_pool.dead:
        worker_pool.breaks(f"{counted(len(worker_pool.dead), 'worker')} of it cannot be attached")


async def _cleared(worker_pool: WorkerPool, member: Member, deadline: Deadline) -> int | None:
    """Waits until a worker is free. Returns the number of its last call; None: it is ended."""
    try:
        async with asyncio.timeout(deadline.left_s):
            clearing = member.process.perform(Clear(deadline_s=deadline.left_s))
            reply = await worker_pool.unless_dead(member.worker, clearing)
    except TimeoutError:
        worker_pool.mark_dead(member, f"it is busy for an earlier controller, after {deadline.seconds:.0f} s")
    except GoneError as gone:
        worker_pool.mark_dead(member, str(gone))
    else:
        if reply.failure is None:
            serial: int = reply.value
            return serial
        worker_pool.mark_dead(member, f"what an earlier controller has left cannot be cleared: {reply.failure.text}")
    return None
