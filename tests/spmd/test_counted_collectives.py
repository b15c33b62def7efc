# SPDX-License-Identifier: Apache-2.0
"""A dry run counts what two real ranks over gloo call and hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.counted_ranks import LENGTH, RealCount, counting_rank
from helpers.model_shapes import dry_recipe
from helpers.ranks import RankCall
from helpers.tiny import save_tiny_model
from podium.dry_run.fake_ranks import dry_run
from podium.planning.devices import device_named
from podium.recipe.policy_mesh import MeshSizes, section_of

pytestmark = pytest.mark.slow
SHAPES = (MeshSizes(shard=2), MeshSizes(replicate=2), MeshSizes(tensor=2))


def make_folder(folder: Path) -> None:
    save_tiny_model("qwen3", folder / "qwen3")


def on_two_ranks(folder: Path) -> RankCall:
    return counting_rank, (folder / "qwen3", SHAPES)


@pytest.mark.parametrize("at", range(len(SHAPES)))
def test_two_ranks_call_and_hold_what_was_counted(folder: Path, two_ranks: list[RealCount], at: int) -> None:
    sizes, real = SHAPES[at], two_ranks[at]
    step = {"tokens_per_step": 2 * LENGTH * sizes.data_ranks, "micro_batch_tokens": LENGTH}
    data = {"train": "rows.jsonl", "max_length": LENGTH}
    recipe = dry_recipe(folder / "qwen3", 2, section_of(sizes).model_dump(), data=data, **step)
    counted = dry_run(recipe, replace(device_named("CPU core"), memory_bytes=1 << 40))

    assert real.collectives == counted.collectives
    assert counted.split.micro_batches == 2
    assert (real.held_bytes, real.moment_bytes) == (
        counted.ranks[0].parameter_bytes,
        counted.ranks[0].optimizer_bytes,
    )
