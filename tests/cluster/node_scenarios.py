# SPDX-License-Identifier: Apache-2.0
"""Scenarios on a Ray of their own, each in a process of its own: `node_scenarios.py NAME FOLDER`; what it prints last
is what it measured, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import ray
import ray.cluster_utils
import ray.scripts.scripts as scripts
import yaml
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import placement_group, placement_group_table

from helpers.clusters import next_death
from helpers.processes import outside_listeners_of, wait_until
from helpers.roles import Batch, Counter, Request, Summer, ids
from podium.cluster import Cluster, Layout, MeshShape, Pool, RayCluster, Resources, RoleSpec, Workers, open_ray
from podium.cluster.keepalive import KeepAlive
from podium.cluster.member import Timeouts
from podium.cluster.processes import children, command_of
from podium.cluster.ray_compat import actor_processes
from podium.data.trajectories import RowColumn, TrajectoryIds
from podium.errors import ClusterError, PlacementError, StoreError, WorkerDiedError

STORE_BYTES = 80 * 2**20
# Ray asks its nodes for a sign of life every 3 s and gives them up after five: a test has not that much time.
ATTENTIVE = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 300, "health_check_failure_threshold": 3}

Lose = Callable[[ray.cluster_utils.Cluster, Any], None]
"""How a node goes."""


class Maker(Counter):
    """Makes rows that are too large to travel inside an answer."""

    def make_large(self, request: Request) -> Any:
        from podium.cluster import Computed

        return Computed(rows=RowColumn(ids=request.ids, values_N=np.ones((len(request.ids), 50_000))))

    def add_up(self, batch: Batch) -> Any:
        """Reads stored rows on the worker."""
        from podium.cluster import Computed

        batch.block.read()
        return Computed(done=batch.ids)


@contextmanager
def nodes_of(
    *cpus: int, settings: dict[str, int] | None = None, shutdown_at_exit: bool = True, **first: Any
) -> Iterator[ray.cluster_utils.Cluster]:
    """A cluster of raylets; the first is the head, and has what `first` says. Without `shutdown_at_exit` nodes can be
    added in other threads than the main one: Ray sets no signal handlers then."""
    head: dict[str, Any] = {
        "num_cpus": cpus[0],
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
        **first,
    }
    if settings is not None:
        head["_system_config"] = settings
    cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=shutdown_at_exit)
    try:
        for count in cpus[1:]:
            add_node(cluster, count)
        yield cluster
    finally:
        if ray.is_initialized():
            ray.shutdown()
        cluster.shutdown()


def add_node(cluster: ray.cluster_utils.Cluster, cpus: int, **more: Any) -> Any:
    return cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES, **more)


def layout(*pools: Pool, kind: type = Counter, **mesh: int) -> Layout:
    """One role on each pool, of the same name."""
    return Layout(
        pools=pools,
        roles=tuple(
            RoleSpec(name=pool.name, kind=kind, pool=pool.name, mesh=MeshShape(**(mesh or {"replica": pool.slots})))
            for pool in pools
        ),
    )


def loose(name: str, slots: int, **kind: Any) -> Pool:
    return Pool(name=name, slots=slots, collectives=False, **kind)


@contextmanager
def seconds(measured: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    measured[name] = round(time.monotonic() - began, 2)


def node_names(workers: Workers, role: str) -> list[str]:
    """Of each rank."""
    return [worker.node for worker in workers.role(role, Counter).workers]


def name_of(node: Any) -> str:
    """How Podium calls a node of a machine that has several."""
    return f"{node.node_ip_address}~{node.node_id[:6]}"


async def all_free(cpus: int) -> None:
    """Until what ended workers held is free again: where a pool goes depends on it."""
    async with asyncio.timeout(30):
        while ray.available_resources().get("CPU", 0.0) != cpus:
            await asyncio.sleep(0.05)


async def refused(cluster: Cluster, layout: Layout) -> str:
    try:
        await cluster.start(layout, deadline_s=30)
    except PlacementError as error:
        return str(error)
    raise AssertionError("this should have been refused")


async def placing(folder: Path) -> dict[str, float]:
    """Where pools go on two nodes of two CPUs, and then on a third that has four."""
    measured: dict[str, float] = {}
    with nodes_of(2) as nodes:
        disk = add_node(nodes, 2, resources={"fast_disk": 1})
        async with open_ray(RayCluster(address=nodes.address)) as cluster:
            assert cluster.total("CPU") == 4
            # Two pools at once. One goes where its resource is; the other stays on one node,
            # though each of the two has room for one of its slots.
            score = loose("score", 1, each=Resources(cpus=1, custom={"fast_disk": 1}))
            learn = Pool(name="learn", slots=2, one_node=True)
            roles = (
                RoleSpec(name="score", kind=Counter, pool="score"),
                RoleSpec(name="learn", kind=Summer, pool="learn", mesh=MeshShape(shard=2)),
            )
            with seconds(measured, "two_pools_s"):
                both = await cluster.start(Layout(pools=(score, learn), roles=roles), deadline_s=90)
            assert node_names(both, "score") == [name_of(disk)]
            assert node_names(both, "learn") == [name_of(nodes.head_node)] * 2
            answers = await both.role("learn", Summer).call_all(Summer.all_sum, 1.0)
            assert [answer.value for answer in answers] == [3.0, 3.0]
            both.end()
            await all_free(4)

            wide = await cluster.start(layout(loose("wide", 4, spread=True)), deadline_s=60)
            # Both nodes, and neighbouring ranks share one.
            first, second, third, fourth = node_names(wide, "wide")
            assert first == second != third == fourth
            wide.end()

            text = await refused(cluster, layout(loose("whole", 4, one_node=True)))
            first, *_, last = text.splitlines()
            assert re.search(r"\bwhole\b.* 1 × 4 .* 4 CPU", first)
            assert re.search(rf"{re.escape(name_of(disk))}.* 2 CPU", text)
            assert re.search(r"\b2 slots .*\b4\b", last)
            text = await refused(cluster, layout(loose("backup", 1, each=Resources(custom={"tape": 1}))))
            assert "tape" in text.splitlines()[-1]
        # It was joined, not started: it is still there when the run has left.
        assert not ray.is_initialized()

        large = add_node(nodes, 4)
        os.environ["RAY_ADDRESS"] = nodes.address
        async with open_ray() as cluster:
            assert cluster.total("CPU") == 8
            await all_free(8)
            # Strictly packed on the one node that is large enough; packed on one of those that are left.
            pools = (loose("whole", 4, one_node=True), loose("pack", 2))
            workers = await cluster.start(layout(*pools), deadline_s=90)
            assert node_names(workers, "whole") == [name_of(large)] * 4
            assert len(set(node_names(workers, "pack"))) == 1
            assert name_of(large) not in node_names(workers, "pack")
        assert not ray.is_initialized()
        alive = [node for node in nodes.global_state.node_table() if node["Alive"]]
        assert len(alive) == 3
    return measured


async def death(folder: Path) -> dict[str, float]:
    """A node dies under calls of two pools that span it; everything goes on, on the other."""
    measured: dict[str, float] = {}
    with nodes_of(0, 4, 4) as nodes:
        by_name = {name_of(node): node for node in nodes.worker_nodes}
        async with open_ray(RayCluster(address=nodes.address)) as cluster:
            pools = (loose("gen", 2, spread=True), Pool(name="learn", slots=2, spread=True))
            roles = (
                RoleSpec(name="gen", kind=Maker, pool="gen", mesh=MeshShape(replica=2)),
                RoleSpec(name="learn", kind=Summer, pool="learn", mesh=MeshShape(shard=2)),
            )
            workers = await cluster.start(Layout(pools=pools, roles=roles), deadline_s=60)
            gen, learn = workers.role("gen", Maker), workers.role("learn", Summer)
            lost, kept = gen.workers
            assert lost.node != kept.node
            assert sorted(worker.node for worker in learn.workers) == sorted([lost.node, kept.node])
            shards = [Request(ids=ids(range(2))), Request(ids=ids(range(2, 4)))]
            small = (await gen.call_sharded(Counter.generate, shards)).rows
            large = (await gen.call_sharded(Maker.make_large, shards)).rows
            assert small is not None
            assert large is not None

            naps = asyncio.create_task(gen.call_all(Counter.wait_for, str(folder / "never")))
            sums = asyncio.create_task(learn.call_all(Summer.sum_without, learn.workers.index(_on(learn, lost.node))))
            await both_busy(workers)
            began = time.monotonic()
            await asyncio.to_thread(nodes.remove_node, by_name[lost.node], False)
            died = await next_death(workers, within_s=30)
            measured["noticed_s"] = round(time.monotonic() - began, 2)
            assert died.worker.node == lost.node
            for call, pool in ((naps, "gen"), (sums, "learn")):
                text = await failed(call, WorkerDiedError)
                assert lost.node in text
                assert f"`workers.recover('{pool}')`" in text
            measured["calls_failed_s"] = round(time.monotonic() - began, 2)

            (new,) = await workers.recover("gen", deadline_s=60)
            measured["one_recovered_s"] = round(time.monotonic() - began, 2)
            assert (new.index, new.node) == (lost.index, kept.node)
            assert new.incarnation > 0
            assert gen.workers == (new, kept)  # who lived goes on
            rebuilt = await workers.recover("learn", deadline_s=60)
            measured["both_recovered_s"] = round(time.monotonic() - began, 2)
            assert {worker.node for worker in rebuilt} == {kept.node}
            assert min(worker.incarnation for worker in rebuilt) > 0
            answers = await learn.call_all(Summer.all_sum, 1.0)
            assert [answer.value for answer in answers] == [3.0, 3.0]

            # Small rows came to the controller with the answer. Large ones lay on the node of their worker.
            assert small.read().ids.same_as(ids(range(4)))
            alive = large.select(shards[1].ids).read()
            assert alive.values_N.shape == (4, 50_000)
            with seconds(measured, "loss_reported_s"):
                text = failed_now(lambda: large.select(shards[0].ids).read(), StoreError)
            assert "lost" in text
            # So does a call say that is given them.
            gone = Batch(block=large.select(shards[0].ids))  # type: ignore[arg-type]
            none = Batch(block=large.select(TrajectoryIds.of([])))  # type: ignore[arg-type]
            (folder / "never").touch()  # the survivor finishes the call that nobody waits for any more
            text = await failed(asyncio.create_task(gen.call_sharded(Maker.add_up, [gone, none])), StoreError)
            assert "lost" in text
    return measured


def _on(group: Any, node: str) -> Any:
    return next(worker for worker in group.workers if worker.node == node)


async def both_busy(workers: Workers) -> None:
    """Until the heartbeats of all workers say that they are in a call."""
    async with asyncio.timeout(30):
        while not all(each.doing for pool in workers.health().values() for each in pool):
            await asyncio.sleep(0.05)


async def failed(call: asyncio.Task[Any], kind: type[Exception]) -> str:
    try:
        await asyncio.wait_for(call, 30)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} came")


def failed_now(call: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} came")


async def joining(folder: Path) -> dict[str, float]:
    """The only node with room dies: the pool waits, is placed on one that joins, and says so when none does."""
    measured: dict[str, float] = {}
    with nodes_of(0, 1, settings=ATTENTIVE) as nodes:
        async with open_ray(RayCluster(address=nodes.address)) as cluster:
            workers = await cluster.start(layout(loose("gen", 1)), Timeouts(place_s=15), deadline_s=30)
            before = workers.role("gen", Counter).workers[0]
            await lose(nodes, workers)
            recovering = asyncio.create_task(workers.recover("gen", deadline_s=40))
            await asyncio.sleep(0)
            with seconds(measured, "placed_after_joining_s"):
                joined = add_node(nodes, 1)  # here, because Ray sets signal handlers
                assert not recovering.done()
                (new,) = await recovering
            assert new.node == name_of(joined)
            assert new.incarnation > before.incarnation
            (answer,) = await workers.role("gen", Counter).call_all(Counter.add, 4)
            assert (answer.worker, answer.value) == (new, 4)

            await lose(nodes, workers)
            with seconds(measured, "gave_up_s"):
                text = await failed(asyncio.create_task(workers.recover("gen", deadline_s=3)), PlacementError)
            assert measured["gave_up_s"] < 6
            first, *_, nearest, waited = text.splitlines()
            assert re.search(r"\bgen\b.* 1 × 1 .* 1 CPU", first)
            assert "CPU" in nearest
            assert "3 s" in waited
    return measured


async def lose(nodes: ray.cluster_utils.Cluster, workers: Workers) -> None:
    """The one node that is not the head is gone, and Ray knows."""
    (node,) = nodes.worker_nodes
    await asyncio.to_thread(nodes.remove_node, node, False)
    await next_death(workers, within_s=30)
    async with asyncio.timeout(30):
        while any(each["NodeID"] == node.node_id and each["Alive"] for each in ray.nodes()):
            await asyncio.sleep(0.05)


async def wrong_address(folder: Path) -> dict[str, float]:
    """Nothing listens there, or nothing that is Ray; or the last cluster of this machine is long gone."""
    measured: dict[str, float] = {}
    with seconds(measured, "nobody_there_s"):
        text = await no_cluster("127.0.0.1:1")
    assert "127.0.0.1:1 " in text
    assert "`ray start --head`" in text
    assert "RAY_ADDRESS" in text
    text = await no_cluster("ray://127.0.0.1:10001")
    assert "`ray job submit --address ray://127.0.0.1:10001" in text
    os.environ["RAY_ADDRESS"] = "127.0.0.1:2"
    assert "127.0.0.1:2 " in await no_cluster(None)
    assert max(measured.values()) < 3
    return measured


async def not_ray(folder: Path) -> dict[str, float]:
    """Something listens there and never says a word that Ray would."""
    measured: dict[str, float] = {}
    async with await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with seconds(measured, "not_ray_s"):
            text = await no_cluster(f"{host}:{port}")
    assert f"{host}:{port}" in text
    assert measured["not_ray_s"] < 15
    return measured


async def no_cluster(address: str | None) -> str:
    try:
        async with open_ray(RayCluster(address=address, deadline_s=5)):
            pass
    except ClusterError as error:
        return str(error)
    raise AssertionError(f"{address} was joined")


async def local(folder: Path) -> dict[str, float]:
    """A local Ray on demand, though another cluster was the last to be started on this machine. Works until it is
    killed."""
    note = folder / "ray" / "ray_current_cluster"
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text("127.0.0.1:1")
    async with open_ray(RayCluster(cpus=2, object_store_bytes=STORE_BYTES)) as cluster:
        assert cluster.total("CPU") == 2
        workers = await cluster.start(layout(Pool(name="learn", slots=2), kind=Summer, shard=2), deadline_s=60)
        group = workers.role("learn", Summer)
        answers = await group.call_all(Summer.all_sum, 1.0)
        assert [answer.value for answer in answers] == [3.0, 3.0]
        pids = [answer.value[0] for answer in await group.call_all(Counter.thread)]
        print(json.dumps({"workers": pids, "outside": sorted(outside_listeners_of(os.getpid()))}), flush=True)
        await group.call_all(Counter.wait_for, str(folder / "never"))
    raise AssertionError("nobody killed this")


def run_of(folder: Path, name: str, **placement: Any) -> dict[str, Any]:
    """A run of eight steps whose only checkpoint is the last one."""
    from golden.runs import recipe

    values = recipe("grpo")
    return values | {
        "steps": 8, "checkpoint": {"every": 8, "background": False}, "placement": {**values["placement"], **placement},
        "run": {"name": name, "folder": str(folder / "runs")},
    }  # fmt: skip


def held_reward(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A file, and the part of a recipe whose reward waits while that file exists."""
    hold = folder / "hold"
    (folder / "held.py").write_text(
        "import pathlib, time\n\n\ndef digits(answer, **_):\n"
        f"    while pathlib.Path({str(hold)!r}).exists():\n        time.sleep(0.05)\n"
        "    return sum(character.isdigit() for character in answer) / 10\n"
    )
    return hold, {"reward": [{"function": "held.py:digits"}], "grading": {"workers": 1, "timeout_s": 120.0}}


