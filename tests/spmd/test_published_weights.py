# SPDX-License-Identifier: Apache-2.0
"""Two and three ranks over gloo: a sharded model publishes what one device does, and its whole copy follows it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from helpers.engines import LENGTHS, make_engine, num_trained, one_rank, random_documents
from helpers.ranks import RankCall, mesh_of
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.cluster.objects import InlineStored
from podium.data.documents import pack
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.engine.mesh import Mesh
from podium.engine.scoring import score
from podium.engine.train_step import TrainEngine
from podium.models.causal_lm import load_config
from podium.models.packing import to_device
from podium.recipe import ModelSection
from podium.spmd.launch import RankPlace, launch
from podium.weights.published import PublishedWeights
from podium.weights.receiving import Verified, verify_in_place
from podium.weights.transports import received, send_by_broadcast, send_by_store
from podium.weights.versions import WeightVersion
from podium.weights.weight_transfers import ByBroadcast, ByStore
from podium.weights.whole_copy import WholeCopy

MODELS = ("qwen3", "glm4_moe")
CPU = torch.device("cpu")


class GroupLink:
    """The default process group as a link."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        dist.broadcast(tensor, src=source)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """What rank 0 saw of one model."""

    before: WeightVersion
    in_bfloat16: WeightVersion
    after: WeightVersion
    largest: tuple[int, int]  # bytes of the largest tensor that was gathered, and of all
    loss_after: float
    copy_scores: Tensor
    copy_places_kept: bool
    stored: int  # buckets that the object store would have
    logprobs: NDArray[np.float32]  # of trajectories that rank 0 alone has


def publishing_rank(place: RankPlace, folders: tuple[Path, ...]) -> list[Seen]:
    with mesh_of(place) as mesh:
        return [seen(folder, mesh) for folder in folders]


def seen(folder: Path, mesh: Mesh) -> Seen:
    engine = make_engine(folder, mesh)
    scored = score(engine.model, mesh, trajectories(9 if mesh.is_main else 0), temperature=0.8, max_tokens=32)
    weights = PublishedWeights(engine.model, engine.optimizer.trained, mesh, torch.float32, bucket_bytes=20_000)
    in_bfloat16 = PublishedWeights(engine.model, engine.optimizer.trained, mesh, torch.bfloat16).describe(1)
    before = weights.describe(1)
    sizes = [tensor.nbytes for _, tensor in weights.tensors()]
    copy = WholeCopy(
        weights, ModelSection(path=str(folder)), load_config(folder, trust_remote_code=False),
        device=CPU, dtype=torch.float32,
    )  # fmt: skip
    copy.refill()
    verify_in_place(copy.tensors, before)
    places = [tensor.data_ptr() for tensor in copy.tensors.values()]
    loss = train(engine)
    after = weights.describe(2)
    copy.refill()  # a forward and a backward pass of the sharded model lie between
    verify_in_place(copy.tensors, after)
    transfer = ByBroadcast(version=after, link="all", source=0, bucket_bytes=9_000)
    if mesh.world == 2:
        listen_or_send(transfer, weights, mesh)
    by_store = ByStore(version=after, bucket_bytes=9_000)
    stored = [InlineStored(bucket) for bucket in send_by_store(by_store, weights, is_sender=mesh.is_main)]
    if mesh.is_main:
        verify(replace(by_store, stored=tuple(stored)))
    return Seen(
        before=before, in_bfloat16=in_bfloat16, after=after, largest=(max(sizes), sum(sizes)), loss_after=loss,
        copy_scores=scores(copy.model), stored=len(stored), logprobs=scored.values_T,
        copy_places_kept=places == [tensor.data_ptr() for tensor in copy.tensors.values()],
    )  # fmt: skip


def listen_or_send(transfer: ByBroadcast, weights: PublishedWeights, mesh: Mesh) -> None:
    """Rank 0 sends and rank 1, though it helps to gather, only listens; then rank 1's place is a receiver's."""
    moved = send_by_broadcast(transfer, weights, GroupLink(), mesh.device)
    total = sum(bucket.nbytes for bucket in transfer.buckets)
    assert moved == (total if mesh.is_main else 0)
    gathered = {name: tensor.clone() for name, tensor in weights.tensors()}
    if mesh.is_main:
        assert send_by_broadcast(transfer, _Held(gathered), GroupLink(), mesh.device) == total
    else:
        arrival = received(transfer, device=mesh.device, link=lambda _: GroupLink())
        assert arrival is not None
        for name, tensor in Verified(arrival, transfer.version).tensors():
            assert torch.equal(tensor, gathered[name])
        assert arrival.moved_bytes == total


class _Held:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def tensors(self):  # type: ignore[no-untyped-def]
        return iter(self._tensors.items())


def train(engine: TrainEngine) -> float:
    documents = random_documents(LENGTHS)
    mine = documents[engine.mesh.rank :: engine.mesh.world]
    report = engine.train_step([pack(mine)], token_cross_entropy, normalizer=num_trained(documents), lr=1e-2)
    return report.resolve().loss


def scores(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(to_device(pack(random_documents(LENGTHS)), CPU), None, "scores")
    return found


def trajectories(count: int) -> TrajectoryBlock:
    """Of 3 prompt tokens and 1, 2, 3... sampled ones."""
    lengths = np.arange(4, 4 + count)
    versions = [np.r_[np.full(3, -1), np.zeros(length - 3)] for length in lengths]
    versions_T = np.concatenate([np.empty(0), *versions]).astype(np.int32)
    return TrajectoryBlock(
        ids=TrajectoryIds.of(TrajectoryId(draw, 0) for draw in range(count)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens_T=np.random.default_rng(0).integers(0, 250, len(versions_T)).astype(np.int32),
        loss_mask_T=versions_T >= 0,
        behavior_logprobs_T=np.zeros(len(versions_T), np.float32),
        versions_T=versions_T,
    )


def make_folder(folder: Path) -> None:
    for name in MODELS:
        save_tiny_model(name, folder / name, intermediate_size=50)


def on_two_ranks(folder: Path) -> RankCall:
    return publishing_rank, (tuple(folder / name for name in MODELS),)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def by_ranks(request: pytest.FixtureRequest, folder: Path) -> dict[str, Seen]:
    """Three ranks do not divide most rows, and some hold none of a small tensor."""
    if request.param == 2:
        results: list[Seen] = request.getfixturevalue("two_ranks")
    else:
        function, arguments = on_two_ranks(folder)
        results = launch(function, arguments, ranks=request.param, restarts=0, stop_file=folder / "stop")
    return {name: _seen(results, name) for name in MODELS}


def _seen(results: list[Seen], name: str) -> Seen:
    return results[MODELS.index(name)]


def verify(transfer: ByStore) -> None:
    arrival = received(transfer, device=CPU, link=lambda _: GroupLink())
    assert arrival is not None
    assert sum(1 for _ in Verified(arrival, transfer.version).tensors()) == len(transfer.version.manifest)


@pytest.mark.parametrize("name", MODELS)
def test_any_sharding_publishes_the_version_of_one_device(folder: Path, by_ranks: dict[str, Seen], name: str) -> None:
    engine = make_engine(folder / name)
    for dtype, found in ((torch.float32, by_ranks[name].before), (torch.bfloat16, by_ranks[name].in_bfloat16)):
        alone = PublishedWeights(engine.model, engine.optimizer.trained, one_rank(), dtype).describe(1)
        assert found == alone
    assert by_ranks[name].after.fingerprint != by_ranks[name].before.fingerprint


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_copy_computes_what_one_device_does_after_the_same_step(
    folder: Path, by_ranks: dict[str, Seen], name: str
) -> None:
    engine = make_engine(folder / name)
    assert by_ranks[name].loss_after == pytest.approx(train(engine), rel=1e-5)
    engine.model.eval()
    assert torch.allclose(by_ranks[name].copy_scores, scores(engine.model), atol=1e-4)
    assert by_ranks[name].copy_places_kept


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_scores_its_trajectories_while_another_has_none(
    folder: Path, by_ranks: dict[str, Seen], name: str
) -> None:
    engine = make_engine(folder / name)
    alone = score(engine.model, one_rank(), trajectories(9), temperature=0.8)
    np.testing.assert_allclose(by_ranks[name].logprobs, alone.values_T, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_only_buckets_are_gathered_and_stored(by_ranks: dict[str, Seen], name: str) -> None:
    largest, everything = by_ranks[name].largest
    assert largest < everything / 2
    assert everything == by_ranks[name].before.nbytes
    assert by_ranks[name].stored > 5
