# SPDX-License-Identifier: Apache-2.0
"""One rank that computes as several do: its parameters are shards, and its axes meet in collectives, with itself. Over
NCCL, which refuses two ranks on one device, nothing else can run on a machine with one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from helpers.engines import LENGTHS, make_engine, random_documents, relative_l2
from helpers.ranks import EMPTY, OPTIMIZER, dealt, two_steps, whole_gradient, whole_state
from podium.dry_run.counting import CollectiveCounter
from podium.engine.addresses import DeviceKind, FileMeeting
from podium.engine.checkpoint import CheckpointWriter, newest_usable
from podium.engine.meeting import join_default_group
from podium.engine.mesh import Mesh, leave
from podium.engine.resuming import checkpoint_shards, restore_optimizer
from podium.models.causal_lm import load_config
from podium.models.context_axis import ContextAxis
from podium.models.expert_axis import ExpertAxis, ExpertGroups
from podium.models.tensor_axis import TensorAxis
from podium.recipe import ModelSection
from podium.recipe.policy_mesh import MeshSizes
from podium.weights.published import PublishedWeights
from podium.weights.receiving import verify_in_place
from podium.weights.versions import WeightVersion
from podium.weights.whole_copy import WholeCopy

Axes = Literal["shard", "replicate", "tensor", "context", "experts", "tensor and context", "tensor and experts"]


@contextmanager
def one_rank_over(axes: Axes, kind: DeviceKind, folder: Path) -> Iterator[Mesh]:
    """A mesh of one rank with these axes, over gloo or NCCL."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    join_default_group(
        FileMeeting(path=folder / "meeting"), kind=kind, rank=0, world=1, device=device, deadline_s=60, timeout_s=60
    )
    shape = {"replicate": 1, "shard": 1} if axes == "replicate" else {"shard": 1}
    mesh = Mesh(
        rank=0, world=1, device=device,
        devices=init_device_mesh(kind, tuple(shape.values()), mesh_dim_names=tuple(shape)),
    )  # fmt: skip
    if "tensor" in axes:
        mesh = replace(mesh, tensor=TensorAxis(group=dist.new_group([0]), rank=0, size=1))
    if "context" in axes:
        mesh = replace(mesh, context=ContextAxis(group=dist.new_group([0]), rank=0, size=1))
    if "experts" in axes:
        exchange = ExpertAxis(group=dist.new_group([0]), rank=0, size=1)
        groups = ExpertGroups(holders=exchange, exchange=exchange, tensor=mesh.tensor)
        mesh = replace(mesh, experts=groups, expert_devices=init_device_mesh(kind, (1,), mesh_dim_names=("shard",)))
    try:
        yield mesh
    finally:
        leave(mesh)
        _clear_sharding_prop_cache()  # else parameters of an equal mesh get this one, whose groups are gone


# Those that a mixture calls at least, by (axis, kind). torch leaves out the reduce-scatter of a group of one.
CALLED: Mapping[Axes, frozenset[tuple[str, str]]] = {
    "shard": frozenset({("shard", "all-gather")}),
    "replicate": frozenset({("shard", "all-gather"), ("shard", "all-reduce")}),
    "tensor": frozenset({("shard", "all-gather"), ("tensor", "all-reduce")}),
    "context": frozenset({("shard", "all-gather"), ("context", "all-gather"), ("context", "all-to-all")}),
    "experts": frozenset({("expert_shard", "all-gather"), ("experts", "all-to-all")}),
    "tensor and context": frozenset({("tensor", "all-reduce"), ("context", "all-gather"), ("context", "all-to-all")}),
    "tensor and experts": frozenset({("tensor", "all-reduce"), ("experts", "all-to-all")}),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computed:
    """What an engine computes on a mesh."""

    gradient: Tensor
    losses: tuple[float, ...]  # of two steps
    state: dict[str, Tensor]  # weights and moments after them
    loaded: dict[str, Tensor]  # the same, read back from a checkpoint
    collectives: frozenset[tuple[str, str]]  # (axis, kind) of those that the gradient calls
    published: WeightVersion  # the fingerprints of the weights after the steps


def computed_on(mesh: Mesh, model: Path, saves: Path) -> Computed:
    """A gradient, two steps, a checkpoint that is read again, and where parameters are shards a generator's copy of the
    whole. In float32, so that meshes can be compared."""
    engine = make_engine(model, mesh, optimizer=OPTIMIZER, dtype="float32", compile="off")
    with CollectiveCounter(mesh, MeshSizes()) as counter:
        gradient = whole_gradient(engine, dealt(random_documents(LENGTHS), mesh))
    losses = two_steps(engine)
    saves.mkdir(parents=True)
    writer = CheckpointWriter(saves, mesh, keep=1, keep_best=False, background=True, timeout_s=60)
    writer.save(2, checkpoint_shards(engine), EMPTY, heldout_loss=None)
    writer.wait()
    state = whole_state(engine)
    weights = PublishedWeights(engine.model, engine.optimizer.trained, mesh, torch.float32)
    published = weights.describe(1)
    if mesh.is_sharded:
        config = load_config(model, trust_remote_code=False)
        copy = WholeCopy(weights, ModelSection(path=str(model)), config, device=mesh.device, dtype=torch.float32)
        copy.refill()
        verify_in_place(copy.tensors, published)
    reader = newest_usable(saves)
    again = make_engine(model, mesh, optimizer=OPTIMIZER, checkpoint=reader, dtype="float32", compile="off")
    restore_optimizer(again, reader)
    return Computed(
        gradient=gradient.cpu(), losses=losses, state=_on_cpu(state), loaded=_on_cpu(whole_state(again)),
        published=published, collectives=frozenset((each.axis, each.kind) for each in counter.noted),
    )  # fmt: skip


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def assert_same(found: Computed, alone: Computed, axes: Axes) -> None:
    """What a rank computes over axes is what it computes alone, and it has met itself on each of them."""
    assert found.collectives >= CALLED[axes]
    assert not alone.collectives
    assert relative_l2(found.gradient, alone.gradient) < 1e-5
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
    assert found.state.keys() == alone.state.keys()
    for name, tensor in found.state.items():
        assert torch.equal(found.loaded[name], tensor), name
        assert torch.allclose(tensor, alone.state[name], rtol=1e-3, atol=1e-5), name
    assert found.published.manifest == alone.published.manifest
