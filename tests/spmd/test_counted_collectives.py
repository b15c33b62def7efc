# SPDX-License-Identifier: Apache-2.0
"""A dry run counts what two real ranks over gloo call and hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.counted_ranks import LENGTH, Counted, RealCount, counting_rank
from helpers.model_shapes import dry_recipe
from helpers.ranks import RankCall
from helpers.tiny import save_tiny_model
from podium.dry_run.fake_ranks import dry_run
from podium.planning.devices import device_named
from podium.recipe.policy_mesh import MeshSizes, section_of

pytestmark = pytest.mark.slow
CASES = {
    "shard": Counted(model="qwen3", sizes=MeshSizes(shard=2)),
    "replicate": Counted(model="qwen3", sizes=MeshSizes(replicate=2)),
    "tensor": Counted(model="qwen3", sizes=MeshSizes(tensor=2)),
    "context": Counted(model="qwen3", sizes=MeshSizes(context=2)),
    "ring": Counted(model="three_heads", sizes=MeshSizes(context=2)),
    "experts": Counted(model="qwen3_moe", sizes=MeshSizes(shard=2, experts=2)),
    "experts over context": Counted(model="qwen3_moe", sizes=MeshSizes(context=2, experts=2)),
    "experts as routed": Counted(model="qwen3_moe", sizes=MeshSizes(shard=2, experts=2), balanced=False),
}


def make_folder(folder: Path) -> None:
    save_tiny_model("qwen3", folder / "qwen3")
    heads = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
    save_tiny_model("qwen3", folder / "three_heads", **heads)
    save_tiny_model("qwen3_moe", folder / "qwen3_moe")


def on_two_ranks(folder: Path) -> RankCall:
    return counting_rank, (folder, tuple(CASES.values()))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_call_and_hold_what_was_counted(folder: Path, two_ranks: list[RealCount], name: str) -> None:
    """All-to-alls of experts are equal where all get as many tokens; as routed, the ranks' mean is."""
    sizes, real = CASES[name].sizes, two_ranks[list(CASES).index(name)]
    step = {"tokens_per_step": 2 * LENGTH * sizes.data_ranks, "micro_batch_tokens": LENGTH}
    data = {"train": "rows.jsonl", "max_length": LENGTH}
    policy = section_of(sizes).model_dump()
    placement = {"devices": 2, "policy": policy, "experts": sizes.experts}
    recipe = dry_recipe(folder / CASES[name].model, 2, policy, data=data, placement=placement, **step)
    counted = dry_run(recipe, replace(device_named("CPU core"), memory_bytes=1 << 40))

    assert real.collectives == counted.collectives
    assert counted.split.micro_batches == 2
    assert (real.held_bytes, real.moment_bytes) == (
        counted.ranks[0].parameter_bytes,
        counted.ranks[0].optimizer_bytes,
    )
