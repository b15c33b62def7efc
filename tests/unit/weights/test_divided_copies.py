# SPDX-License-Identifier: Apache-2.0
"""A copy of a learner's weights that two ranks hold together: each has its part of every version, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engines import one_rank
from helpers.meshes import LORA
from helpers.tiny import save_tiny_model
from podium.engine.sharding import place
from podium.models.causal_lm import load_config
from podium.models.tensor_axis import TensorAxis
from podium.recipe import ModelSection
from podium.weights.held import all_tensors
from podium.weights.published import PublishedWeights
from podium.weights.whole_copy import WholeCopy


@pytest.mark.parametrize(
    ("name", "lora"), [("llama", None), ("qwen3_moe", None), ("llama", LORA)], ids=["dense", "mixture", "adapter"]
)
def test_parts_of_a_copy_make_the_whole_of_each_version(tmp_path: Path, name: str, lora: Any) -> None:
    folder = save_tiny_model(name, tmp_path / "model")
    section = ModelSection(path=str(folder), lora=lora)
    learner, trained = place(section, folder, one_rank(), seed=0)
    weights = PublishedWeights(learner, trained, one_rank(), torch.float32)
    config = load_config(folder, trust_remote_code=False)
    copies = [
        WholeCopy(
            weights, section, config, device=torch.device("cpu"), dtype=torch.float32,
            axis=TensorAxis(group=None, rank=rank, size=2),
        )
        for rank in range(2)
    ]  # fmt: skip
    whole = WholeCopy(weights, section, config, device=torch.device("cpu"), dtype=torch.float32)
    assert all(copy.nbytes < 0.65 * whole.nbytes for copy in copies)  # norms and routers are on both
    for version in range(2):
        with torch.no_grad():
            for each in trained:
                if not each.is_frozen:
                    each.parameter.add_(version)
        for copy in (*copies, whole):
            copy.refill()
        parts, wanted = [all_tensors(copy.model) for copy in copies], all_tensors(whole.model)
        assert parts[0].keys() == wanted.keys()
        split = copies[0].model.split
        assert split is not None
        for key, tensor in wanted.items():
            division = split.divisions.get(key)
            found = parts[0][key] if division is None else torch.cat([part[key] for part in parts], division.dim)
            assert torch.equal(found, tensor), key
        released = copies[1].release()
        assert released == copies[1].nbytes
        copies[1].restore()
