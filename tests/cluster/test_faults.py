# SPDX-License-Identifier: Apache-2.0
"""kill -9 of real worker processes at every bad moment, and workers that wait for one who does not come."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.clusters import Opener, drain, eventually, in_cluster, next_death, one_role, until_all_in, wait_until_gone
from helpers.processes import ray_workers
from helpers.roles import Batch, Counter, DiesOnce, Request, Summer, ids
from podium.cluster import Cluster, MeshShape, RoleGroup, Workers
from podium.cluster.member import Timeouts
from podium.engine.meeting import MeetingServer, interface_of, join_default_group
from podium.errors import ClusterError, DeadlineError, RendezvousError, RoleError, StoreError, WorkerDiedError

# The longest time from a kill to the word of it.
NOTICED_S = 2.0
# A call waits a little longer for the others' words: often they tell the cause.
TOLD_S = NOTICED_S + 1.0

SHARDS = [Request(ids=ids(range(2))), Request(ids=ids(range(2, 4)))]

pytestmark = pytest.mark.slow


async def pids(group: RoleGroup[Counter]) -> list[int]:
    return [answer.value[0] for answer in await group.call_all(Counter.thread)]


async def values(group: RoleGroup[Counter]) -> list[int]:
    return [answer.value for answer in await group.call_all(Counter.value)]


async def sums(group: RoleGroup[Summer]) -> list[float]:
    return [answer.value for answer in await group.call_all(Summer.all_sum, 1.0)]


async def death_of(workers: Workers, process: int) -> str:
    """Kills a worker's process and returns the name of the worker whose death is noticed."""
    began = time.monotonic()
    os.kill(process, signal.SIGKILL)
    died = await next_death(workers, within_s=20)
    assert time.monotonic() - began < NOTICED_S
    assert str(process) in died.cause
    return str(died.worker)


async def fails(call: Awaitable[object], *, within_s: float) -> WorkerDiedError:
    """The death of a worker ends the call in time."""
    began = time.monotonic()
    with pytest.raises(WorkerDiedError) as raised:
        await call
    assert time.monotonic() - began < within_s
    return raised.value


def test_a_killed_worker_is_replaced_in_place_and_the_others_go_on(open_on_ray: Opener, tmp_path: Path) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        await group.call_all(Counter.add, 1)
        before = await pids(group)
        rows = (await group.call_sharded(Counter.generate_long, SHARDS, 20_000)).rows  # 1 MB from each
        assert rows is not None

        assert await death_of(workers, before[1]) == str(group.workers[1])  # idle
        (new,) = await workers.recover("gen", deadline_s=30)
        assert (new.index, new.incarnation) == (1, 1)
        after = await pids(group)
        assert after[0] == before[0]
        assert after[1] != before[1]
        assert await values(group) == [6, 5]
        assert rows.read().offsets[-1] == 8 * 20_000

        call = asyncio.create_task(group.call_all(Counter.wait_for, str(tmp_path / "go")))  # in a call
        await until_all_in(workers, "gen", "counter.wait_for > waiting")
        os.kill(after[0], signal.SIGKILL)
        error = await fails(call, within_s=TOLD_S)
        assert f"{group.workers[0]}: process {after[0]}" in str(error)
        assert (await next_death(workers, within_s=1)).worker == group.workers[0]
        (tmp_path / "go").touch()
        await workers.recover("gen", deadline_s=30)
        assert [worker.incarnation for worker in group.workers] == [1, 1]
        assert await values(group) == [5, 5]
        assert (await pids(group))[1] == after[1]
        wait_until_gone(before[0], before[1])

    in_cluster(open_on_ray, one_role(Counter, (5,)), body)


