# SPDX-License-Identifier: Apache-2.0
"""What ranks do in tests of options that save memory. Here, because a spawned process imports it by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from helpers.engines import LENGTHS, make_engine, random_documents
from helpers.meshes import LORA
from helpers.ranks import OPTIMIZER, dealt, mesh_of, two_steps, whole_gradient, whole_state
from podium.engine.mesh import Mesh, with_axes
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import RankPlace

SHAPES = {"shard": MeshSizes(shard=2), "tensor": MeshSizes(tensor=2)}
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"activation_checkpointing": "selective"},
    "all_but_attention": {"activation_checkpointing": "all_but_attention"},
    "offloaded": {"activation_checkpointing": "layers", "offload_activations": True},
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedMemory:
    """Whole gradients by option, of the model and of an adapter, and the state after two steps with the optimizer's
    state on the device and in host memory."""

    gradients: Mapping[str, Tensor]
    adapted: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]


def memory_rank(place: RankPlace, folder: Path) -> dict[str, SavedMemory]:
    """Each mesh in turn."""
    with mesh_of(place) as ranks:
        return {name: _on(with_axes(ranks, sizes, timeout_s=120), folder) for name, sizes in SHAPES.items()}


def _on(mesh: Mesh, folder: Path) -> SavedMemory:
    def gradient(**model: Any) -> Tensor:
        return whole_gradient(make_engine(folder, mesh, **model), dealt(random_documents(LENGTHS), mesh))

    def state(offload: bool) -> dict[str, Tensor]:
        section = OPTIMIZER.model_copy(update={"offload": offload})
        engine = make_engine(folder, mesh, optimizer=section, **WAYS["offloaded" if offload else "none"])
        two_steps(engine)
        return whole_state(engine)

    return SavedMemory(
        gradients={name: gradient(**model) for name, model in WAYS.items()},
        adapted={name: gradient(lora=LORA, **WAYS[name]) for name in ("none", "selective")},
        states={"device": state(False), "host": state(True)},
    )