def started_workers() -> list[Workers]:
    """Workers that have started since, as they start."""
    started: list[Workers] = []
    start = Workers.start

    async def noted(workers: Workers) -> None:
        await start(workers)
        started.append(workers)

    Workers.start = noted  # type: ignore[method-assign]
    return started


def membership(folder: Path) -> dict[str, float]:
    """A node joins a running job, and is drained later: a generator joins and leaves, and the run ends with the weights
    of one in a single process."""
    from golden.runs import fingerprint, make_task, train
    from podium.runs.events import membership_changes, recoveries

    make_task(folder)
    hold, held = held_reward(folder)
    expected = fingerprint(train(run_of(folder, "alone", launcher="inline") | held, folder), step=8)
    measured: dict[str, float] = {}
    with nodes_of(2, settings=ATTENTIVE, shutdown_at_exit=False) as nodes:
        os.environ["RAY_ADDRESS"] = nodes.address
        split = {"layout": "split", "devices": 2, "rollout_devices": 1, "max_rollout_devices": 2}
        changing = _InThread(lambda: _join_and_drain(nodes, folder / "runs" / "split", hold, measured))
        run = train(run_of(folder, "split", launcher="ray", **split) | held, folder)
        changing.join()
    assert fingerprint(run, step=8)["weights"] == expected["weights"]
    changes = [(each.change, each.generator.partition("@")[0], each.generators) for each in membership_changes(run)]
    assert changes == [("joined", "rollout[1]", 2), ("left", "rollout[1]", 1)], changes
    assert list(recoveries(run)) == []
    return measured


