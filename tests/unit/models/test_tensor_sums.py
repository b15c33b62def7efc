# SPDX-License-Identifier: Apache-2.0
"""How often the ranks of a tensor axis add up hidden states: twice a layer forward, and twice backward; of a mixture
also the gradients of the weights of experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engines import make_engine
from helpers.ranks import OPTIMIZER
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.dry_run.counting import CollectiveCounter
from podium.dry_run.fake_ranks import fake_mesh
from podium.engine.mesh import Mesh
from podium.models.causal_lm import PackedCausalLM, build, load_config
from podium.models.expert_axis import ExpertGroups
from podium.models.expert_parallel import divide_experts
from podium.models.packing import to_device
from podium.models.tensor_parallel import divide_model
from podium.models.verify import random_batch
from podium.planning.collectives import step_collectives
from podium.planning.model_shape import shape_of
from podium.recipe import ModelSection
from podium.recipe.policy_mesh import MeshSizes

CPU = torch.device("cpu")
SIZES = MeshSizes(tensor=2)
LAYERS = 2
# Gathers of a layer, forward and backward, where something between divided matrices is computed whole.
GATHERS = {
    "olmo2": (3, 1),  # queries, keys and values; the gradient of what o takes
    "phi3": (2, 2),  # the fused projections; the gradients of what o and down take
    "glm4": (1, 1),
}
ADAPTED = {"rank": 2, "alpha": 4.0}
ARCHITECTURES = (
    "gemma", "gemma2", "gemma3", "glm4", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """The first of two ranks, without the other."""
    with fake_mesh(0, SIZES) as mesh:
        yield mesh


def divided(folder: Path, mesh: Mesh, **model: Any) -> PackedCausalLM:
    section = ModelSection.model_validate({"path": str(folder), **model})
    config = load_config(folder, trust_remote_code=False)
    found = build(section, config, device=CPU, dtype=torch.float32)
    assert mesh.tensor is not None
    divide_model(found, mesh.tensor)
    divide_experts(found, ExpertGroups(holders=mesh.tensor, tensor=mesh.tensor))
    return found


def calls(counter: CollectiveCounter, start: int, stop: int | None = None) -> dict[str, int]:
    return {each.kind: each.calls for each in counter.between(start, stop)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "lora"),
    [*((each, None) for each in ARCHITECTURES), *((each, ADAPTED) for each in ("llama", "gemma3", "phi3"))],
)
def test_four_sums_a_layer(tmp_path: Path, mesh: Mesh, architecture: str, lora: dict[str, Any] | None) -> None:
    save_tiny_model(architecture, tmp_path / "model")
    model = divided(tmp_path / "model", mesh, lora=lora)
    batch = to_device(random_batch(model.vocab_size, (7,)), CPU)

    with CollectiveCounter(mesh, SIZES) as counter:
        hidden = model.hidden(batch)
        forward = counter.num_noted
        hidden.sum().backward()

    gathers_forward, gathers_backward = (LAYERS * each for each in GATHERS.get(architecture, (0, 0)))
    # The embedding's sum comes first; an adapter needs no gradient of what the first layer takes.
    assert calls(counter, 0, forward) == nonzero(LAYERS * 2 + 1, gathers_forward)
    assert calls(counter, forward) == nonzero(LAYERS * 2 - (1 if lora else 0), gathers_backward)


def nonzero(sums: int, gathers: int) -> dict[str, int]:
    return {"all-reduce": sums, **({"all-gather": gathers} if gathers else {})}


@pytest.mark.parametrize(("shared", "forward_sums"), [(False, 2), (True, 3)])
def test_experts_and_a_shared_expert_are_one_sum_each(
    tmp_path: Path, mesh: Mesh, shared: bool, forward_sums: int
) -> None:
    changes = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 16, "eos_token_id": 1} if shared else {}
    save_tiny_model("qwen3_moe", tmp_path / "model", **changes)
    model = divided(tmp_path / "model", mesh)
    batch = to_device(random_batch(model.vocab_size, (7,)), CPU)

    with CollectiveCounter(mesh, SIZES) as counter:
        hidden = model.hidden(batch)
        forward = counter.num_noted
        hidden.sum().backward()

    assert calls(counter, 0, forward) == nonzero(LAYERS * forward_sums + 1, 0)
    assert calls(counter, forward) == nonzero(LAYERS * (forward_sums + 1), 0)


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_the_planner_counts_what_a_step_of_a_mixture_calls(tmp_path: Path, mesh: Mesh, checkpointing: str) -> None:
    folder = save_tiny_model("qwen3_moe", tmp_path / "model")
    engine = make_engine(folder, mesh, optimizer=OPTIMIZER, activation_checkpointing=checkpointing)
    batches = [random_batch(engine.model.vocab_size, (24,)) for _ in range(2)]

    with CollectiveCounter(mesh, SIZES) as counter:
        engine.train_step(batches, token_cross_entropy, normalizer=1.0, lr=0.0).resolve()

    shape = shape_of(ModelSection(path=str(folder)))
    checkpointed = checkpointing == "layers"
    wanted = step_collectives(shape, SIZES, passes=2, tokens=24, itemsize=4, checkpointed=checkpointed)
    assert counter.between() == wanted
