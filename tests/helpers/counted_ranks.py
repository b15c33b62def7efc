# SPDX-License-Identifier: Apache-2.0
"""Real ranks that count their collectives. Here, because a spawned process imports it by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from helpers.engines import make_engine
from helpers.ranks import OPTIMIZER, mesh_of
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import PackedBatch
from podium.data.routed_experts import RouterShape
from podium.dry_run.counting import CollectiveCounter
from podium.engine.mesh import with_axes
from podium.engine.train_step import TrainEngine
from podium.models.verify import random_batch
from podium.planning.collectives import Collective
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import RankPlace

LENGTH = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCount:
    """Of one step of one rank."""

    collectives: tuple[Collective, ...]
    held_bytes: int  # parameters
    moment_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A model and the mesh on which its collectives are counted."""

    model: str  # its folder's name
    sizes: MeshSizes
    balanced: bool = True  # whether all experts get as many tokens, by replaying such choices


def counting_rank(place: RankPlace, folder: Path, cases: tuple[Counted, ...]) -> list[RealCount]:
    """One step of two micro-batches on each mesh in turn. Of this rank, but for all-to-alls of unbalanced experts,
    whose bytes are the mean of all ranks."""
    with mesh_of(place) as ranks:
        found = []
        for case in cases:
            mesh = with_axes(ranks, case.sizes, timeout_s=120)
            engine = make_engine(folder / case.model, mesh, optimizer=OPTIMIZER)
            batches = [_batch(engine, case, seed) for seed in range(2)]
            with CollectiveCounter(mesh, case.sizes) as counter:
                engine.train_step(batches, token_cross_entropy, normalizer=1.0, lr=0.0).resolve()
            optimizer, collectives = engine.optimizer, counter.between()
            if not case.balanced:
                of_ranks = zip(*mesh.gather(collectives), strict=True)
                collectives = tuple(
                    replace(each[0], num_bytes=sum(one.num_bytes for one in each) // len(each)) for each in of_ranks
                )
            moments = [*optimizer.first_moments, *optimizer.second_moments]
            found.append(
                RealCount(
                    collectives=collectives,
                    held_bytes=sum(each.master.nbytes for each in optimizer.trained),
                    moment_bytes=sum(each.nbytes for each in moments),
                )
            )
        return found


def _batch(engine: TrainEngine, case: Counted, seed: int) -> PackedBatch:
    """The ranks of a context group have the same tokens, others have different ones."""
    mesh, routers = engine.mesh, engine.model.routers
    batch = random_batch(engine.model.vocab_size, (LENGTH,), seed=seed + 2 * mesh.data_rank)
    if routers is None or not case.balanced:
        return batch
    return replace(batch, experts_TLK=_in_turn(routers.shape))


def _in_turn(shape: RouterShape) -> np.ndarray[tuple[int, ...], np.dtype[np.integer]]:
    """Tokens go to the experts in turn."""
    in_turn_TK = np.arange(LENGTH * shape.per_token).reshape(LENGTH, 1, shape.per_token) % shape.num_experts
    return np.repeat(in_turn_TK, shape.num_layers, axis=1).astype(shape.dtype)
