# SPDX-License-Identifier: Apache-2.0
"""How often the ranks of a tensor axis add up hidden states: twice a layer forward, and twice backward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import save_tiny_model
from podium.dry_run.counting import CollectiveCounter
from podium.dry_run.fake_ranks import fake_mesh
from podium.engine.mesh import Mesh
from podium.models.causal_lm import PackedCausalLM, build, load_config
from podium.models.packing import to_device
from podium.models.tensor_parallel import divide_model
from podium.models.verify import random_batch
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
    return found


def calls(counter: CollectiveCounter, start: int, stop: int | None = None) -> dict[str, int]:
    return {each.kind: each.calls for each in counter.between(start, stop)}


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
