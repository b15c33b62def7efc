# SPDX-License-Identifier: Apache-2.0
"""The code of several ranks over NCCL, by one rank that meets itself on every axis, as over gloo in
tests/spmd/test_one_rank_over_axes.py. What needs two devices, such as a ring of context ranks, cannot be seen here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.one_rank import CALLED, Axes, Computed, assert_same, computed_on, one_rank_over
from helpers.tiny import save_tiny_model
from podium.engine.mesh import Mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    mesh = Mesh(rank=0, world=1, device=torch.device("cuda", 0), devices=None)
    return computed_on(mesh, model, tmp_path_factory.mktemp("alone") / "saves")


@pytest.mark.parametrize("axes", CALLED)
def test_one_rank_over_nccl_computes_what_it_does_alone(
    axes: Axes, model: Path, alone: Computed, tmp_path: Path
) -> None:
    with one_rank_over(axes, "cuda", tmp_path) as mesh:
        found = computed_on(mesh, model, tmp_path / "saves")

    assert_same(found, alone, axes)
