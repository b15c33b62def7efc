# SPDX-License-Identifier: Apache-2.0
"""Roles and callers that misbehave: every call ends in time, with the right answer or an error that names the cause."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock

import pytest

from helpers.clusters import Opener, drain, in_cluster, inline_then_ray, one_role
from helpers.roles import Counter, Request, Summer, ids, make_block
from podium.cluster import Cluster, Computed, Layout, MeshShape, Pool, RoleSpec, WorkerId, Workers
from podium.data.trajectories import TrajectoryBlock, TrajectoryIds
from podium.errors import ClusterError, DeadlineError, ResultError, RoleError, StoreError, WorkerDiedError

COUNTERS = one_role(Counter, (5,), slots=2)


@inline_then_ray
def test_only_the_owner_reaches_new_workers_before_their_state_is_back(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        restoring, go = asyncio.Event(), asyncio.Event()

        async def restore(new: tuple[WorkerId, ...]) -> None:
            restoring.set()
            await go.wait()
            await group.call_one(1, Counter.add, 95)

        workers.restore_with("counter", restore)
        await workers.end_worker(group.workers[1])
        recovery = asyncio.create_task(workers.recover("gen", deadline_s=30))
        await restoring.wait()
        with pytest.raises(WorkerDiedError, match=r"gen\[1\]@.*#1.*workers\.recover\('gen'\)"):
            await group.call_all(Counter.value)
        go.set()
        await recovery
        assert [answer.value for answer in await group.call_all(Counter.value)] == [5, 100]

    in_cluster(open_cluster, COUNTERS, body)


@pytest.mark.slow
def test_a_recovery_waits_for_nobody_beyond_its_deadline(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        never = asyncio.Event()

        async def sleeps(new: tuple[WorkerId, ...]) -> None:
            await never.wait()

        workers.restore_with("counter", sleeps)
        await workers.end_worker(group.workers[0])
        first = asyncio.create_task(workers.recover("gen", deadline_s=8))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineError, match=r"another recovery.*\bgen\b"):
            await workers.recover("gen", deadline_s=0.2)
        with pytest.raises(DeadlineError, match=r"counter.*gen\[0\].*\b8 s"):
            await first

        async def asks_again(new: tuple[WorkerId, ...]) -> None:
            await workers.recover("gen")

        workers.restore_with("counter", asks_again)
        with pytest.raises(ClusterError, match=r"pool gen .*recover"):
            await workers.recover("gen", deadline_s=20)

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray
def test_a_trajectory_in_two_shards_is_refused_before_any_work(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        one = Request(ids=ids(range(1), 1))
        with pytest.raises(ResultError, match=r"counter.*gen\[0\].*gen\[1\].*: 0\.0#0"):
            await group.call_sharded(Counter.generate, [one, one])
        with pytest.raises(ResultError, match=r"counter.*gen\[0\].*gen\[1\].*: 0\.0#0"):
            async for _ in group.stream_sharded(Counter.generate_slowly, [one, one]):
                pass
        twice = Request(ids=TrajectoryIds.concatenate([one.ids, one.ids]))
        with pytest.raises(ResultError, match=r"\(gen\[0\][^,]*\): 0\.0#0"):
            async for _ in group.stream_one(0, Counter.generate_slowly, twice):
                pass

    in_cluster(open_cluster, COUNTERS, body)


class Strange(Counter):
    """Raises what cannot be told easily."""

    def interrupt(self) -> None:
        raise KeyboardInterrupt("by the role")

    def shout(self) -> None:
        raise ValueError("x" * 1_000_000)

    def mumble(self) -> None:
        class MumbleError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        raise MumbleError


@inline_then_ray  # fast on Ray: test_an_exception_of_a_role_comes_back_with_its_worker_and_traceback
def test_exceptions_that_are_not_errors_or_too_long_or_without_text_are_the_roles_own(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Strange)
        with pytest.raises(RoleError, match="KeyboardInterrupt: by the role"):
            await group.call_one(0, Strange.interrupt)
        with pytest.raises(RoleError, match=r"ValueError: xxx.* \.\.\.") as shouted:
            await group.call_one(0, Strange.shout)
        assert len(str(shouted.value)) < 100_000
        with pytest.raises(RoleError, match="MumbleError"):
            await group.call_one(0, Strange.mumble)
        assert (await group.call_one(0, Strange.value)).value == 5

    in_cluster(open_cluster, one_role(Strange, (5,), slots=1), body)


@inline_then_ray
def test_waiting_control_calls_do_not_keep_a_worker_from_saying_where_it_is(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        waiting = [asyncio.create_task(group.control_one(0, Counter.nap, 3.0)) for _ in range(2)]
        await asyncio.sleep(0.2)
        assert [place for place, _ in (await workers.where("gen")).groups()] == ["idle"]
        await asyncio.gather(*waiting)

    in_cluster(open_cluster, one_role(Counter, (5,), slots=1), body)


@dataclass(frozen=True)
class Settings:
    """Cannot be pickled, and holds what nobody should read."""

    key: str
    lock: Lock


def test_an_argument_that_cannot_be_sent_is_named_without_its_value(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        secret = "".join(reversed("TERCES"))
        with pytest.raises(ClusterError, match=r"counter\.measure.*\b0 \(Settings\)") as message:
            await group.call_one(0, Counter.measure, Settings(key=secret, lock=Lock()))  # type: ignore[arg-type]
        assert "SECRET" not in "".join(traceback.format_exception(message.value))

    in_cluster(open_on_ray, one_role(Counter, (5,), slots=1), body)


class Unreadable:
    """Can be pickled, and not read back by the controller."""

    def __reduce__(self) -> tuple[object, ...]:
        return _only_on_workers, ()


def _only_on_workers() -> None:
    raise ModuleNotFoundError("no module named only_on_workers")


class Gives(Counter):
    """Gives what cannot be read."""

    def give(self) -> Unreadable:
        return Unreadable()


def test_an_answer_that_cannot_be_read_is_no_death(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Gives)
        with pytest.raises(ClusterError, match="only_on_workers") as message:
            await group.call_one(0, Gives.give)
        assert not isinstance(message.value, WorkerDiedError)
        assert (await group.call_one(0, Gives.value)).value == 5

    in_cluster(open_on_ray, one_role(Gives, (5,), slots=1), body)


class Meets(Summer):
    """Streams what all ranks agree on, or comes to no end."""

    def agreed(self, request: Request) -> Iterator[Computed[TrajectoryBlock]]:
        assert self.all_sum(1.0) == 3.0
        yield Computed(rows=make_block(request.ids))

    def lingers(self, request: Request) -> Iterator[Computed[TrajectoryBlock]]:
        yield Computed(rows=make_block(request.ids))
        self.nap(30.0)


@dataclass(frozen=True, eq=False)
class LockedRequest(Request):
    """Cannot be sent."""

    lock: Lock = field(default_factory=Lock)


@pytest.mark.slow
def test_streams_keep_ranks_in_step_and_end_in_time(open_on_ray: Opener) -> None:
    layout = Layout(
        pools=(Pool(name="gen", slots=2),),
        roles=(RoleSpec(name="ranks", kind=Meets, pool="gen", mesh=MeshShape(shard=2)),),
    )

    async def body(cluster: Cluster, workers: Workers) -> None:
        ranks = workers.role("ranks", Meets)
        good, bad = Request(ids=ids(range(1))), LockedRequest(ids=ids(range(1, 2)))
        with pytest.raises(ClusterError, match=r"ranks\.agreed.*LockedRequest"):
            await drain(ranks.stream_sharded(Meets.agreed, [good, bad]))
        with pytest.raises(WorkerDiedError, match=r"pool gen\b.*ranks\.agreed.*LockedRequest"):
            await ranks.call_all(Meets.value)
        assert len(await workers.recover("gen", deadline_s=60)) == 2
        with pytest.raises(DeadlineError, match=r"gen\[0\].*ranks\.lingers.*\b3\.0 s"):
            await drain(ranks.within(3).stream_one(0, Meets.lingers, good))
        with pytest.raises(WorkerDiedError, match=r"pool gen\b.*ranks\.lingers"):
            await ranks.call_all(Meets.value)

    in_cluster(open_on_ray, layout, body, limit_s=150)


@inline_then_ray
def test_a_closed_cluster_says_so(open_cluster: Opener) -> None:
    async def main() -> None:
        async with open_cluster() as cluster:
            workers = await cluster.start(COUNTERS, deadline_s=60)
            shards = [Request(ids=ids(range(1))), Request(ids=ids(range(1, 2)))]
            merged = await workers.role("counter", Counter).call_sharded(Counter.generate, shards)
            with cluster.scope("step 7") as step:
                assert merged.rows is not None
                step.hold(merged.rows)
        with pytest.raises(ClusterError, match="closed"):
            await cluster.start(COUNTERS)
        with pytest.raises(StoreError, match="step 7"):
            merged.rows.read()

    asyncio.run(asyncio.wait_for(main(), 90))