def lost_node(folder: Path) -> dict[str, float]:
    """One of two nodes with a learner each is lost."""
    return _without_a_learners_node(folder, lose_node)


def stopped_node(folder: Path) -> dict[str, float]:
    """One of two nodes with a learner each is stopped."""
    return _without_a_learners_node(folder, stop_node)


def _without_a_learners_node(folder: Path, lose: Lose) -> dict[str, float]:
    """Of two nodes with a learner each, one goes with its memory, and another joins: the learner there gets its
    shard from the copy, and the run ends with the weights of one that nobody disturbed."""
    from golden.runs import fingerprint, make_task, train
    from podium.runs.events import recoveries

    make_task(folder)

    measured: dict[str, float] = {}
    with nodes_of(1, settings=ATTENTIVE, shutdown_at_exit=False) as nodes:
        os.environ["RAY_ADDRESS"] = nodes.address
        second = add_node(nodes, 1)
        two = {"launcher": "ray", "layout": "colocated", "devices": 2}
        expected = fingerprint(train(run_of(folder, "undisturbed", **two), folder), step=8)
        losing = _InThread(lambda: _replace(nodes, second, folder / "runs" / "disturbed", lose))
        run = train(run_of(folder, "disturbed", **two), folder)
        losing.join()
    assert fingerprint(run, step=8)["weights"] == expected["weights"]
    (recovery,) = (each for each in recoveries(run) if each.part != "grader")  # which may have been there too
    assert (recovery.part, recovery.remedy) == ("learner", "rebuild")
    assert recovery.step >= 1, recovery  # there is no checkpoint before the last step: this was in memory
    measured["recovery_s"] = round(recovery.seconds, 2)
    return measured


