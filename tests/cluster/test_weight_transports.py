# SPDX-License-Identifier: Apache-2.0
"""Weights go from a policy to its generator by every transport; the controller handles weight transfers only."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from helpers.clusters import Opener, in_cluster
from helpers.engines import make_engine
from helpers.tiny import save_tiny_model
from podium.cluster import Cluster, Computed, Layout, MeshShape, Pool, RoleGroup, RoleSpec, WorkerContext, Workers
from podium.data.trajectories import TrajectoryIds
from podium.engine.mesh import adopt
from podium.errors import RoleError
from podium.weights.published import PublishedWeights
from podium.weights.receiving import Verified, verify_in_place
from podium.weights.transports import received, send_by_broadcast, send_by_store
from podium.weights.versions import WeightVersion
from podium.weights.weight_transfers import ByBroadcast, ByStore, Readable, WeightBucket, WeightTransfer

BUCKET = 20_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Buckets:
    """Which buckets one data rank is asked for: all of the sender, none of the ranks that only help to gather."""

    transfer: ByStore
    ids: TrajectoryIds


class Policy:
    """Has a sharded model, and changes it when told to."""

    def __init__(self, context: WorkerContext, folder: str) -> None:
        torch.set_num_threads(1)
        mesh = adopt(rank=context.rank, world=context.world, device=context.device, devices=context.devices)
        engine = make_engine(Path(folder), mesh)
        self._context, self._trained = context, engine.optimizer.trained
        self._weights = PublishedWeights(engine.model, self._trained, mesh, torch.float32, bucket_bytes=BUCKET)

    def scale(self, factor: float) -> None:
        for each in self._trained:
            each.master.mul_(factor)

    def describe(self, number: int) -> WeightVersion:
        return self._weights.describe(number)

    def broadcast(self, transfer: ByBroadcast) -> int:
        return send_by_broadcast(transfer, self._weights, self._context.transfer(transfer.link), torch.device("cpu"))

    def stream(self, wanted: Buckets) -> Iterator[Computed[WeightBucket]]:
        for bucket in send_by_store(wanted.transfer, self._weights, is_sender=len(wanted.ids) > 0):
            yield Computed(rows=bucket)


class Generator:
    """Takes weights into a whole model of its own."""

    def __init__(self, context: WorkerContext, folder: str) -> None:
        torch.set_num_threads(1)
        self._context = context
        engine = make_engine(Path(folder))
        self._own = {each.name: each.parameter.detach() for each in engine.optimizer.trained}

    def install(self, transfer: WeightTransfer) -> int:
        """Bytes that came; the version is proven twice, as it passes and in place."""
        arrival = received(transfer, device=torch.device("cpu"), link=self._context.transfer)
        assert arrival is not None
        for name, tensor in Verified(arrival, transfer.version).tensors():
            self._own[name][: len(tensor)].copy_(tensor)
        verify_in_place(self._own, transfer.version)
        return arrival.moved_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("weights") / "qwen3")


def layout(folder: Path, ranks: int) -> Layout:
    return Layout(
        pools=(
            Pool(name="train", slots=ranks, collectives=ranks > 1),
            Pool(name="gen", slots=1, collectives=False),
        ),
        roles=(
            RoleSpec(name="policy", kind=Policy, pool="train", mesh=MeshShape(shard=ranks), arguments=(str(folder),)),
            RoleSpec(name="generator", kind=Generator, pool="gen", arguments=(str(folder),)),
        ),
    )


async def described(policy: RoleGroup[Policy], number: int) -> WeightVersion:
    """The next version, of weights that have changed; all ranks say the same."""
    await policy.call_all(Policy.scale, 1.5)
    versions = [answer.value for answer in await policy.call_all(Policy.describe, number)]
    assert all(version == versions[0] for version in versions)
    return versions[0]


async def stored(policy: RoleGroup[Policy], transfer: ByStore) -> ByStore:
    """The transfer with a reference to each bucket: this process sees no byte of them."""
    empty = TrajectoryIds.of(())
    ranks = len(policy.workers)
    shards = [Buckets(transfer=transfer, ids=transfer.ids if rank == 0 else empty) for rank in range(ranks)]
    references: dict[int, Readable] = {}
    async for block in policy.stream_sharded(Policy.stream, shards):
        assert block.stored is not None
        references[block.ids[0].prompt_index] = block.stored
    return replace(transfer, stored=tuple(references[number] for number in range(len(transfer.buckets))))


@pytest.mark.slow
def test_the_store_carries_weights_on_any_cluster(open_cluster: Opener, folder: Path) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        policy, generator = workers.role("policy", Policy), workers.role("generator", Generator)
        version = await described(policy, 1)
        transfer = await stored(policy, ByStore(version=version, bucket_bytes=BUCKET))
        assert len(transfer.stored) > 3
        moved = (await generator.call_all(Generator.install, transfer))[0].value
        assert moved == sum(bucket.nbytes for bucket in transfer.buckets)

        # The buckets of the version before do not pass for the next one.
        stale = replace(transfer, version=await described(policy, 2))
        with pytest.raises(RoleError, match=r"WeightMismatchError: \d+ .*version 2\b"):
            await generator.call_all(Generator.install, stale)

    in_cluster(open_cluster, layout(folder, 1), body)


@pytest.mark.slow
def test_a_sharded_policy_sends_over_a_link_and_through_the_store(open_on_ray: Opener, folder: Path) -> None:
    async def body(cluster: Cluster, workers: Workers) -> None:
        policy, generator = workers.role("policy", Policy), workers.role("generator", Generator)
        await workers.connect("weights", ("policy", "generator"), deadline_s=30)
        for number in (1, 2):
            version = await described(policy, number)
            transfer = ByBroadcast(version=version, link="weights", source=0, bucket_bytes=BUCKET)
            assert len(pickle.dumps(transfer)) < 100 * len(version.manifest) + 1000 < version.nbytes / 10
            sent, came = await asyncio.gather(
                policy.within(30).call_all(Policy.broadcast, transfer),
                generator.within(30).call_all(Generator.install, transfer),
            )
            total = sum(bucket.nbytes for bucket in transfer.buckets)
            assert [answer.value for answer in (*sent, *came)] == [total, 0, total]
        parcel_by_store = await stored(policy, ByStore(version=await described(policy, 3), bucket_bytes=BUCKET))
        assert (await generator.call_all(Generator.install, parcel_by_store))[0].value >= version.nbytes

    in_cluster(open_on_ray, layout(folder, 2), body, limit_s=240)
