# SPDX-License-Identifier: Apache-2.0
"""What ranks do in tests of routers. Here, because a spawned process imports it by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from helpers.engines import LENGTHS, make_engine, num_trained, random_documents
from helpers.ranks import all_on_rank_0, dealt, mesh_of, whole_gradient
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document
from podium.engine.mesh import Mesh, with_axes
from podium.engine.train_step import TrainEngine
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import RankPlace

COEFFICIENT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedResult:
    """Whole gradients with the load-balancing loss, by how documents are dealt, and a step's statistics."""

    gradients: Mapping[str, Tensor]
    metrics: Mapping[str, float]


def replaying(documents: list[Document], model: TrainEngine) -> list[Document]:
    """With random experts for half of the documents."""
    routers, draw = model.language_model.routers, np.random.default_rng(0)
    assert routers is not None
    shape = routers.shape
    made = []
    for number, document in enumerate(documents):
        order = draw.random((len(document.tokens), shape.num_layers, shape.num_experts)).argsort(-1)
        experts = order[..., : shape.per_token].astype(shape.dtype)
        made.append(replace(document, experts=experts if number % 2 else None))
    return made


def _always(documents: list[Document], experts: Iterable[int]) -> list[Document]:
    """All tokens of all documents go to these experts: ranks that hold others get no token."""
    given = next(each.experts for each in documents if each.experts is not None)
    row_K = np.array(list(experts), dtype=given.dtype)
    return [
        replace(each, experts=np.broadcast_to(row_K, (len(each.tokens), *given.shape[1:])).copy()) for each in documents
    ]


def routed_on(mesh: Mesh, folder: Path, **model: str) -> RoutedResult:
    """Collective."""
    plain = make_engine(folder, mesh, **model)
    engine = TrainEngine(
        plain.model, plain.optimizer.trained, plain.optimizer, mesh, None, router_aux_loss_coef=COEFFICIENT
    )
    documents = random_documents(LENGTHS)
    given = replaying(documents, engine)
    first = range(engine.language_model.routers.shape.per_token) if engine.language_model.routers else ()
    gradients = {
        "dealt": whole_gradient(engine, dealt(documents, mesh)),
        "lopsided": whole_gradient(engine, all_on_rank_0(documents, mesh)),
        "replayed": whole_gradient(engine, dealt(given, mesh)),
        "few experts": whole_gradient(engine, dealt(_always(given, first), mesh)),
    }
    report = engine.train_step(dealt(given, mesh), token_cross_entropy, normalizer=num_trained(given), lr=0.0).resolve()
    assert report.routers is not None
    return RoutedResult(gradients=gradients, metrics=report.routers.metrics())


def routed_rank(place: RankPlace, folder: Path) -> dict[str, RoutedResult]:
    """With and without activation checkpointing; over a context axis; with experts on the ranks that hold them; and
    over a tensor axis."""
    with mesh_of(place) as mesh:
        divided = with_axes(mesh, MeshSizes(context=2), timeout_s=120)
        experts = with_axes(mesh, MeshSizes(shard=2, experts=2), timeout_s=120)
        tensor = with_axes(mesh, MeshSizes(tensor=2), timeout_s=120)
        return {
            "sharded": routed_on(mesh, folder),
            "recomputed": routed_on(mesh, folder, activation_checkpointing="layers"),
            "context": routed_on(divided, folder, activation_checkpointing="layers"),
            "experts": routed_on(experts, folder),
            "experts recomputed": routed_on(experts, folder, activation_checkpointing="layers"),
            "experts selective": routed_on(experts, folder, activation_checkpointing="selective"),
            "tensor": routed_on(tensor, folder),
            "tensor recomputed": routed_on(tensor, folder, activation_checkpointing="layers"),
            "tensor selective": routed_on(tensor, folder, activation_checkpointing="selective"),
        }
