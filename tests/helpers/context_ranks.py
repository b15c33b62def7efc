# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the test of documents over a context axis. Here, because a spawned process imports it by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from helpers.engines import make_engine, num_trained, random_documents
from helpers.ranks import assembled, mesh_of
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import pack
from podium.engine.mesh import Mesh, with_axes
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import RankPlace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextStep:
    """The mean loss and the gradient of one micro-batch."""

    loss: float
    gradient: dict[str, Tensor]


def context_step(mesh: Mesh, folder: Path, lengths: tuple[int, ...]) -> ContextStep:
    """Collective."""
    documents = random_documents(lengths)
    engine, count = make_engine(folder, mesh), num_trained(documents)
    total, gradients = engine.gradients([pack(documents)], token_cross_entropy, normalizer=float(count))
    whole = assembled(engine, {each.name: gradients[id(each)] for each in engine.optimizer.trained})
    return ContextStep(loss=mesh.sum_of_tokens(total).item() / count, gradient=whole)


def context_rank(place: RankPlace, cases: Mapping[Path, tuple[int, ...]]) -> dict[str, ContextStep]:
    """Each case over a context axis of all ranks."""
    with mesh_of(place) as ranks:
        mesh = with_axes(ranks, MeshSizes(context=place.world), timeout_s=120)
        return {folder.name: context_step(mesh, folder, lengths) for folder, lengths in cases.items()}
