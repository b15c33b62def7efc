# SPDX-License-Identifier: Apache-2.0
"""Awaits many answers at once: the first failure ends the wait, and a deadline ends it with a report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from podium.cluster.deadlines import Deadline
from podium.cluster.identity import WorkerId
from podium.cluster.messages import Failure, Reply
from podium.cluster.transport import GoneError
from podium.errors import DeadlineError, RoleError, WorkerDiedError

if TYPE_CHECKING:
    from podium.cluster.worker_pool import WorkerPool

Value = TypeVar("Value")

# After the first failure the others may still answer: their replies often show the cause.
_GRACE_S = 1.0


class OverdueError(DeadlineError):
    """Workers did not answer a call in time. They can be ended and replaced."""

    def __init__(self, text: str, workers: Sequence[WorkerId]) -> None:
        super().__init__(text)
        self.workers = tuple(workers)


async def awaited(answer: Awaitable[Value]) -> Value:
    """Any awaitable, as a coroutine."""
    return await answer


@dataclass(frozen=True, kw_only=True, eq=False)
class Pending:
    """A call in flight."""

    worker: WorkerId
    answer: Awaitable[Reply]


@contextmanager
def sending(reached: Sized, what: str, worker_pool: WorkerPool) -> Iterator[None]:
    """A context for sending one call to many workers. If it reaches only some of them, workers that use collectives are
    out of step."""
    try:
        yield
    except BaseException as error:
        if len(reached):
            worker_pool.breaks(f"{what} reached {len(reached)} workers and could not be sent to the others ({error})")
        raise


class _RoleFailedError(Exception):
    def __init__(self, failure: Failure) -> None:
        self.failure = failure


async def gather_answers(
    pending: Sequence[Pending], what: str, deadline: Deadline, worker_pool: WorkerPool, *, in_step: bool = True
) -> list[Reply]:
    """Waits for all answers. Raises WorkerDiedError, RoleError or DeadlineError. If the call keeps workers `in_step`, a
    pool with collectives is then broken unless all its workers answered. `what` completes the sentence "workers were
    ..."."""
    quick = await worker_pool.at_once([each.answer for each in pending])
    if quick is not None and not any(reply.failure for reply in quick):
        return quick
    tasks = [asyncio.ensure_future(_one(each, worker_pool)) for each in pending]
    try:
        _, late = await asyncio.wait(tasks, timeout=deadline.left_s, return_when=asyncio.FIRST_EXCEPTION)
        if late and not any(_failed(task) for task in tasks):
            await _overdue(pending, tasks, what, deadline, worker_pool, in_step=in_step)
        if any(_failed(task) for task in tasks):
            if late:
                await _last_words(pending, tasks, worker_pool)
            _raise(pending, tasks, what, worker_pool, in_step=in_step)
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def _last_words(
    pending: Sequence[Pending], tasks: Sequence[asyncio.Future[Reply]], worker_pool: WorkerPool
) -> None:
    """Waits briefly for the others, and until deaths among them are known."""
    await asyncio.wait(tasks, timeout=_GRACE_S)
    silent = [each.worker for each, task in zip(pending, tasks, strict=True) if not task.done()]
    if worker_pool.meets and silent and not worker_pool.dead:
        await worker_pool.await_deaths(silent)


async def _one(pending: Pending, worker_pool: WorkerPool) -> Reply:
    reply = await worker_pool.unless_dead(pending.worker, pending.answer)
    if reply.failure is not None:
        raise _RoleFailedError(reply.failure)
    return reply


def _failed(task: asyncio.Future[Reply]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


async def _overdue(
    pending: Sequence[Pending],
    tasks: Sequence[asyncio.Future[Reply]],
    what: str,
    deadline: Deadline,
    worker_pool: WorkerPool,
    *,
    in_step: bool,
) -> None:
    late = [each.worker for each, task in zip(pending, tasks, strict=True) if not task.done()]
    report = await worker_pool.where([each.worker for each in pending])
    if in_step:
        worker_pool.breaks(f"{', '.join(map(str, late))} did not answer while {what}")
    stuck = (
        ""
        if worker_pool.broken
        else "\nOne that is stuck for good is ended with `workers.end_worker` and then replaced."
    )
    raise OverdueError(
        f"{len(late)} of {len(pending)} workers of {worker_pool.pool.name} are still {what} after "
        f"{deadline.seconds:.1f} s: {', '.join(map(str, late))}. Where they are:\n{report}{stuck}",
        late,
    )


def _raise(
    pending: Sequence[Pending],
    tasks: Sequence[asyncio.Future[Reply]],
    what: str,
    worker_pool: WorkerPool,
    *,
    in_step: bool,
) -> None:
    """Turns the failures into one error. A death takes precedence over the failures that it causes in others."""
    known = {member.worker: member.died.cause for member in worker_pool.members if member.died is not None}
    silent: list[WorkerId] = []
    dead: dict[WorkerId, str] = {}
    failed: list[tuple[WorkerId, Failure]] = []
    foreign: list[BaseException] = []
    for each, task in zip(pending, tasks, strict=True):
        match task.exception() if _failed(task) else None:
            case GoneError() as gone:
                dead[each.worker] = str(gone)
            case _RoleFailedError(failure=failure):
                failed.append((each.worker, failure))
            case None if not task.done() and each.worker in known:
                dead[each.worker] = known[each.worker]
            case None if not task.done():
                silent.append(each.worker)
            case None:
                pass
            case error:
                foreign.append(error)
    if in_step and (silent or dead):
        worker_pool.breaks(f"{', '.join(map(str, [*dead, *silent]))} left the others while {what}")
    for worker, cause in dead.items():
        worker_pool.died(worker, cause)
    if dead:
        words = "; ".join(f"{worker}: {cause}" for worker, cause in dead.items())
        others = f" {_others(failed)}" if failed else ""
        raise WorkerDiedError(
            f"{len(dead)} of {len(pending)} workers of {worker_pool.pool.name} died while {what}. {words}.{others} "
            f"Recover the pool with `workers.recover({worker_pool.pool.name!r})`."
        )
    if foreign:
        raise foreign[0]
    worker, failure = failed[0]
    raise RoleError(
        f"{worker} failed while {what}: {failure.kind}: {failure.text}{_also(failed[1:], silent)}\n{failure.trace}"
    ) from failure.error


def _others(failed: Sequence[tuple[WorkerId, Failure]]) -> str:
    return (
        "Of the others: " + "; ".join(f"{worker}: {failure.kind}: {failure.text}" for worker, failure in failed) + "."
    )


def _also(failed: Sequence[tuple[WorkerId, Failure]], silent: Sequence[WorkerId]) -> str:
    words = f"\n{_others(failed)}" if failed else ""
    return words + (f"\nStill without an answer: {', '.join(map(str, silent))}." if silent else "")
