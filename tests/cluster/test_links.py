# SPDX-License-Identifier: Apache-2.0
"""Process groups that span pools: weights go from a policy to its generator, also after one was rebuilt."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.clusters import Opener, drain, in_cluster
from helpers.roles import Batch, Counter, Request, Summer, ids
from podium.cluster import Cluster, Layout, MeshShape, Pool, RoleSpec, WorkerId, Workers
from podium.errors import ClusterError, DeadlineError, RoleError, WorkerDiedError

# Policy ranks are 0 and 1 of the link, the generator is 2. `judge` sits with the policy.
LAYOUT = Layout(
    pools=(Pool(name="train", slots=2), Pool(name="gen", slots=1, collectives=False)),
    roles=(
        RoleSpec(name="policy", kind=Summer, pool="train", mesh=MeshShape(shard=2), arguments=(7,)),
        RoleSpec(name="judge", kind=Summer, pool="train", mesh=MeshShape(replica=2)),
        RoleSpec(name="generator", kind=Summer, pool="gen", arguments=(3,)),
    ),
)
SIZE = 5


async def sent_from(workers: Workers, source: int, link: str = "weights") -> list[float]:
    """What each of the link has after a broadcast from one of them."""
    policy, generator = workers.role("policy", Summer).within(15), workers.role("generator", Summer).within(15)
    answers = await asyncio.gather(
        policy.call_all(Summer.receive, link, SIZE, source), generator.call_all(Summer.receive, link, SIZE, source)
    )
    return [answer.value for some in answers for answer in some]


async def kill(workers: Workers, role: str, rank: int) -> None:
    group = workers.role(role, Summer)
    process = (await group.call_one(rank, Counter.thread)).value[0]
    worker = group.workers[rank]
    member = workers.worker_pool(worker.pool).living(worker)
    os.kill(process, signal.SIGKILL)
    await asyncio.wait_for(member.death, 20)


@pytest.mark.slow
def test_a_link_carries_weights_between_pools_and_is_renewed_with_either(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        policy, generator = workers.role("policy", Summer), workers.role("generator", Summer)
        with pytest.raises(RoleError, match=r"gen\[0\].*'weights'.*workers\.connect"):
            await generator.call_all(Summer.receive, "weights", SIZE, 0)
        with pytest.raises(ClusterError, match=r"weights.*policy, judge"):
            await workers.connect("weights", ("policy", "judge"))
        with pytest.raises(ClusterError, match="'critic'"):
            await workers.connect("weights", ("policy", "critic"))

        await workers.connect("weights", ("policy", "generator"), deadline_s=30)
        assert await sent_from(workers, 0) == [35.0] * 3  # five sevens
        assert await sent_from(workers, 2) == [15.0] * 3  # five threes
        assert [answer.value for answer in await policy.call_all(Summer.all_sum, 1.0)] == [3.0, 3.0]

        await kill(workers, "generator", 0)
        (new,) = await workers.recover("gen", deadline_s=60)
        assert new.incarnation == 1
        assert [worker.incarnation for worker in policy.workers] == [0, 0]
        assert await sent_from(workers, 0) == [35.0] * 3

        await policy.call_all(Counter.add, 1)
        await kill(workers, "policy", 0)  # the one that served the store
        assert len(await workers.recover("train", deadline_s=60)) == 2
        assert [worker.incarnation for worker in generator.workers] == [1]
        assert await sent_from(workers, 1) == [35.0] * 3  # the policy is as it was built
        assert [answer.value for answer in await policy.call_all(Summer.all_sum, 1.0)] == [3.0, 3.0]

        # Made anew by hand, and another one beside it.
        await workers.connect("weights", ("generator", "policy"), deadline_s=30)
        await workers.connect("back", ("policy", "generator"), deadline_s=30)
        assert await sent_from(workers, 0) == [15.0] * 3
        assert await sent_from(workers, 0, "back") == [35.0] * 3

    in_cluster(open_on_ray, LAYOUT, body, limit_s=200)


@pytest.mark.slow
def test_a_generator_that_dies_in_a_transfer_costs_the_policy_nothing_but_that_transfer(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        policy, generator = workers.role("policy", Summer), workers.role("generator", Summer)
        await workers.connect("weights", ("policy", "generator"), deadline_s=30)
        await policy.call_all(Counter.add, 1)
        # The generator is the source, so the policy waits for it.
        receiving = asyncio.create_task(policy.within(15).call_all(Summer.receive, "weights", SIZE, 2))
        await kill(workers, "generator", 0)
        with pytest.raises(RoleError, match=r"train\[[01]\].*policy\.receive"):
            await receiving
        await workers.recover("gen", deadline_s=60)
        assert await sent_from(workers, 0) == [40.0] * 3  # five eights: the policy has lived on
        assert [worker.incarnation for worker in policy.workers] == [0, 0]
        assert generator.workers[0].incarnation == 1

    in_cluster(open_on_ray, LAYOUT, body, limit_s=120)


@pytest.mark.slow
def test_pools_of_one_link_that_die_together_come_back_together(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        restored: set[str] = set()

        async def restore(new: tuple[WorkerId, ...]) -> None:
            restored.update(str(worker) for worker in new)

        workers.restore_with("policy", restore)
        workers.restore_with("generator", restore)
        await workers.connect("weights", ("policy", "generator"), deadline_s=30)
        await kill(workers, "policy", 1)
        await kill(workers, "generator", 0)
        # The first one finds the other dead: it may report that, but must not forget what it has left undone.
        for pool in ("train", "gen", "train"):
            with suppress(WorkerDiedError):
                await workers.recover(pool, deadline_s=60)
        policy, generator = workers.role("policy", Summer), workers.role("generator", Summer)
        assert restored >= {str(worker) for worker in (*policy.workers, *generator.workers)}
        assert await sent_from(workers, 0) == [35.0] * 3

    in_cluster(open_on_ray, LAYOUT, body, limit_s=200)


@pytest.mark.slow
def test_a_stream_that_fails_on_one_rank_breaks_its_pool(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        policy, judge = workers.role("policy", Summer), workers.role("judge", Summer)
        assert judge.workers == policy.workers
        shards = [Request(ids=ids(range(1))), Request(ids=ids(range(1, 2)))]
        rows = (await policy.call_sharded(Counter.generate, shards)).rows
        assert rows is not None
        own = [Batch(block=rows.select(shard.ids)) for shard in shards]
        # 1·0 + 4·1 + 8·100 + 11·101
        assert (await policy.call_sharded(Summer.sum_tokens, own)).metrics == {"sum": 1915.0}
        with pytest.raises(RoleError, match=r"train\[0\].*ValueError: rank 0"):
            await drain(judge.stream_one(0, Summer.generate_meeting, shards[0], 0))
        with pytest.raises(WorkerDiedError, match="pool train"):
            await judge.within(5).call_all(Counter.value)

    in_cluster(open_on_ray, LAYOUT, body, limit_s=120)


class Late(Summer):
    """Sends late."""

    def receive_from_late(self, link: str, source: int, seconds: float) -> float:
        if self.context.transfer(link).rank == source:
            self.nap(seconds)
        return self.receive(link, SIZE, source)


async def recover_patiently(workers: Workers, pool: str) -> None:
    """With short deadlines, until its workers are built."""
    for _ in range(6):
        try:
            await workers.recover(pool, deadline_s=8)
        except DeadlineError as error:
            if "still building" not in str(error):
                raise
        else:
            return


@pytest.mark.slow
def test_a_link_outlives_its_making_and_a_busy_pool_the_renewal_of_its_link(
    open_on_ray: Opener, tmp_path: Path
) -> None:
    pools = (Pool(name="train", slots=1), Pool(name="gen", slots=2))
    layout = Layout(
        pools=pools,
        roles=(
            RoleSpec(name="policy", kind=Late, pool="train", arguments=(7,)),
            RoleSpec(name="generator", kind=Late, pool="gen", mesh=MeshShape(shard=2), arguments=(3,)),
        ),
    )

    async def body(cluster: Cluster, workers: Workers) -> None:
        policy, generator = workers.role("policy", Late), workers.role("generator", Late)
        await workers.connect("weights", ("policy", "generator"), deadline_s=10)
        # The sender comes later than the link's making was allowed to take.
        answers = await asyncio.gather(
            policy.call_all(Late.receive_from_late, "weights", 0, 11.0),
            generator.call_all(Late.receive_from_late, "weights", 0, 11.0),
        )
        assert [answer.value for some in answers for answer in some] == [35.0] * 3

        # The generator is busy. On a loaded machine the new policy worker itself may take longer than one deadline.
        done = tmp_path / "done"
        working = asyncio.create_task(generator.call_all(Late.wait_for, str(done)))
        await workers.end_worker(policy.workers[0])
        with pytest.raises(DeadlineError, match=r"\bgen\b.*leaving.*weights"):
            await recover_patiently(workers, "train")
        done.touch()
        assert [answer.value for answer in await working] == ["came"] * 2
        assert [answer.value for answer in await generator.call_all(Late.all_sum, 1.0)] == [3.0] * 2
        await workers.recover("train", deadline_s=30)
        assert await sent_from(workers, 0) == [35.0] * 3

    in_cluster(open_on_ray, layout, body, limit_s=150)
