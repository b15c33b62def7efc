# SPDX-License-Identifier: Apache-2.0
"""What a controller may rely on, whether its workers are Ray's processes or threads of its own."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import re
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from helpers.clusters import Opener, drain, eventually, in_cluster, inline_then_ray, one_role, until_all_in
from helpers.processes import wait_until
from helpers.roles import Batch, Counter, Request, Stubborn, Summer, UnbuildableWhile, ids, make_block
from podium.cluster import Cluster, Layout, MeshShape, Pool, RoleSpec, WorkerId, Workers
from podium.cluster.host import RoleHost, parameters_of
from podium.cluster.layout import public_methods
from podium.cluster.messages import Build, Settle
from podium.data.trajectories import TrajectoryId, TrajectoryIds
from podium.errors import (
    ClusterError,
    DeadlineError,
    PlacementError,
    ResultError,
    RoleError,
    StoreError,
    WorkerDiedError,
)

COUNTERS = one_role(Counter, (5,))

# Of the trajectories 0.0, 0.1, 1.0 and 1.1: lengths 1, 4, 8 and 11, tokens 0, 1, 100 and 101. In no order, and
# uneven: rank 0 has 20 tokens, rank 1 has 4.
LEFT = TrajectoryIds.of([TrajectoryId(1, 1), TrajectoryId(0, 0), TrajectoryId(1, 0)])
RIGHT = TrajectoryIds.of([TrajectoryId(0, 1)])
SHARDS = [Request(ids=LEFT), Request(ids=RIGHT)]
TOKENS = [0] * 1 + [1] * 4 + [100] * 8 + [101] * 11
NOBODY = ids(range(0))


# Calls


def test_calls_reach_all_or_one_and_are_answered_in_rank_order(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        answers = await group.call_all(Counter.add, 3, twice=True)
        assert [answer.value for answer in answers] == [11, 11]
        assert [answer.worker for answer in answers] == list(group.workers)

        one = await group.call_one(1, Counter.add, number=-1)
        assert (one.worker, one.value) == (group.workers[1], 10)
        assert [answer.value for answer in await group.call_all(Counter.value)] == [11, 10]

        numbers = np.arange(100_000)  # 800 kB, sent by reference; the sum is n(n-1)/2
        assert [answer.value for answer in await group.call_all(Counter.measure, numbers)] == [4_999_950_000] * 2
        assert (await group.call_one(0, Counter.measure, array=numbers[:4])).value == 6

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray
def test_calls_made_at_once_are_done_one_after_the_other_on_one_thread(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        first = [answer.value for answer in await group.call_all(Counter.thread)]
        sums = await asyncio.gather(*(group.call_one(0, Counter.add, 1) for _ in range(20)))
        assert [answer.value for answer in sums] == list(range(6, 26))
        await group.call_sharded(Counter.generate, SHARDS)
        await drain(group.stream_sharded(Counter.generate_slowly, SHARDS))
        for _ in range(5):
            assert [answer.value for answer in await group.call_all(Counter.thread)] == first
        assert first[0][1] != first[1][1] or first[0][0] != first[1][0]

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray
def test_colocated_roles_share_the_process_and_not_the_state(open_cluster: Opener) -> None:
    def role(name: str, start: int) -> RoleSpec:
        return RoleSpec(name=name, kind=Counter, pool="gen", mesh=MeshShape(replica=2), arguments=(start,))

    layout = Layout(
        pools=(Pool(name="gen", slots=2, collectives=False),),
        roles=(role("left", 1), role("right", 10), RoleSpec(name="one", kind=Summer, pool="gen", slots=(1,))),
    )

    async def body(cluster: Cluster, workers: Workers) -> None:
        left, right, one = workers.role("left", Counter), workers.role("right", Counter), workers.role("one", Counter)
        assert left.workers == right.workers
        assert one.workers == left.workers[1:]
        places = [answer.value for answer in await left.call_all(Counter.thread)]
        assert [answer.value for answer in await right.call_all(Counter.thread)] == places
        assert (await one.call_one(0, Counter.thread)).value == places[1]
        await left.call_all(Counter.add, 1)
        assert [answer.value for answer in await right.call_all(Counter.add, 2)] == [12, 12]
        assert [answer.value for answer in await left.call_all(Counter.value)] == [2, 2]
        assert (await one.call_one(0, Counter.value)).value == 0

    in_cluster(open_cluster, layout, body)


def test_where_and_health_answer_while_the_work_thread_is_busy(open_cluster: Opener, tmp_path: Path) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        file = tmp_path / "go"
        call = asyncio.create_task(group.call_all(Counter.wait_for, str(file)))
        await until_all_in(workers, "gen", "counter.wait_for > waiting")
        began = time.monotonic()
        report = await workers.where("gen")
        assert time.monotonic() - began < 2
        assert not call.done()
        ((place, who),) = report.groups()
        assert who == list(group.workers)
        assert "roles.py" in place

        async def heard(doing: str) -> bool:
            return all(each.doing == doing and each.died is None for each in workers.health()["gen"])

        await eventually(lambda: heard("counter.wait_for > waiting"), "a heartbeat from inside the call")
        assert all(each.silent_s < 5 for each in workers.health()["gen"])
        assert all("counter.wait_for > waiting" in str(each) for each in workers.health()["gen"])
        file.touch()
        assert [answer.value for answer in await call] == ["came", "came"]
        await eventually(lambda: heard(""), "a heartbeat of idle workers")
        assert (await workers.where("gen")).groups() == [("idle", list(group.workers))]

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray  # fast on Ray: test_a_stream_that_stops_is_given_up_with_a_report
def test_a_call_past_its_deadline_says_who_is_late_and_where_they_are(open_cluster: Opener, tmp_path: Path) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        file = tmp_path / "go"
        with pytest.raises(DeadlineError) as raised:
            await group.within(0.5).call_all(Counter.wait_on, 1, str(file))
        text, late = str(raised.value), str(group.workers[1])
        assert re.match(rf"1 of 3 .*\bgen\b.*counter\.wait_on .*0\.5 s.*{re.escape(late)}", text)
        assert f"{group.workers[0]}, {group.workers[2]}: idle\n" in text
        (different,) = [line for line in text.splitlines() if "<-" in line]
        assert different.startswith(f"{late}: ")
        assert "counter.wait_on > waiting" in different
        assert "roles.py" in text[text.index(different) :]  # its stack, which may end inside the file system's calls
        assert "workers.end_worker" in text.splitlines()[-1]
        # The others are free; the late one answers when it is through.
        assert (await group.call_one(0, Counter.value)).value == 5
        file.touch()
        assert [answer.value for answer in await group.call_all(Counter.value)] == [5, 5, 5]

    in_cluster(open_cluster, one_role(Counter, (5,), slots=3), body)


def test_an_exception_of_a_role_comes_back_with_its_worker_and_traceback(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        with pytest.raises(RoleError) as raised:
            await group.call_all(Counter.fail_on, 1)
        text = str(raised.value)
        assert re.match(rf"{re.escape(str(group.workers[1]))}.*counter\.fail_on.*ValueError: rank 1", text)
        assert 'raise ValueError(f"rank {rank} does not feel well")' in text
        assert "roles.py" in text
        assert [answer.value for answer in await group.call_all(Counter.add, 1)] == [6, 6]
        with pytest.raises(RoleError, match="TypeError"):
            await group.call_one(0, Counter.value, 7)  # type: ignore[call-arg]
        with pytest.raises(RoleError, match=r"counter\.not_rows.*\bint\b"):
            await group.call_sharded(Counter.not_rows, SHARDS)
        assert [answer.value for answer in await group.call_all(Counter.value)] == [6, 6]
        assert await workers.recover("gen") == ()  # an exception is no death

    in_cluster(open_cluster, COUNTERS, body)


def test_a_role_that_exits_does_not_take_the_controller_with_it(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        with pytest.raises((WorkerDiedError, RoleError), match=r"gen\[0\]"):
            await group.call_one(0, Counter.leave)
        await workers.recover("gen")
        assert [answer.value for answer in await group.call_all(Counter.value)] == [5, 5]

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray
def test_what_is_not_a_public_method_of_the_role_is_refused_at_once(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        for wrong in (Summer.all_sum, Counter.__init__, lambda role: 3, make_block, Counter(None).value):  # type: ignore[arg-type]
            with pytest.raises(ClusterError, match="public method"):
                await group.call_all(wrong)
            with pytest.raises(ClusterError, match="public method"):
                group.requires(Counter.add, wrong)
        group.requires(Counter.add, Counter.generate_slowly)
        with pytest.raises(ClusterError, match="public method"):
            await group.call_sharded(lambda role, shard: None, SHARDS)
        with pytest.raises(ClusterError, match="public method"):
            await drain(group.stream_one(0, lambda role, shard: [], SHARDS[0]))
        with pytest.raises(ClusterError, match=r"counter.*\b2\b"):
            await group.call_one(2, Counter.value)
        with pytest.raises(ClusterError, match=r"'counter'.*Summer.*\(Counter\)"):
            workers.role("counter", Summer)
        with pytest.raises(ClusterError, match="'learner'"):
            workers.role("learner", Counter)
        with pytest.raises(ClusterError, match="'train'"):
            await workers.recover("train")
        for nowhere in (2, -1):
            with pytest.raises(ClusterError, match=rf"counter.* {nowhere}\b"):
                await drain(group.stream_one(nowhere, Counter.generate_slowly, SHARDS[0]))

    in_cluster(open_cluster, COUNTERS, body)


# Rows


@inline_then_ray  # fast on Ray: test_columns_are_joined_to_their_rows_on_the_worker_however_both_were_cut
def test_rows_are_merged_by_id_and_metrics_as_declared(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        merged = await group.call_sharded(Counter.generate, SHARDS)
        assert merged.rows is not None
        assert [str(each) for each in merged.rows.ids] == ["0.0#0", "0.1#0", "1.0#0", "1.1#0"]
        assert merged.rows.lengths_N.tolist() == [1, 4, 8, 11]
        block = merged.rows.read()
        assert block.ids.same_as(merged.rows.ids)
        assert block.tokens_T.tolist() == TOKENS
        # The mean is over tokens: (1·0 + 4·1 + 8·100 + 11·101) / 24, not the mean of the ranks' means.
        assert merged.metrics == {"token": pytest.approx(1915 / 24), "tokens": 24.0, "longest": 11.0}
        assert [result.worker for result in merged.results] == list(group.workers)
        assert {(span.name, span.worker) for span in workers.take_spans()} >= {
            ("counter.generate", worker) for worker in group.workers
        }

        some = merged.rows.select(TrajectoryIds.of([TrajectoryId(1, 0), TrajectoryId(0, 1)]))
        assert some.read().tokens_T.tolist() == [100] * 8 + [1] * 4
        with pytest.raises(ResultError, match=r"7\.0#0"):
            merged.rows.select(TrajectoryIds.of([TrajectoryId(7, 0)]))

    in_cluster(open_cluster, COUNTERS, body)


def test_columns_are_joined_to_their_rows_on_the_worker_however_both_were_cut(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        rows = (await group.call_sharded(Counter.generate, SHARDS)).rows
        assert rows is not None

        def cut(*positions: list[int]) -> list[np.ndarray]:
            return [np.array(each, np.int64) for each in positions]

        first = [Batch(block=rows.take(at)) for at in cut([3, 1], [2, 0])]
        column = (await group.call_sharded(Counter.double, first)).rows
        assert column is not None
        assert column.read().values_T.tolist() == [2.0 * token for token in TOKENS]

        # Another cut of the rows, one shard of it empty: each worker reads from both stored blocks and both columns.
        second = [Batch(block=rows.take(at), column=column.take(at)) for at in cut([], [2, 0, 3, 1])]
        summed = await group.call_sharded(Counter.double, second)
        assert summed.rows is not None
        assert summed.rows.read().values_T.tolist() == [4.0 * token for token in TOKENS]
        assert summed.metrics == {"token": pytest.approx(1915 / 24)}

        done = await group.call_sharded(Counter.consume, second)
        assert done.rows is None
        assert done.metrics == {"rows": 4.0}

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray
def test_shards_may_be_empty_and_must_be_one_for_each_data_rank(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        merged = await group.call_sharded(Counter.generate, [Request(ids=NOBODY), Request(ids=RIGHT)])
        assert merged.rows is not None
        assert merged.rows.read().tokens_T.tolist() == [1] * 4
        assert merged.metrics == {"token": 1.0, "tokens": 4.0, "longest": 4.0}

        nothing = await group.call_sharded(Counter.generate, [Request(ids=NOBODY)] * 2)
        assert nothing.rows is not None
        assert len(nothing.rows) == 0
        assert math.isnan(nothing.metrics["token"])
        blocks = [block async for block in group.stream_sharded(Counter.generate_slowly, [Request(ids=NOBODY)] * 2)]
        assert blocks == []

        for wrong in ([], SHARDS[:1], [*SHARDS, Request(ids=NOBODY)]):
            with pytest.raises(ClusterError, match=rf"\b2 ranks.*\b{len(wrong)} shards"):
                await group.call_sharded(Counter.generate, wrong)
            with pytest.raises(ClusterError, match=rf"\b2 ranks.*\b{len(wrong)} shards"):
                await drain(group.stream_sharded(Counter.generate_slowly, wrong))

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray
def test_answers_that_do_not_add_up_are_refused_with_ids_and_workers(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        left, right = (str(worker).replace("[", r"\[").replace("]", r"\]") for worker in group.workers)
        with pytest.raises(ResultError, match=rf"missing.*{left}.*1\.0#0\n.*missing.*{right}.*0\.1#0"):
            await group.call_sharded(Counter.lose_one, SHARDS)
        with pytest.raises(ResultError, match=rf"once.*{left}.*1\.1#0\n.*once.*{right}.*0\.1"):
            await group.call_sharded(Counter.repeat_one, SHARDS)
        with pytest.raises(ResultError, match=rf"foreign.*{left}.*rank 0.*99\.0#0"):
            await group.call_sharded(Counter.invent_one, SHARDS)
        with pytest.raises(ResultError, match=r"several ranks.*0\.1#0"):
            await group.call_sharded(Counter.generate, [SHARDS[1], SHARDS[1]])
        with pytest.raises(ResultError, match=rf"{left}.*twice.*1\.1#0"):
            await drain(group.stream_one(0, Counter.generate_and_repeat, SHARDS[0]))
        with pytest.raises(ResultError, match=rf"{left}.*counter\.generate_and_lose.*1\.0#0"):
            await drain(group.stream_one(0, Counter.generate_and_lose, SHARDS[0]))
        merged = await group.call_sharded(Counter.generate, SHARDS)  # nobody is worse for it
        assert merged.rows is not None
        assert len(merged.rows) == 4

    in_cluster(open_cluster, COUNTERS, body)


def test_streamed_blocks_come_as_they_are_made(open_cluster: Opener, tmp_path: Path) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        blocks = [block async for block in group.stream_one(0, Counter.generate_slowly, SHARDS[0])]
        assert [str(block.ids) for block in blocks] == ["1.1#0", "0.0#0", "1.0#0"]  # as asked
        assert [block.stored.read().tokens_T.tolist() for block in blocks if block.stored] == [
            [101] * 11,
            [0],
            [100] * 8,
        ]
        assert {block.worker for block in blocks} == {group.workers[0]}

        # Data rank 0 makes its second block only after the first one has arrived here.
        file = tmp_path / "go"
        arrived = []
        async for block in group.stream_sharded(Counter.generate_after, SHARDS, str(file)):
            arrived.append(block)
            if len(arrived) == 2:
                assert not file.exists()
                assert {str(each.ids) for each in arrived} == {"1.1#0", "0.1#0"}
                file.touch()
        assert [str(block.ids) for block in arrived[2:]] == ["0.0#0", "1.0#0"]

        with pytest.raises(RoleError, match=r"gen\[0\].*no room for trajectory") as raised:
            await drain(group.stream_sharded(Counter.generate_and_fail, SHARDS, 2), then=arrived.append)
        assert "generate_and_fail" in str(raised.value)
        assert {str(block.ids) for block in arrived[4:]} >= {"1.1#0", "0.0#0"}

        # Who has seen enough leaves; the worker is there for the next call.
        async for block in group.stream_one(0, Counter.generate_slowly, SHARDS[0]):
            assert str(block.ids) == "1.1#0"
            break
        assert (await group.call_one(0, Counter.value)).value == 5

    in_cluster(open_cluster, COUNTERS, body)


def test_a_stream_that_stops_is_given_up_with_a_report(open_cluster: Opener, tmp_path: Path) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        file = tmp_path / "go"
        came = []
        stream = group.within(0.5).stream_one(0, Counter.generate_after, SHARDS[0], str(file))
        with pytest.raises(DeadlineError) as raised:
            await drain(stream, then=came.append)
        assert [str(block.ids) for block in came] == ["1.1#0"]
        first = str(raised.value).splitlines()[0]
        assert re.match(rf"{re.escape(str(group.workers[0]))}.*counter\.generate_after.*0\.5 s", first)
        assert "counter.generate_after > waiting" in str(raised.value)
        file.touch()
        assert (await group.call_one(0, Counter.value)).value == 5

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray
def test_the_spans_of_a_call_come_back_with_its_answer(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        workers.take_spans()
        await group.call_all(Counter.nap, 0.01)
        inner, outer = spans = workers.take_spans()
        assert [span.name for span in spans] == ["counter.nap > napping", "counter.nap"]  # as they ended
        assert outer.begin_s <= inner.begin_s <= inner.end_s <= outer.end_s
        assert 0.01 <= inner.end_s - inner.begin_s < 60
        assert {span.worker for span in spans} == set(group.workers)
        await group.call_one(0, Counter.value)
        assert [span.name for span in workers.take_spans()] == ["counter.value"]

    in_cluster(open_cluster, one_role(Counter, slots=1), body)


# The life of a layout


def test_a_role_that_cannot_be_built_ends_the_start_and_leaves_nothing(open_cluster: Opener) -> None:
    async def main() -> None:
        async with open_cluster() as cluster:
            with pytest.raises(RoleError, match=r"gen\[0\].*counter.*models/none"):
                await cluster.start(one_role(Stubborn), deadline_s=30)
            # Whatever it had taken is there for the next one: on Ray these are all sixteen CPUs.
            workers = await cluster.start(one_role(Counter, slots=2, pool="again"), deadline_s=30)
            assert len(await workers.role("counter", Counter).call_all(Counter.value)) == 2

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_worker_with_other_code_than_the_controllers_says_so_when_it_is_built() -> None:
    layout = one_role(Counter, slots=1)
    worker = WorkerId("gen", 0, "node-a", "cpu")
    host = RoleHost(node="node-a", host="127.0.0.1", device="cpu", kind="cpu", own_process=False)
    host.perform(Settle(worker=worker, meshes=layout.meshes_of("gen")))
    known = {name: parameters_of(method) for name, method in public_methods(Counter).items()}
    assert known["add"] == ("self", "number", "*", "twice")

    def message(**changed: tuple[str, ...]) -> str:
        reply, _ = host.perform(Build(role="counter", methods={**known, **changed}), Counter, ())
        return reply.failure.text if reply.failure else ""

    assert message() == ""
    absent = message(update=("self", "batch"))
    assert absent.startswith("gen[0]@node-a/cpu#0")
    assert "Counter.update(self, batch)" in absent
    other = message(add=("self", "amount"))
    assert "Counter.add(self, amount)" in other
    assert "(self, number, *, twice)" in other


@inline_then_ray
def test_a_pool_that_meets_needs_processes_and_a_pool_of_one_meets_nobody(open_cluster: Opener) -> None:
    alone = one_role(Counter, (5,), slots=1, collectives=True)

    async def main() -> None:
        async with open_cluster() as cluster:
            if not cluster._transport.has_collectives:
                with pytest.raises(PlacementError, match=r"\bgen\b.*\b2\b.*collectives.*Ray"):
                    await cluster.start(one_role(Counter, slots=2, collectives=True), deadline_s=10)
            workers = await cluster.start(alone, deadline_s=30)
            group = workers.role("counter", Counter)
            assert (await group.call_one(0, Counter.add, 1)).value == 6
            with pytest.raises(RoleError, match="rank 0"):
                await group.call_all(Counter.fail_on, 0)
            assert (await group.call_one(0, Counter.value)).value == 6  # nobody to be out of step with
            await workers.end_worker(group.workers[0])
            assert [worker.incarnation for worker in await workers.recover("gen", deadline_s=30)] == [1]
            assert (await group.call_one(0, Counter.value)).value == 5

    asyncio.run(asyncio.wait_for(main(), 60))


# Deaths


def test_an_idle_worker_that_ends_is_noticed_replaced_and_given_its_state(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)

        async def restore(new: tuple[WorkerId, ...]) -> None:
            for worker in new:
                await group.call_one(group.workers.index(worker), Counter.add, 100)

        workers.restore_with("counter", restore)
        await group.call_all(Counter.add, 3)
        kept, lost = group.workers
        place = (await group.call_one(0, Counter.thread)).value
        rows = (await group.call_sharded(Counter.generate, SHARDS)).rows
        assert rows is not None

        await workers.end_worker(lost)
        health = workers.health()["gen"]
        assert [each.died is not None for each in health] == [False, True]
        assert str(lost) in str(health[1])
        assert (await workers.where("gen")).answers[lost] is None
        assert (await group.call_one(0, Counter.value)).value == 8  # the other goes on

        assert await workers.recover("gen", deadline_s=30) == (group.workers[1],)
        assert group.workers[0] == kept
        assert (group.workers[1].index, group.workers[1].incarnation) == (1, 1)
        assert [answer.value for answer in await group.call_all(Counter.value)] == [8, 105]
        assert (await group.call_one(0, Counter.thread)).value == place
        assert await workers.recover("gen") == ()
        assert rows.read().tokens_T.tolist() == TOKENS  # the dead one's rows too

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray
def test_a_call_to_a_dead_worker_names_it(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        lost = group.workers[1]
        await workers.end_worker(lost)
        message = r"gen\[1\]@.*#0"
        with pytest.raises(WorkerDiedError, match=message):
            await group.call_all(Counter.value)
        with pytest.raises(WorkerDiedError, match=message):
            await group.call_one(1, Counter.value)
        with pytest.raises(WorkerDiedError, match=message):
            await group.call_sharded(Counter.generate, SHARDS)
        with pytest.raises(WorkerDiedError, match=message):
            await drain(group.stream_sharded(Counter.generate_slowly, SHARDS))
        await workers.recover("gen", deadline_s=30)
        with pytest.raises(WorkerDiedError, match=rf"{message}.*gen\[1\]@.*#1"):
            await workers.end_worker(lost)

    in_cluster(open_cluster, COUNTERS, body)


def test_a_worker_that_ends_in_a_call_fails_it_and_is_unheard_afterwards(open_cluster: Opener, tmp_path: Path) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        file = tmp_path / "go"
        call = asyncio.create_task(group.call_all(Counter.add_after, str(file), 1000))
        await until_all_in(workers, "gen", "counter.add_after > waiting")
        lost = group.workers[0]
        began = time.monotonic()
        await workers.end_worker(lost)
        with pytest.raises(WorkerDiedError) as raised:
            await call
        assert time.monotonic() - began < 2
        assert re.match(rf"1 of 2 .*\bgen\b.*counter\.add_after.*{re.escape(str(lost))}", str(raised.value))
        assert "workers.recover('gen')" in str(raised.value)

        assert [worker.incarnation for worker in await workers.recover("gen", deadline_s=30)] == [1]
        assert (await group.call_one(0, Counter.value)).value == 5
        # Inline the old thread is still there, and finishes now; so does the living worker of Ray.
        file.touch()
        await asyncio.to_thread(wait_until, file.with_suffix(".added").exists, "the late work", deadline_s=20)
        assert [answer.value for answer in await group.call_all(Counter.value)] == [5, 1005]

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray
def test_an_answer_of_an_old_incarnation_is_refused(open_cluster: Opener, tmp_path: Path) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        file = tmp_path / "go"
        call = asyncio.create_task(group.call_all(Counter.wait_on, 1, str(file)))
        await eventually(lambda: _is_waiting(workers, 1), "rank 1 waiting")
        await group.call_one(0, Counter.value)  # what rank 0 was asked before this is answered
        old = group.workers[0]
        await workers.end_worker(old)
        (new,) = await workers.recover("gen", deadline_s=30)
        file.touch()
        with pytest.raises(WorkerDiedError, match="refused") as raised:
            await call
        assert str(old) in str(raised.value)
        assert str(new) in str(raised.value)
        assert [answer.value for answer in await group.call_all(Counter.value)] == [5, 5]

    in_cluster(open_cluster, COUNTERS, body)


async def _is_waiting(workers: Workers, slot: int) -> bool:
    return any(
        f"gen[{slot}]" in str(worker) and "waiting" in place
        for place, there in (await workers.where("gen")).groups()
        for worker in there
    )


def test_blocks_that_a_stream_had_finished_stay_readable_when_its_worker_dies(
    open_cluster: Opener, tmp_path: Path
) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        file = tmp_path / "go"
        stream = group.stream_one(0, Counter.generate_after, SHARDS[0], str(file))
        first = await anext(stream)
        await workers.end_worker(group.workers[0])
        with pytest.raises(WorkerDiedError, match=r"gen\[0\].*counter\.generate_after"):
            await anext(stream)
        await workers.recover("gen", deadline_s=30)
        assert first.stored is not None
        assert first.stored.read().tokens_T.tolist() == [101] * 11
        file.touch()
        again = [block async for block in group.stream_one(0, Counter.generate_after, SHARDS[0], str(file))]
        assert len(again) == 3

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray
def test_a_recovery_that_failed_can_be_tried_again(open_cluster: Opener, tmp_path: Path) -> None:
    file = tmp_path / "in the way"

    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        await group.call_all(Counter.add, 3)
        await workers.end_worker(group.workers[1])
        file.touch()
        with pytest.raises(RoleError, match=r"gen\[1\].* is in the way"):
            await workers.recover("gen", deadline_s=30)
        assert (await group.call_one(0, Counter.value)).value == 3
        with pytest.raises(WorkerDiedError, match=r"gen\[1\]"):
            await group.call_all(Counter.value)
        file.unlink()
        assert [worker.index for worker in await workers.recover("gen", deadline_s=30)] == [1]
        assert [answer.value for answer in await group.call_all(Counter.value)] == [3, 0]

    in_cluster(open_cluster, one_role(UnbuildableWhile, (str(file),)), body)


@inline_then_ray
def test_a_recovery_whose_restoring_failed_restores_when_it_is_tried_again(open_cluster: Opener) -> None:
    """Else the new worker would go on with the state that it was built with."""

    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        tried: list[tuple[WorkerId, ...]] = []

        async def restore(new: tuple[WorkerId, ...]) -> None:
            tried.append(new)
            if len(tried) == 1:
                raise OSError("the checkpoint cannot be read")
            await group.call_one(1, Counter.add, 100)

        workers.restore_with("counter", restore)
        await workers.end_worker(group.workers[1])
        with pytest.raises(OSError, match="cannot be read"):
            await workers.recover("gen", deadline_s=30)
        await workers.recover("gen", deadline_s=30)
        assert len(tried) == 2
        assert [answer.value for answer in await group.call_all(Counter.value)] == [5, 105]

    in_cluster(open_cluster, COUNTERS, body)


@inline_then_ray
def test_two_recoveries_at_once_are_one(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)

        async def recover_and_call() -> list[int]:
            await workers.recover("gen", deadline_s=30)
            return [answer.value for answer in await group.call_all(Counter.value)]

        await workers.end_worker(group.workers[1])
        assert await asyncio.gather(recover_and_call(), recover_and_call()) == [[5, 5], [5, 5]]
        assert [worker.incarnation for worker in group.workers] == [0, 1]

    in_cluster(open_cluster, COUNTERS, body)


# Objects


def test_what_a_step_holds_is_freed_when_it_closes(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        kept = await group.call_sharded(Counter.generate, SHARDS)
        with cluster.scope("step 3") as step:
            merged = await group.call_sharded(Counter.generate, SHARDS)
            assert merged.rows is not None
            assert step.hold(merged.rows) is merged.rows
            assert merged.rows.read().tokens_T.tolist() == TOKENS
        with pytest.raises(StoreError, match="step 3"):
            merged.rows.read()
        # On Ray the controller cannot send what is gone; inline the worker cannot read it.
        with pytest.raises((StoreError, RoleError), match="step 3"):
            await group.call_sharded(Counter.double, [Batch(block=merged.rows), Batch(block=merged.rows.take(_none()))])

        failing = (await group.call_sharded(Counter.generate, SHARDS)).rows
        assert failing is not None
        with suppress(KeyError), cluster.scope("step 4") as step:
            step.hold(failing)
            raise KeyError
        with pytest.raises(StoreError, match="step 4"):
            failing.read()

        assert kept.rows is not None
        assert kept.rows.read().tokens_T.tolist() == TOKENS  # no step holds these: they live as long as their reference

    in_cluster(open_cluster, COUNTERS, body)


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@pytest.mark.slow
def test_a_thousand_steps_need_no_more_memory_than_a_hundred(open_cluster: Opener) -> None:
    """A step makes two blocks of 13 bytes · 8000 tokens = 104 kB: without freeing, 208 MB would pile up."""

    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        shards = [Request(ids=ids(range(2))), Request(ids=ids(range(2, 4)))]

        async def steps(numbers: range) -> None:
            for number in numbers:
                with cluster.scope(f"step {number}") as step:
                    merged = await group.call_sharded(Counter.generate_long, shards, 2000)
                    assert merged.rows is not None
                    held = step.hold(merged.rows)
                    if number % 100 == 0:
                        assert held.read().offsets[-1] == 16_000

        await steps(range(100))
        before = _resident_bytes()
        await steps(range(100, 1000))
        assert _resident_bytes() - before < 30e6
        if cluster._transport.has_collectives:
            await eventually(_store_is_empty, "an empty object store", deadline_s=10)

    in_cluster(open_cluster, COUNTERS, body)


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _store_is_empty() -> bool:
    """Fewer bytes than ten steps make, in the whole object store."""
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.object_store_bytes_used < 2e6
