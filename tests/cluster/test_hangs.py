# SPDX-License-Identifier: Apache-2.0
"""Workers that live and do not advance are ended, where ending them stops their work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.clusters import Opener, in_cluster, inline_then_ray, one_role
from helpers.roles import Counter, Request, Summer, ids
from podium.cluster import Cluster, Workers, open_inline
from podium.cluster.fanout import OverdueError
from podium.cluster.hangs import Hang
from podium.cluster.member import Timeouts
from podium.errors import WorkerDiedError

WATCHED = Timeouts(beat_s=0.1, hang_s=2.0)


@pytest.mark.slow
def test_a_worker_whose_call_does_not_advance_is_ended_with_the_stacks_of_all(open_on_ray: Opener) -> None:
    hangs: list[Hang] = []

    async def body(cluster: Cluster, workers: Workers) -> None:
        workers.report_hangs_to(hangs.append)
        group = workers.role("counter", Counter)
        with pytest.raises(
            WorkerDiedError, match=r"it hangs: no progress in counter\.nap_on > napping for \d s, at .*nap"
        ):
            await group.call_all(Counter.nap_on, 1, 300.0)
        (hang,) = hangs
        assert hang.workers == (group.workers[1],)
        assert list(hang.where["gen"].answers) == list(group.workers)
        assert re.search(r"roles\.py:\d+ nap\b", str(hang))
        (new,) = await workers.recover("gen", deadline_s=30)
        assert new.index == 1
        assert [answer.value for answer in await group.call_all(Counter.value)] == [5, 5]

    in_cluster(open_on_ray, one_role(Counter, (5,)), body, timeouts=WATCHED)


@pytest.mark.slow
def test_the_one_that_the_others_wait_for_in_a_collective_is_named(open_on_ray: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Summer)
        late = re.escape(str(group.workers[1]))
        with pytest.raises(
            WorkerDiedError, match=rf"{late}: it hangs: no progress in counter\.sum_without > staying away for"
        ):
            await group.call_all(Summer.sum_without, 1)
        assert len(await workers.recover("gen", deadline_s=60)) == 2

    in_cluster(open_on_ray, one_role(Summer, collectives=True), body, timeouts=WATCHED, limit_s=120)


@inline_then_ray
def test_work_that_advances_may_take_longer(open_cluster: Opener) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        stream = group.stream_one(0, Counter.generate_slowly, Request(ids=ids(range(4))), 0.5)
        assert len([block async for block in stream]) == 8  # two of each

    in_cluster(open_cluster, one_role(Counter), body, timeouts=WATCHED)


@inline_then_ray
def test_workers_that_do_not_answer_in_time_are_ended_where_that_stops_them(
    open_cluster: Opener, tmp_path: Path
) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter)
        with pytest.raises(OverdueError) as raised:
            await group.within(0.5).control_one(0, Counter.wait_for, str(tmp_path / "go"))
        assert raised.value.workers == (group.workers[0],)
        is_ended = await workers.end_overdue(raised.value)
        assert is_ended == workers.is_damaged("gen")
        assert is_ended == (await workers.recover("gen", deadline_s=30) != ())
        (tmp_path / "go").touch()

    in_cluster(open_cluster, one_role(Counter), body)


def test_control_calls_keep_their_deadline_while_work_may_take_longer(tmp_path: Path) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        group = workers.role("counter", Counter).within(0.3).within(3600, work_only=True)
        assert [answer.value for answer in await group.call_all(Counter.nap, 0.6)] == ["rested", "rested"]
        with pytest.raises(OverdueError, match=r"0\.3 s"):
            await group.control_one(0, Counter.wait_for, str(tmp_path / "go"))
        (tmp_path / "go").touch()

    in_cluster(open_inline, one_role(Counter), body)