def lost_generator(folder: Path) -> dict[str, float]:
    """A node with a generator is lost."""
    return _without_a_generators_node(folder, lose_node)


def stopped_generator(folder: Path) -> dict[str, float]:
    """A node with a generator is stopped."""
    return _without_a_generators_node(folder, stop_node)


def _without_a_generators_node(folder: Path, lose: Lose) -> dict[str, float]:
    """Of three nodes with a worker each, one with a generator goes: the run goes on with the other generator, and
    ends with the weights of one in a single process."""
    from golden.runs import fingerprint, make_task, train
    from podium.runs.events import recoveries

    make_task(folder)

    expected = fingerprint(train(run_of(folder, "alone", launcher="inline"), folder), step=8)
    with nodes_of(1, settings=ATTENTIVE, shutdown_at_exit=False) as nodes:
        os.environ["RAY_ADDRESS"] = nodes.address
        others, started = [add_node(nodes, 1) for _ in range(2)], started_workers()

        def after_two_steps() -> None:
            wait_until(lambda: bool(started), "the workers", deadline_s=120)
            learner = started[0].worker_pool("train").members[0].worker.node
            lost = next(each for each in others if name_of(each) != learner)
            wait_until(lambda: _num_steps(folder / "runs" / "split") >= 2, "two steps", deadline_s=120)
            lose(nodes, lost)

        losing = _InThread(after_two_steps)
        split = {"layout": "split", "devices": 3, "rollout_devices": 2}
        run = train(run_of(folder, "split", launcher="ray", **split), folder)
        losing.join()
    assert fingerprint(run, step=8)["weights"] == expected["weights"]
    found = list(recoveries(run))  # one for its death, and one more if the run went back because of it
    assert {each.part for each in found} - {"grader"} == {"generator"}, found  # a grader may have been there too
    return {"step": found[0].step}


