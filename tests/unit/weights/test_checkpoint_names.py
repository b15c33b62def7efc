# SPDX-License-Identifier: Apache-2.0
"""Published tensors under the names of a checkpoint: what transformers itself would save, and loads again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.engines import make_engine, one_rank
from helpers.tiny import save_tiny_model
from podium.engine.train_step import TrainEngine
from podium.errors import UnsupportedModelError
from podium.weights.names import CheckpointNames, checkpoint_tensors
from podium.weights.published import PublishedWeights

MODELS = (
    "qwen3",
    "llama",
    "qwen3_moe",
    "glm4_moe",
    "gpt_oss",
    "phimoe",
    "deepseek_v3",
    "ernie4_5_moe",
    "afmoe",
    "laguna",
)


def in_checkpoint(engine: TrainEngine) -> dict[str, Tensor]:
    weights = PublishedWeights(engine.model, engine.optimizer.trained, one_rank(), torch.float32)
    return {name: tensor.clone() for name, tensor in checkpoint_tensors(engine.model.hf, weights.tensors())}


@pytest.mark.parametrize("name", MODELS)
def test_names_and_values_are_those_of_the_checkpoint_that_was_loaded(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(name, tmp_path / name)
    saved = load_file(folder / "model.safetensors")
    found = in_checkpoint(make_engine(folder))
    assert set(found) == set(saved)
    assert all(torch.equal(found[each], saved[each]) for each in saved)


def test_a_mixture_of_experts_has_a_tensor_for_each_expert(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("qwen3_moe", tmp_path / "moe"))
    in_memory = {name for name, _ in engine.model.hf.named_parameters()}
    found = in_checkpoint(engine)
    assert any(name.endswith("experts.gate_up_proj") for name in in_memory)
    assert found["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (16, 32)
    assert found["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (32, 16)
    assert not any("gate_up_proj" in name for name in found)


def test_transformers_loads_the_trained_model_from_them(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("qwen3_moe", tmp_path / "moe"))
    with torch.no_grad():
        for each in engine.optimizer.trained:
            each.parameter.mul_(1.25)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    shutil.copy(tmp_path / "moe" / "config.json", fresh)
    tensors = {name: tensor.contiguous() for name, tensor in in_checkpoint(engine).items()}
    save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
    loaded = dict(AutoModelForCausalLM.from_pretrained(fresh, dtype=torch.float32).named_parameters())
    for each in engine.optimizer.trained:
        real = loaded[each.name]
        assert torch.equal(real, each.parameter[: len(real)]), each.name


def test_a_tensor_that_waits_for_others_is_kept_and_missed_if_they_never_come(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("qwen3_moe", tmp_path / "moe"))
    names = CheckpointNames(engine.model.hf)
    fused = "model.layers.0.mlp.experts.down_proj"
    target, _ = names._target(fused)
    names._awaited[target] = 2  # as if the checkpoint made one tensor of two
    lent = dict(engine.model.hf.named_parameters())[fused].detach().clone()
    assert list(names.converted(fused, lent)) == []
    with pytest.raises(UnsupportedModelError, match=r"experts\.down_proj: .*Qwen3MoeForCausalLM"):
        names.finish()
