# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of real process groups. Here, because a spawned process imports it by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from helpers.engines import LENGTHS, make_engine, num_trained, random_documents
from helpers.processes import outside_listeners_of
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, PackedBatch, pack
from podium.engine.addresses import FileMeeting
from podium.engine.checkpoint import CheckpointWriter, newest_usable
from podium.engine.checkpoint_files import Extras
from podium.engine.mesh import Mesh, join, leave
from podium.engine.parameters import TrainedParameter
from podium.engine.resuming import checkpoint_shards, restore_optimizer
from podium.engine.train_step import TrainEngine
from podium.errors import DataError
from podium.models.verify import self_check
from podium.recipe import OptimizerSection, PlacementSection
from podium.spmd.launch import RankPlace

OPTIMIZER = OptimizerSection(lr=1e-2, weight_decay=0.1, clip_norm=0.5)
# A function of a rank's place, and its other arguments.
RankCall = tuple[Callable[..., Any], tuple[Any, ...]]
EMPTY = Extras(values={"updates": 2}, arrays={})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """Models to take gradients of; checkpoints to read and to write (the last model's)."""

    models: tuple[Path, ...]
    load: Path | None
    save: Path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupResult:
    """Whole tensors, put together from all ranks."""

    gradients: tuple[Tensor, ...]  # one per model, documents dealt over the ranks
    lopsided: tuple[Tensor, ...]  # all documents on rank 0, none on the others
    largest_gaps: tuple[float, ...]  # against plain transformers
    losses: tuple[float, ...]  # of two training steps, before saving
    loaded: dict[str, Tensor]
    saved: dict[str, Tensor]


@contextmanager
def mesh_of(place: RankPlace, timeout_s: float = 120) -> Iterator[Mesh]:
    """The mesh of this rank over gloo. Ranks meet over a file: tests that run at the same time share no port."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    mesh = join(
        PlacementSection(device="cpu", timeout_s=timeout_s),
        rank=place.rank,
        world=place.world,
        local_rank=0,
        meeting=place.meeting,
    )
    try:
        yield mesh
    finally:
        leave(mesh)
        _clear_sharding_prop_cache()  # else parameters of an equal mesh get this one, whose groups are gone


def ranks_in_turn(place: RankPlace, calls: Sequence[RankCall]) -> list[Any]:
    """Calls `function(place, *arguments)` for each pair; each call has its own process group."""
    assert isinstance(place.meeting, FileMeeting)
    results = []
    for index, (function, arguments) in enumerate(calls):
        meeting = FileMeeting(path=place.meeting.path.with_name(f"{place.meeting.path.name}-{index}"))
        results.append(function(replace(place, meeting=meeting), *arguments))
    return results


def group_rank(place: RankPlace, task: GroupTask) -> GroupResult:
    """All work of one group of ranks, in one start of processes."""
    with mesh_of(place) as mesh:
        gradients, lopsided, gaps = [], [], []
        for model in task.models:
            engine = make_engine(model, mesh, optimizer=OPTIMIZER)
            gaps.append(self_check(engine.model, mesh.device, torch.float32).largest)
            gradients.append(whole_gradient(engine, dealt(random_documents(LENGTHS), mesh)))
            lopsided.append(whole_gradient(engine, all_on_rank_0(random_documents(LENGTHS), mesh)))
        losses = two_steps(engine) if task.load is None else ()
        loaded: dict[str, Tensor] = {}
        if task.load is not None:
            reader = newest_usable(task.load)
            engine = make_engine(task.models[-1], mesh, optimizer=OPTIMIZER, checkpoint=reader)
            restore_optimizer(engine, reader)
            loaded = whole_state(engine)
        writer = CheckpointWriter(task.save, mesh, keep=1, keep_best=False, background=True, timeout_s=60)
        writer.save(2, checkpoint_shards(engine), EMPTY, heldout_loss=None)
        writer.wait()
        mesh.barrier()
        return GroupResult(
            gradients=tuple(gradients), lopsided=tuple(lopsided), largest_gaps=tuple(gaps), losses=losses,
            loaded=loaded, saved=whole_state(engine),
        )  # fmt: skip


def dealt(documents: list[Document], mesh: Mesh) -> list[PackedBatch]:
    """Every n-th document of n ranks with different data, in two micro-batches of unequal size."""
    mine = documents[mesh.data_rank :: mesh.data_ranks]
    return [pack(mine[:1]), pack(mine[1:])]


def all_on_rank_0(documents: list[Document], mesh: Mesh) -> list[PackedBatch]:
    return [pack(documents if mesh.data_rank == 0 else [])]


def two_steps(engine: TrainEngine) -> tuple[float, ...]:
    losses = []
    for seed in (1, 2):
        documents = random_documents(LENGTHS, seed=seed)
        report = engine.train_step(
            dealt(documents, engine.mesh), token_cross_entropy, normalizer=num_trained(documents), lr=1e-2
        )
        losses.append(report.resolve().loss)
    return tuple(losses)


def whole_gradient(engine: TrainEngine, batches: list[PackedBatch]) -> Tensor:
    """The full gradient as one vector, in the order of the parameters, on every rank."""
    normalizer = float(num_trained(random_documents(LENGTHS)))
    _, gradients = engine.gradients(batches, token_cross_entropy, normalizer=normalizer)
    local = {each.name: gradients[id(each)] for each in engine.optimizer.trained}
    whole = assembled(engine, local)
    return torch.cat([whole[each.name].flatten() for each in engine.optimizer.trained])


def whole_state(engine: TrainEngine) -> dict[str, Tensor]:
    """Weights and moments by name of the checkpoint's pieces."""
    optimizer = engine.optimizer
    found: dict[str, Tensor] = {}
    for kind, tensors in (
        ("weight", [each.master for each in optimizer.trained]),
        ("first_moment", optimizer.first_moments),
        ("second_moment", optimizer.second_moments),
    ):
        local = {each.name: tensor for each, tensor in zip(optimizer.trained, tensors, strict=True)}
        found.update({f"{kind}/{name}": tensor for name, tensor in assembled(engine, local).items()})
    return found


