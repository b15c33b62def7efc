# SPDX-License-Identifier: Apache-2.0
"""What the processes of a pool do before they are called: they answer, take their places, import, meet, and build their
roles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from podium.cluster.deadlines import Deadline
from podium.cluster.fanout import awaited
from podium.cluster.host import parameters_of
from podium.cluster.layout import Layout, Pool, public_methods
from podium.cluster.member import Timeouts
from podium.cluster.messages import Build, Call, Handshake, Import, Join, OpenMeeting, Settle
from podium.cluster.transport import Process, Transport
from podium.errors import StartTimeoutError, WorkerDiedError

if TYPE_CHECKING:
    from podium.cluster.worker_pool import WorkerPool

LOOK_AGAIN_S = 0.25


async def await_handshakes(
    pool: Pool, transport: Transport, processes: Mapping[int, Process], began_s: float, deadline: Deadline
) -> dict[int, Handshake]:
    """Waits until every process has started, or until one is found to have died since `began_s`."""
    tasks = {slot: asyncio.ensure_future(awaited(process.handshake())) for slot, process in processes.items()}
    pending: set[asyncio.Task[Handshake]] = set(tasks.values())
    is_missing = False
    try:
        while pending and not is_missing and not deadline.over:
            left_s = min(LOOK_AGAIN_S, deadline.left_s)
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.exception() for task in done):
                break
            is_missing = transport.is_process_missing(began_s)
    finally:
        for task in tasks.values():
            task.cancel()
    failed = {slot: error for slot, task in tasks.items() if task.done() and (error := task.exception())}
    if failed:
        words = "; ".join(f"{pool.name}[{slot}]: {error}" for slot, error in failed.items())
        raise WorkerDiedError(f"{len(failed)} workers died while they started. {words}.")
    late = [slot for slot, task in tasks.items() if task in pending]
    if late and is_missing:
        raise WorkerDiedError(
            f"a process that Ray had started for the slots {late} of pool {pool.name}, or for another pool, "
            "died before it was a worker."
        )
    if late:
        raise StartTimeoutError(
            f"pool {pool.name}: the processes of slots {late} did not come up in {deadline.seconds:.0f} s. "
            "Their places are reserved, so they hang, the node is overloaded, or the workers before them have not "
            "ended."
        )
    return {slot: task.result() for slot, task in tasks.items()}


async def make_ready(
    worker_pool: WorkerPool,
    layout: Layout,
    slots: Sequence[int],
    timeouts: Timeouts,
    deadline: Deadline,
    limit: Deadline,
    tell: Callable[[str], object],
) -> None:
    """Gives new workers their places, code, process group and roles. `limit`: of each but the process group, which has
    the whole `deadline`."""
    await _settle(worker_pool, layout, slots, limit)
    await _import(worker_pool, layout, slots, limit, tell)
    if worker_pool.meets:
        await _join(worker_pool, timeouts, deadline, tell)
    await _build(worker_pool, layout, slots, limit, tell)


async def _settle(worker_pool: WorkerPool, layout: Layout, slots: Sequence[int], deadline: Deadline) -> None:
    pool, meshes = worker_pool.pool, layout.meshes_of(worker_pool.pool.name)
    workers = {member.slot: member.worker for member in worker_pool.members}
    await worker_pool.send_all(
        slots,
        lambda slot: (Settle(worker=workers[slot], meshes=meshes, grace_s=pool.grace_s),),
        "taking their places",
        deadline,
    )


async def _import(
    worker_pool: WorkerPool, layout: Layout, slots: Sequence[int], deadline: Deadline, tell: Callable[[str], object]
) -> None:
    """Imports on all workers at the same time: their process group would wait for the last one."""
    pool = worker_pool.pool
    roles = [role for role in layout.roles if role.pool == pool.name and role.implementation]
    modules = tuple(dict.fromkeys(str(role.implementation).partition(":")[0] for role in roles))
    if not modules and not pool.tokenizers_only:
        return
    tell(f"{pool.name}: importing {', '.join(modules) or 'transformers'}")
    call = Import(modules=modules, tokenizers_only=pool.tokenizers_only)
    await worker_pool.send_all(slots, lambda _: (call,), "importing their code", deadline)


async def _join(worker_pool: WorkerPool, timeouts: Timeouts, deadline: Deadline, tell: Callable[[str], object]) -> None:
    pool, limit = worker_pool.pool, deadline.at_most(timeouts.rendezvous_s)
    tell(f"{pool.name}: forming a process group of {pool.slots}")
    first = await worker_pool.send_all([0], lambda _: (OpenMeeting(name="pool"),), "opening the meeting", limit)

    def call(slot: int) -> tuple[Call]:
        return (
            Join(
                meeting=first[0].value,
                rank=slot,
                world=pool.slots,
                deadline_s=limit.left_s,
                timeout_s=timeouts.collective_s,
            ),
        )

    # The workers' own deadline expires first: its message is more specific.
    await worker_pool.send_all(range(pool.slots), call, "forming their process group", Deadline(limit.left_s + 5.0))


async def _build(
    worker_pool: WorkerPool, layout: Layout, slots: Sequence[int], deadline: Deadline, tell: Callable[[str], object]
) -> None:
    """Builds roles in the order of the layout: constructors may use collectives."""
    pool = worker_pool.pool
    for role in layout.roles:
        mesh = layout.mesh(role)
        mine = [slot for slot in slots if role.pool == pool.name and slot in mesh.slots]
        methods = {name: parameters_of(method) for name, method in public_methods(role.kind).items()}
        build = Build(role=role.name, methods=methods, implementation=role.implementation)
        call = (build, role.kind, role.arguments)
        if mine:
            tell(f"{pool.name}: building {role.name}")
            await worker_pool.send_all(mine, dict.fromkeys(mine, call).__getitem__, f"building {role.name}", deadline)
