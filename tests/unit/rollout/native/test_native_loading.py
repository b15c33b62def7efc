# SPDX-License-Identifier: Apache-2.0
"""An engine loads its weights once, in the dtype that it computes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.engines import one_rank
from helpers.meshes import LORA
from helpers.tiny import save_tiny_model
from podium.engine.mesh import Mesh
from podium.engine.sharding import place
from podium.models.causal_lm import PackedCausalLM
from podium.models.cpu_settings import CpuSettings
from podium.models.tensor_axis import TensorAxis
from podium.recipe import ModelSection
from podium.recipe.schema import LoraSection
from podium.rollout.native import loading
from podium.weights.held import all_tensors


class Float32Memory(TorchDispatchMode):
    """The largest number of bytes of float32 tensors that exist at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, results)):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.dtype == torch.float32:
                storage = each.untyped_storage()
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {weak: size for weak, size in self._alive.items() if not weak.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
        return results


def loaded(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, mesh: Mesh, lora: LoraSection | None = None
) -> PackedCausalLM:
    """The model as an engine loads it, without the forward passes that follow."""
    monkeypatch.setattr(loading, "self_check", lambda *args, **named: None)
    section = ModelSection(path=str(folder), dtype="bfloat16", lora=lora)
    model, _ = loading.load_for_engine(section, folder, mesh, max_length=64, cpu=CpuSettings(threads=1, onednn=True))
    return model


def second_of_two() -> Mesh:
    """A rank that has the second half of each divided tensor. Loading needs no collective."""
    return Mesh(
        rank=0, world=1, device=torch.device("cpu"), devices=None, tensor=TensorAxis(group=None, rank=1, size=2)
    )


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("mesh", [one_rank(), second_of_two()], ids=["whole", "part"])
def test_no_float32_masters_exist_while_an_engine_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: Mesh, lora: LoraSection | None
) -> None:
    folder = save_tiny_model("llama", tmp_path / "model", num_hidden_layers=24)
    largest = max(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    with Float32Memory() as memory:
        model = loaded(monkeypatch, folder, mesh=mesh, lora=lora)
    tensors = all_tensors(model).values()
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    masters = 2 * sum(tensor.nbytes for tensor in tensors)
    assert 4 * largest < masters, "the model is too small to tell"
    assert 0 < memory.peak_bytes <= 2 * largest  # the tensor that is being read


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_an_engine_rounds_a_float32_checkpoint_to_the_bits_that_the_learner_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = save_tiny_model(name, tmp_path / "model")
    mine = all_tensors(loaded(monkeypatch, folder, mesh=one_rank()))
    learner, trained = place(ModelSection(path=str(folder), dtype="bfloat16"), folder, one_rank(), seed=0)
    published = all_tensors(learner)
    assert any(each.has_own_master for each in trained)
    assert mine.keys() == published.keys()
    for key, tensor in published.items():
        assert mine[key].dtype == tensor.dtype
        assert torch.equal(mine[key], tensor), key


def test_an_engine_has_the_adapter_of_the_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    mine = all_tensors(loaded(monkeypatch, folder, mesh=one_rank(), lora=LORA))
    section = ModelSection(path=str(folder), dtype="bfloat16", lora=LORA)
    published = all_tensors(place(section, folder, one_rank(), seed=0)[0])
    assert mine.keys() == published.keys()
    assert all(torch.equal(mine[key], tensor) for key, tensor in published.items())