def assembled(engine: TrainEngine, local: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each rank's part of every tensor, laid into the whole. Collective."""
    of_name: dict[str, TrainedParameter] = {each.name: each for each in engine.optimizer.trained}
    parts = engine.mesh.gather({name: (of_name[name].box, tensor.clone()) for name, tensor in local.items()})
    whole = {}
    for name in local:
        tensor = torch.full(of_name[name].shape, float("nan"))
        for part in parts:
            box, values = part[name]
            held = tensor[box.slices()]
            assert bool(held.isnan().all()) or torch.equal(held, values), f"{name} differs on ranks that hold the same"
            tensor[box.slices()] = values
        whole[name] = tensor
    return whole


def killed_rank(place: RankPlace) -> None:
    """Rank 1 is killed while the others wait for it."""
    dist.init_process_group("gloo")
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def raising_rank(place: RankPlace) -> None:
    """Rank 1 raises while the others wait for it, and they then fail because it is gone."""
    dist.init_process_group("gloo")
    if place.rank == 1:
        raise ValueError("this is rank 1's own mistake")
    dist.barrier()


def rank_with_bad_data(place: RankPlace) -> None:
    """A mistake of the user's, found on rank 1."""
    dist.init_process_group("gloo")
    if place.rank == 1:
        raise DataError("train.jsonl, line 7: this is not JSON")
    dist.barrier()


def answering_rank(place: RankPlace, factor: int) -> int:
    return factor * (place.rank + 10 * place.world)


def listening_rank(place: RankPlace) -> set[str]:
    """What of the launching process and its ranks listens beyond loopback while they have met."""
    mesh = join(
        PlacementSection(device="cpu"),
        rank=place.rank,
        world=place.world,
        local_rank=place.local_rank,
        meeting=place.meeting,
    )
    mesh.barrier()
    found = outside_listeners_of(os.getppid())
    mesh.barrier()
    leave(mesh)
    return found
