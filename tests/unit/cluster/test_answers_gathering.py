# SPDX-License-Identifier: Apache-2.0
"""Many answers awaited at once: deaths outrank failures, a deadline is reported with where everyone is."""

import asyncio
import re
from types import SimpleNamespace

import pytest

from podium.cluster import fanout
from podium.cluster.deadlines import Deadline
from podium.cluster.fanout import Pending, gather_answers
from podium.cluster.health import WhereReport
from podium.cluster.identity import WorkerId
from podium.cluster.messages import Failure, Reply
from podium.cluster.transport import GoneError
from podium.errors import DataError, DeadlineError, RoleError, WorkerDiedError


def worker(slot):
    return WorkerId("gen", slot, "node-a", "cpu")


class CrewStub:
    """What a worker pool gets to know while its answers are gathered."""

    def __init__(self, slots):
        self.pool = SimpleNamespace(name="gen")
        self.members = [SimpleNamespace(worker=worker(slot), died=None) for slot in range(slots)]
        self.broken, self.marked_dead, self.queried = [], [], []
        self.meets, self.dead = False, ()

    def breaks(self, reason):
        self.broken.append(reason)

    def died(self, worker, cause):
        self.marked_dead.append((worker, cause))

    async def unless_dead(self, worker, answer):
        return await answer

    async def at_once(self, answers):
        return None

    async def where(self, workers=None):
        self.queried.append(list(workers))
        return WhereReport(answers=dict.fromkeys(workers))


async def answers(value):
    return Reply(None, value, None, ())


async def fails(text, error=None):
    return Reply(None, None, Failure(kind="ValueError", text=text, trace="its traceback", error=error), ())


async def dies(cause):
    raise GoneError(cause)


async def never():
    await asyncio.Event().wait()


def gather(*coming, deadline_s=20.0):
    """The worker pool, and what came of gathering these answers."""
    worker_pool = CrewStub(len(coming))
    pending = [Pending(worker=worker(slot), answer=each) for slot, each in enumerate(coming)]

    async def main():
        return await gather_answers(pending, "in gen.act", Deadline(deadline_s), worker_pool)

    try:
        return worker_pool, asyncio.run(asyncio.wait_for(main(), 30))
    except Exception as error:
        return worker_pool, error


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch):
    """The time that others have to speak after the first failure; a silent one costs all of it."""
    monkeypatch.setattr(fanout, "_GRACE_S", 0.05)


def test_answers_come_in_the_order_of_the_workers():
    worker_pool, found = gather(answers(3), answers(1), answers(2))
    assert [reply.value for reply in found] == [3, 1, 2]
    assert (worker_pool.broken, worker_pool.marked_dead, worker_pool.queried) == ([], [], [])


def test_a_failure_is_reported_with_the_workers_name_and_traceback_and_breaks_nothing_if_all_answered():
    worker_pool, error = gather(answers(1), fails("no memory"), answers(1))
    assert isinstance(error, RoleError)
    first, traceback = str(error).splitlines()
    assert first.startswith("gen[1]@node-a/cpu#0 ")
    assert "gen.act: ValueError: no memory" in first
    assert traceback == "its traceback"
    assert (worker_pool.broken, worker_pool.marked_dead) == ([], [])


def test_an_error_of_podiums_is_the_cause_of_what_is_raised():
    cause = DataError("line 7")
    assert gather(fails("line 7", cause))[1].__cause__ is cause


def test_several_failures_are_reported_together_and_who_is_silent_is_named():
    worker_pool, error = gather(fails("first"), never(), fails("second"))
    assert isinstance(error, RoleError)
    assert re.match(r"gen\[0\]@node-a/cpu#0 .*gen\.act: ValueError: first", str(error))
    assert "gen[2]@node-a/cpu#0: ValueError: second" in str(error)
    assert "gen[1]@node-a/cpu#0" in str(error)
    (reason,) = worker_pool.broken
    assert re.match(r"gen\[1\]@node-a/cpu#0 .*gen\.act", reason)


def test_a_death_outranks_what_it_made_others_say():
    worker_pool, error = gather(fails("connection closed by peer"), dies("process 7 is gone"), answers(1))
    assert isinstance(error, WorkerDiedError)
    assert re.match(r"1 of 3 .*\bgen\b.*gen\.act", str(error))
    assert "gen[1]@node-a/cpu#0: process 7 is gone" in str(error)
    assert "gen[0]@node-a/cpu#0: ValueError: connection closed by peer" in str(error)
    assert "`workers.recover('gen')`" in str(error)
    assert worker_pool.marked_dead == [(worker(1), "process 7 is gone")]
    (reason,) = worker_pool.broken
    assert re.match(r"gen\[1\]@node-a/cpu#0 .*gen\.act", reason)


def test_a_death_ends_the_wait_for_those_who_hang_on_it():
    worker_pool, error = gather(never(), dies("its node is gone"))
    assert isinstance(error, WorkerDiedError)
    (reason,) = worker_pool.broken
    assert re.match(r"gen\[1\]@node-a/cpu#0, gen\[0\]@node-a/cpu#0 .*gen\.act", reason)


def test_a_deadline_is_reported_with_who_is_late_and_where_all_of_them_are():
    worker_pool, error = gather(answers(1), never(), deadline_s=0.1)
    assert isinstance(error, DeadlineError)
    first, where = str(error).splitlines()
    assert re.match(r"1 of 2 .*\bgen\b.*gen\.act .*0\.1 s.*gen\[1\]@node-a/cpu#0", first)
    assert "gen[0]" not in first
    assert where.startswith("gen[0]@node-a/cpu#0, gen[1]@node-a/cpu#0: ")
    assert worker_pool.queried == [[worker(0), worker(1)]]
    (reason,) = worker_pool.broken
    assert re.match(r"gen\[1\]@node-a/cpu#0 .*gen\.act", reason)
    assert worker_pool.marked_dead == []


def test_another_error_than_a_failure_or_a_death_is_raised_as_it_is():
    async def odd():
        raise KeyError("odd")

    assert isinstance(gather(answers(1), odd())[1], KeyError)