def lose_node(nodes: ray.cluster_utils.Cluster, node: Any) -> None:
    """Kills all processes of a node at once."""
    nodes.remove_node(node, allow_graceful=False)


def stop_node(nodes: ray.cluster_utils.Cluster, node: Any) -> None:
    """Runs `ray stop` of a machine that has this node only: it sees no other node's processes."""
    (raylet,) = node.all_processes["raylet"]
    seen = scripts.psutil.Process(raylet.process.pid)
    of_node = [seen, *seen.children(recursive=True)]
    with mock.patch.object(scripts.psutil, "process_iter", return_value=of_node):
        scripts.stop.callback(force=False, grace_period=16)
    left = [each.pid for each in of_node if each.is_running() and each.status() != scripts.psutil.STATUS_ZOMBIE]
    assert left == [], left
    nodes.remove_node(node)


def _replace(nodes: ray.cluster_utils.Cluster, node: Any, run: Path, lose: Lose) -> None:
    """Loses a node after two steps, with the snapshots in its memory, and adds another."""
    from podium.runs.host_memory import launch_folder

    wait_until(lambda: _num_steps(run) >= 2, "two steps", deadline_s=120)
    lose(nodes, node)
    memory = launch_folder(run)
    assert memory is not None
    (lost,) = memory.glob(f"policy/*{node.node_id[:6]}")
    assert len(list(lost.glob("step-*/rank-*.json"))) >= 2, "its shard, and a copy of the other one"
    shutil.rmtree(lost)
    add_node(nodes, 1)


