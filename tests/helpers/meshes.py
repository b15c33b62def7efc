# SPDX-License-Identifier: Apache-2.0
"""What ranks do on meshes of several axes. Here, because a spawned process imports it by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.engines import LENGTHS, make_engine, num_trained, random_documents, relative_l2
from helpers.ranks import EMPTY, OPTIMIZER, all_on_rank_0, dealt, mesh_of, two_steps, whole_gradient, whole_state
from podium.algorithms.dense import token_cross_entropy
from podium.engine.checkpoint import CheckpointWriter, newest_usable
from podium.engine.mesh import Mesh, with_axes
from podium.engine.resuming import checkpoint_shards, restore_optimizer
from podium.engine.train_step import TrainEngine
from podium.models.causal_lm import load_config
from podium.models.verify import self_check
from podium.recipe import ModelSection
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import RankPlace
from podium.weights.published import PublishedWeights
from podium.weights.receiving import verify_in_place
from podium.weights.whole_copy import WholeCopy

SAME = 1e-5
LORA = {"rank": 4, "alpha": 8.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshTask:
    """Models to take gradients of on each mesh. The first is trained, saved below `saves` and, on each mesh, loaded
    from `loads` and from what the mesh before it has saved."""

    shapes: tuple[MeshSizes, ...]
    models: tuple[Path, ...]
    adapted: tuple[Path, ...]  # with an adapter
    saves: Path
    loads: tuple[Path, ...] = ()
    newest: int | None = None  # loads so many of the newest folders on each mesh; None: all
    timeout_s: float = 120.0  # of a collective


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OfModel:
    """One model on one mesh."""

    gradient: Tensor
    lopsided: Tensor
    grad_norm: float
    gap: float  # of the packed forward against transformers' own
    version: str  # of the published weights
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnMesh:
    """Everything of one mesh."""

    models: dict[str, OfModel]
    adapted: dict[str, OfModel]
    saved: dict[str, Tensor]
    loaded: dict[str, dict[str, Tensor]]  # by folder
    num_saved_bytes: int


def mesh_rank(place: RankPlace, task: MeshTask) -> dict[str, OnMesh]:
    """All meshes in turn, over one process group."""
    with mesh_of(place, timeout_s=task.timeout_s) as ranks:
        results, loads = {}, list(task.loads)
        for sizes in task.shapes:
            mesh = with_axes(ranks, sizes, timeout_s=task.timeout_s)
            folder = task.saves / name_of(sizes)
            results[name_of(sizes)] = _on(mesh, task, folder, loads[-(task.newest or len(loads)) :])
            loads.append(folder)
        return results


def models_rank(place: RankPlace, cases: Mapping[Path, Sequence[MeshSizes]]) -> dict[tuple[str, str], OfModel]:
    """Models on some meshes, by the names of both, over one process group."""
    with mesh_of(place) as ranks:
        shapes = dict.fromkeys(sizes for wanted in cases.values() for sizes in wanted)
        meshes = {sizes: with_axes(ranks, sizes, timeout_s=120) for sizes in shapes}
        return {
            (path.name, name_of(sizes)): of_model(path, meshes[sizes])
            for path, wanted in cases.items()
            for sizes in wanted
        }


def name_of(sizes: MeshSizes) -> str:
    experts = f"e{sizes.experts}" if sizes.experts > 1 else ""
    return f"r{sizes.replicate}s{sizes.shard}c{sizes.context}t{sizes.tensor}{experts}"


def _on(mesh: Mesh, task: MeshTask, folder: Path, loads: list[Path]) -> OnMesh:
    models = {path.name: of_model(path, mesh) for path in task.models}
    adapted = {path.name: of_model(path, mesh, lora=LORA) for path in task.adapted}
    first = task.models[0]
    loaded = {}
    for path in loads:
        reader = newest_usable(path)
        engine = make_engine(first, mesh, optimizer=OPTIMIZER, checkpoint=reader)
        restore_optimizer(engine, reader)
        loaded[path.name] = whole_state(engine)
    engine = make_engine(first, mesh, optimizer=OPTIMIZER)
    two_steps(engine)
    save(engine, folder)
    mesh.barrier()
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    return OnMesh(models=models, adapted=adapted, saved=whole_state(engine), loaded=loaded, num_saved_bytes=size)


def save(engine: TrainEngine, folder: Path) -> None:
    writer = CheckpointWriter(folder, engine.mesh, keep=1, keep_best=False, background=False, timeout_s=60)
    writer.save(2, checkpoint_shards(engine), EMPTY, heldout_loss=None)
    writer.wait()


def of_model(path: Path, mesh: Mesh, **model: Any) -> OfModel:
    """Gradients, checks and two steps of one model. Collective."""
    engine = make_engine(path, mesh, optimizer=OPTIMIZER, **model)
    with torch.no_grad():  # an adapter begins at zero, where half of its gradients are
        for each in engine.optimizer.trained:
            if ".lora_B." in each.name:
                whole = torch.linspace(-0.3, 0.3, each.shape[0] * each.shape[1]).view(each.shape)
                each.master.copy_(whole[each.box.slices()])
                each.publish()
    gap = self_check(engine.model, mesh.device, torch.float32).largest
    gradient = whole_gradient(engine, dealt(random_documents(LENGTHS), mesh))
    lopsided = whole_gradient(engine, all_on_rank_0(random_documents(LENGTHS), mesh))
    section = ModelSection.model_validate({"path": str(path), **model})
    return OfModel(
        gradient=gradient, lopsided=lopsided, grad_norm=norm_of(engine), gap=gap, version=published(engine, section),
        losses=two_steps(engine),
    )  # fmt: skip


def norm_of(engine: TrainEngine) -> float:
    documents = random_documents(LENGTHS)
    batches = dealt(documents, engine.mesh)
    report = engine.train_step(batches, token_cross_entropy, normalizer=num_trained(documents), lr=0.0)
    return report.resolve().grad_norm


def published(engine: TrainEngine, section: ModelSection) -> str:
    """The version of the weights, which a whole copy has too."""
    weights = PublishedWeights(engine.language_model, engine.optimizer.trained, engine.mesh, torch.float32)
    version = weights.describe(1)
    config = load_config(Path(section.path), trust_remote_code=False)
    copy = WholeCopy(weights, section, config, device=engine.mesh.device, dtype=torch.float32)
    copy.refill()
    verify_in_place(copy.tensors, version)
    return version.fingerprint


def require_same(found: OfModel, wanted: OfModel) -> None:
    """The numbers of one rank."""
    assert relative_l2(found.gradient, wanted.gradient) < SAME
    assert relative_l2(found.lopsided, wanted.gradient) < SAME
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=SAME)
    assert found.losses == pytest.approx(wanted.losses, rel=SAME)
    assert found.version == wanted.version
    assert found.gap < 1e-4


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Equal bit for bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