def test_blocks_finished_before_a_kill_are_readable_after_it(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        blocks = []
        stream = group.stream_one(0, Counter.generate_and_die, SHARDS[0], 3)
        with pytest.raises(WorkerDiedError, match=r"gen\[0\].*counter\.generate_and_die"):
            await drain(stream, then=blocks.append)
        assert [str(block.ids) for block in blocks] == ["0.0#0", "0.1#0", "1.0#0"]
        await workers.recover("gen", deadline_s=30)
        # Lengths 1, 4 and 8; all tokens of trajectory (d, s) are 100·d + s.
        assert [block.stored.read().tokens_T.tolist() for block in blocks] == [[0], [1] * 4, [100] * 8]
        assert len([block async for block in group.stream_sharded(Counter.generate_slowly, SHARDS)]) == 8

    in_cluster(open_on_ray, one_role(Counter), body)


def test_what_a_worker_cannot_send_is_reported_with_its_name(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        with pytest.raises(ClusterError, match=r"(?s)pickle.*gen\[0\]"):
            await group.call_one(0, Counter.unsendable)
        assert await values(group) == [0]

    in_cluster(open_on_ray, one_role(Counter, slots=1), body)


def test_a_worker_killed_while_it_is_built_is_tried_again(open_on_ray: Opener, tmp_path: Path) -> None:
    mark = tmp_path / "died"

    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        assert mark.exists()
        assert await values(group) == [0, 0]
        assert [worker.incarnation for worker in group.workers] == [1, 1]

        mark.unlink()  # and now once more, while it is replaced
        await group.call_all(Counter.add, 1)
        assert await death_of(workers, (await pids(group))[1]) == str(group.workers[1])
        (new,) = await workers.recover("gen", deadline_s=30)
        assert mark.exists()
        assert new.incarnation == 3
        assert await values(group) == [1, 0]

    in_cluster(open_on_ray, one_role(DiesOnce, (str(mark), 1)), body)


@pytest.mark.slow
def test_a_pool_that_meets_also_survives_a_death_in_its_start(open_on_ray: Opener, tmp_path: Path) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", DiesOnce)
        assert await values(group) == [0, 0]
        assert len(set(await pids(group))) == 2

    layout = one_role(DiesOnce, (str(tmp_path / "died"), 1), collectives=True)
    in_cluster(open_on_ray, layout, body, limit_s=100)


@pytest.mark.slow
def test_a_process_killed_as_soon_as_it_appears_is_tried_again(open_on_ray: Opener) -> None:
    """Whatever it was doing: importing, settling, meeting the others, building its role."""

    async def kill_the_first() -> None:
        async def appeared() -> bool:
            return bool(set(ray_workers()) - known)

        known = set(ray_workers())
        await eventually(appeared, "a worker's process", deadline_s=40)
        os.kill((set(ray_workers()) - known).pop(), signal.SIGKILL)

    async def main() -> None:
        async with open_on_ray() as cluster:
            killing = asyncio.create_task(kill_the_first())
            workers = await cluster.start(one_role(Summer, collectives=True), deadline_s=60)
            await killing
            group = workers.role("counter", Summer)
            assert await sums(group) == [3.0, 3.0]
            await death_of_some(workers, group)
            killing = asyncio.create_task(kill_the_first())
            await workers.recover("gen", deadline_s=60)
            await killing
            assert await sums(group) == [3.0, 3.0]

    async def death_of_some(workers: Workers, group: RoleGroup[Summer]) -> None:
        process = (await pids(group))[0]
        os.kill(process, signal.SIGKILL)

        async def known() -> bool:
            return any(each.died for each in workers.health()["gen"])

        await eventually(known, "the word of a death", deadline_s=NOTICED_S)
        await asyncio.to_thread(wait_until_gone, process)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_worker_killed_inside_a_collective_has_its_whole_pool_rebuilt(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Summer)
        assert await sums(group) == [6.0, 6.0, 6.0]  # 1 + 2 + 3
        before, old = await pids(group), group.workers
        # It dies 0.2 s into the call.
        error = await fails(group.call_all(Summer.die_in_sum, 1), within_s=0.2 + TOLD_S)
        assert f"{old[1]}: process {before[1]}" in str(error)
        assert (await next_death(workers, within_s=1)).worker == old[1]
        # The survivors cannot be called: they are out of step.
        with pytest.raises(WorkerDiedError, match=r"pool gen\b.*workers\.recover\('gen'\)"):
            await group.call_one(0, Counter.value)

        new = await workers.recover("gen", deadline_s=60)
        assert new == group.workers
        assert [worker.incarnation for worker in new] == [1, 1, 1]
        await asyncio.to_thread(wait_until_gone, *before)
        assert await sums(group) == [6.0, 6.0, 6.0]

        # One stays away, and the deadline tells who.
        with pytest.raises(DeadlineError) as late:
            await group.within(1.0).call_all(Summer.sum_without, 1)
        text = str(late.value)
        assert re.match(r"3 of 3 .*\bgen\b.*counter\.sum_without.*1\.0 s", text)
        (alike,) = [line for line in text.splitlines() if line.startswith(f"{new[0]}, {new[2]}: ")]
        assert "counter.sum_without > summing" in alike
        (different,) = [line for line in text.splitlines() if "<-" in line]
        assert different.startswith(f"{new[1]}: ")
        assert "counter.sum_without > staying away" in different
        assert "all_reduce" in text
        with pytest.raises(WorkerDiedError, match=r"pool gen\b.*counter\.sum_without"):
            await group.call_all(Counter.value)

    in_cluster(open_on_ray, one_role(Summer, slots=3, collectives=True), body, limit_s=120)


def test_a_rank_that_raises_while_others_wait_for_it_breaks_the_pool_until_it_is_recovered(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Summer)
        began = time.monotonic()
        with pytest.raises(RoleError) as failed:
            await group.call_all(Summer.fail_in_sum, 1)
        assert time.monotonic() - began < TOLD_S
        first = str(failed.value).splitlines()[0]
        assert re.match(rf"{re.escape(str(group.workers[1]))}.*counter\.fail_in_sum.*ValueError", first)
        assert str(group.workers[0]) in str(failed.value)  # it waits
        with pytest.raises(WorkerDiedError, match="pool gen"):
            await group.call_all(Counter.value)
        assert len(await workers.recover("gen", deadline_s=60)) == 2
        assert await sums(group) == [3.0, 3.0]

    in_cluster(open_on_ray, one_role(Summer, collectives=True), body, limit_s=120)


@pytest.mark.slow
def test_a_shard_that_cannot_be_sent_leaves_no_rank_alone_in_a_collective(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Summer)
        rows = [(await group.call_sharded(Counter.generate, SHARDS)).rows for _ in range(2)]
        assert rows[0] is not None
        assert rows[1] is not None
        with cluster.scope("step 1") as step:
            step.hold(rows[1])
        first, second = SHARDS[0].ids, SHARDS[1].ids
        bad = [Batch(block=rows[0].select(first)), Batch(block=rows[1].select(second))]
        with pytest.raises(StoreError, match="step 1"):
            await group.call_sharded(Summer.sum_tokens, bad)
        # Either nobody has begun, or the pool says that it is out of step: never a sum over two different calls.
        good = [Batch(block=rows[0].select(first)), Batch(block=rows[0].select(second))]
        for _ in range(2):
            try:
                merged = await group.within(5).call_sharded(Summer.sum_tokens, good)
            except WorkerDiedError:
                await workers.recover("gen", deadline_s=60)
            else:
                # Lengths 1, 4, 8, 11, 4, 7, 11, 3 of the tokens 0, 1, 100, 101, 200, 201, 300, 301.
                assert merged.metrics == {"sum": 8325.0}

    in_cluster(open_on_ray, one_role(Summer, collectives=True), body, limit_s=120)


@pytest.mark.slow
def test_two_recoveries_of_a_pool_that_meets_are_one(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Summer)
        await death_of(workers, (await pids(group))[0])
        await asyncio.gather(*(workers.recover("gen", deadline_s=60) for _ in range(2)))
        assert await sums(group) == [3.0, 3.0]
        assert len(ray_workers()) == 2

    in_cluster(open_on_ray, one_role(Summer, collectives=True), body, limit_s=120)


@pytest.mark.slow
def test_a_collective_gives_up_after_the_patience_of_its_pool(open_on_ray: Opener) -> None:
    """Also in a mesh that is a part of the pool, whose groups are not the pool's own."""

    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Summer)
        assert await sums(group) == [10.0] * 4  # 1 + 2 + 3 + 4
        began = time.monotonic()
        with pytest.raises(RoleError, match=r"(?i)timed? ?out"):
            await group.call_all(Summer.sum_without, 3)
        assert 2 <= time.monotonic() - began < 10

    layout = one_role(Summer, slots=4, collectives=True, mesh=MeshShape(replica=2, shard=2))
    in_cluster(open_on_ray, layout, body, timeouts=Timeouts(collective_s=2.0), limit_s=120)


def test_a_meeting_that_one_does_not_come_to_ends_in_time_with_who_is_absent() -> None:
    assert not dist.is_initialized()
    server = MeetingServer("127.0.0.1")
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=r"rank 0 of 3\b.*\b1 s\b.*\[1, 2\]"):
        join_default_group(
            server.meeting, kind="cpu", rank=0, world=3, device=torch.device("cpu"), deadline_s=1.0, timeout_s=60.0
        )
    assert 1.0 <= time.monotonic() - began < 5.0
    assert not dist.is_initialized()


def test_a_meeting_that_nobody_serves_ends_in_time() -> None:
    server = MeetingServer("127.0.0.1")
    nowhere = server.meeting
    del server
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=r"rank 0\b.*interface"):
        join_default_group(
            nowhere, kind="cpu", rank=0, world=2, device=torch.device("cpu"), deadline_s=1.0, timeout_s=60.0
        )
    assert time.monotonic() - began < 10.0


def test_an_address_that_no_interface_has_is_reported_with_those_there_are() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.7.*lo \(127\.0\.0\.1\)"):
        interface_of("192.0.2.7")
