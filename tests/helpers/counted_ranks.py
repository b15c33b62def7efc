# SPDX-License-Identifier: Apache-2.0
"""Real ranks that count their collectives. Here, because a spawned process imports it by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from helpers.engines import make_engine
from helpers.ranks import OPTIMIZER, mesh_of
from podium.algorithms.dense import token_cross_entropy
from podium.dry_run.counting import CollectiveCounter
from podium.engine.mesh import with_axes
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


def counting_rank(place: RankPlace, model: Path, shapes: tuple[MeshSizes, ...]) -> list[RealCount]:
    """One step of two micro-batches on each mesh in turn."""
    with mesh_of(place) as ranks:
        found = []
        for sizes in shapes:
            mesh = with_axes(ranks, sizes, timeout_s=120)
            engine = make_engine(model, mesh, optimizer=OPTIMIZER)
            batches = [random_batch(engine.model.vocab_size, (LENGTH,)) for _ in range(2)]
            with CollectiveCounter(mesh, sizes) as counter:
                engine.train_step(batches, token_cross_entropy, normalizer=1.0, lr=0.0).resolve()
            optimizer = engine.optimizer
            moments = [*optimizer.first_moments, *optimizer.second_moments]
            found.append(
                RealCount(
                    collectives=counter.between(),
                    held_bytes=sum(each.master.nbytes for each in optimizer.trained),
                    moment_bytes=sum(each.nbytes for each in moments),
                )
            )
        return found