def joined_attach(folder: Path) -> dict[str, float]:
    """The controller of a run on two nodes of a cluster of others is killed: the next one attaches to the workers, and
    nothing of the run is left in the cluster at its end. What nobody keeps alive is ended as well."""
    from golden.runs import fingerprint, make_task, train
    from podium.runs.events import recoveries

    make_task(folder)
    hold, held = held_reward(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(run_of(folder, "joined", launcher="ray", devices=2) | held))
    run, measured = folder / "runs" / "joined", dict[str, float]()
    with nodes_of(1, settings=ATTENTIVE, shutdown_at_exit=False) as nodes:
        add_node(nodes, 1)
        os.environ["RAY_ADDRESS"] = nodes.address
        expected = fingerprint(train(run_of(folder, "undisturbed", launcher="ray", devices=2) | held, folder), step=8)
        ray.init(address=nodes.address, namespace="podium-test", logging_level="ERROR")
        command = [sys.executable, "-m", "podium", "train", "recipe.yaml"]
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL)
        try:
            wait_until(lambda: _num_steps(run) >= 2, "two steps", deadline_s=120)
            before = _worker_pids()
            # While it waits for a reward: a call that has reached one of two learners only would end both.
            hold.touch()
            wait_until(partial(_has_no_step_for, run, 5.0), "the wait for a reward", deadline_s=120)
            (controller,) = [pid for pid in children(process.pid) if command_of(pid) == command_of(process.pid)]
            os.kill(controller, signal.SIGKILL)
            steps = _num_steps(run)
            hold.unlink()
            wait_until(lambda: _num_steps(run) >= steps + 2, "steps of the next controller", deadline_s=120)
            assert _worker_pids() == before != set()
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait(20)
        (recovery,) = recoveries(run)
        assert (recovery.part, recovery.remedy) == ("controller", "attach"), recovery
        measured["attach_s"] = round(recovery.seconds, 2)
        assert fingerprint(run, step=8)["weights"] == expected["weights"]
        wait_until(lambda: not _left_in_cluster(), f"the end of {_left_in_cluster()}", deadline_s=20)
        with seconds(measured, "abandoned_s"):
            _abandon("podium-test", timeout_s=3.0)
            assert len(_left_in_cluster()) == 3
            wait_until(lambda: not _left_in_cluster(), f"the end of {_left_in_cluster()}", deadline_s=30)
    return measured


