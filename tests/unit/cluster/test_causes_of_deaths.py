# SPDX-License-Identifier: Apache-2.0
"""A worker that its pool has ended is reported with the reason for it, whatever its transport says of the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from helpers.roles import Counter
from podium.cluster import Layout, MeshShape, Pool, RoleSpec
from podium.cluster.identity import WorkerId
from podium.cluster.inline import InlineTransport
from podium.cluster.member import Timeouts
from podium.cluster.messages import Beat
from podium.cluster.transport import GoneError
from podium.cluster.worker_pool import WorkerPool

WORKER = WorkerId("train", 0, "node-a", "cpu")


class EndedProcess:
    """A process whose calls fail in the moment in which it is ended, as they may on Ray."""

    def __init__(self, answer: asyncio.Future[int]) -> None:
        self.answer = answer

    async def beats(self, every_s: float) -> AsyncIterator[Beat]:
        await asyncio.Event().wait()
        yield Beat(doing="", for_s=0.0, stalled_s=0.0)

    def kill(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(GoneError("process 7 is gone (it was killed by SIGKILL)"))


async def cause_of(*, ends_with: str | None) -> str:
    """What a call hears of a worker that is ended for this reason, or is gone by itself."""
    pool = Pool(name="train", slots=1)
    role = RoleSpec(name="counter", kind=Counter, pool="train", mesh=MeshShape(replica=1))
    layout = Layout(pools=(pool,), roles=(role,))
    workers = WorkerPool(layout, pool, InlineTransport(), Timeouts(), asyncio.Lock())
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    process = EndedProcess(answer)
    workers.enlist(WORKER, process)
    call = asyncio.ensure_future(workers.unless_dead(WORKER, answer))
    await asyncio.sleep(0)
    if ends_with is None:
        process.kill()
    else:
        workers.died(WORKER, ends_with)
    with pytest.raises(GoneError) as gone:
        await call
    workers.end()
    return str(gone.value)


def test_the_reason_for_ending_it_is_the_cause() -> None:
    assert asyncio.run(cause_of(ends_with="it hangs: no progress for 8 s")) == "it hangs: no progress for 8 s"


def test_of_one_that_is_gone_by_itself_the_transport_says_why() -> None:
    assert "SIGKILL" in asyncio.run(cause_of(ends_with=None))
