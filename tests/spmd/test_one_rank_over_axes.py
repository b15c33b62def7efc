# SPDX-License-Identifier: Apache-2.0
"""One rank whose parameters are shards and whose axes meet in collectives computes what a rank without any does: here
over gloo, in tests/gpu over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.engines import one_rank
from helpers.one_rank import CALLED, Axes, Computed, assert_same, computed_on, one_rank_over
from helpers.tiny import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    return computed_on(one_rank(), model, tmp_path_factory.mktemp("alone") / "saves")


@pytest.mark.parametrize("axes", CALLED)
def test_one_rank_over_axes_computes_what_it_does_alone(
    axes: Axes, model: Path, alone: Computed, tmp_path: Path
) -> None:
    with one_rank_over(axes, "cpu", tmp_path) as mesh:
        found = computed_on(mesh, model, tmp_path / "saves")

    assert_same(found, alone, axes)