def _num_steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.is_file() else 0


def _has_no_step_for(run: Path, seconds: float) -> bool:
    return time.time() - (run / "metrics.jsonl").stat().st_mtime > seconds


def _worker_pids() -> set[int]:
    return {at.pid for name, at in actor_processes().items() if name.startswith("train[")}


def _left_in_cluster() -> list[str]:
    """Actors and placement groups of Podium."""
    found = ray.util.list_named_actors(all_namespaces=True)
    actors = [each["name"] for each in found if each["namespace"].startswith("podium")]
    groups = [each["name"] for each in placement_group_table().values() if each["state"] != "REMOVED"]
    return actors + groups


def _abandon(namespace: str, timeout_s: float) -> None:
    """Leaves an actor and a placement group behind that nobody keeps alive."""
    KeepAlive(namespace, timeout_s)._ended.set()
    group = placement_group([{"CPU": 1}], name=f"{namespace} train[0] 7", lifetime="detached")
    assert group.wait(20)
    options = {"name": "train[0]#0 7", "namespace": namespace, "lifetime": "detached", "num_cpus": 0}
    actor = ray.remote(Counter).options(**options).remote(None)
    ray.get(actor.value.remote(), timeout=20)


def _join_and_drain(nodes: ray.cluster_utils.Cluster, run: Path, hold: Path, measured: dict[str, float]) -> None:
    """Holds the rewards of a step until what it waits for is on its way."""
    started = started_workers()
    wait_until(lambda: _num_steps(run) >= 1, "the first step", deadline_s=120)
    pool = started[0].worker_pool("rollout")
    hold.touch()
    with seconds(measured, "ready_after_joining_s"):
        node = add_node(nodes, 1)
        wait_until(lambda: pool.ready == (1,), "a generator on the new node", deadline_s=120)
    hold.unlink()
    wait_until(lambda: not pool.vacant, "its admission", deadline_s=60)
    now = _num_steps(run)
    wait_until(lambda: _num_steps(run) > now, "a step with two generators", deadline_s=60)
    hold.touch()
    with seconds(measured, "noticed_s"):
        client = ray._raylet.GcsClient(address=nodes.address)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + 60) * 1000)
        assert client.drain_node(node.node_id, reason, "it is taken back", deadline_ms)[0]
        wait_until(lambda: 1 in pool.vacant or pool.members[1].leaving is not None, "the notice", deadline_s=30)
    hold.unlink()
    wait_until(lambda: 1 in pool.vacant, "its end", deadline_s=60)


class _InThread:
    """A call beside the main thread, which has the run. `join` raises what it raised."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        self._thread.join(60)
        if self._error is not None:
            raise self._error


SCENARIOS: dict[str, Callable[[Path], Awaitable[dict[str, float]]]] = {
    scenario.__name__: scenario for scenario in (placing, death, joining, wrong_address, not_ray, local)
}


WHOLE_RUNS: dict[str, Callable[[Path], dict[str, float]]] = {
    scenario.__name__: scenario
    for scenario in (membership, lost_node, stopped_node, lost_generator, stopped_generator, joined_attach)
}


if __name__ == "__main__":
    if sys.argv[1] in WHOLE_RUNS:
        measured = WHOLE_RUNS[sys.argv[1]](Path(sys.argv[2]))
    else:
        measured = asyncio.run(SCENARIOS[sys.argv[1]](Path(sys.argv[2])))  # type: ignore[arg-type]
    print(json.dumps(measured), flush=True)
