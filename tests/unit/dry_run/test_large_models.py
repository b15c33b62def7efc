# SPDX-License-Identifier: Apache-2.0
"""Dry runs of a 70B and a 235B mixture on hundreds of ranks: within two minutes of processor time and little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.model_shapes import LLAMA_70B, QWEN3_235B, config_folder, dry_recipe
from podium.planning.collectives import added_up, step_collectives
from podium.planning.model_shape import shape_of
from podium.recipe import dump_recipe
from podium.recipe.policy_mesh import MeshSizes, section_of

MODELS: dict[str, tuple[dict[str, Any], MeshSizes, float]] = {
    "70B on 256": (LLAMA_70B, MeshSizes(replicate=8, shard=8, tensor=4), 70.55e9),
    "235B on 1024": (QWEN3_235B, MeshSizes(replicate=16, shard=64), 235.09e9),
    "235B on 1024, divided experts": (QWEN3_235B, MeshSizes(replicate=16, shard=64, experts=64), 235.09e9),
    "235B on 128 over context": (QWEN3_235B, MeshSizes(shard=32, context=4, experts=128), 235.09e9),
}
_MOST_SECONDS, _MOST_BYTES = 120, 2 << 30


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_large_model(tmp_path: Path, name: str) -> None:
    config, sizes, parameters = MODELS[name]
    policy = section_of(sizes).model_dump()
    recipe = dry_recipe(
        config_folder(tmp_path / "model", config), sizes.devices, policy,
        model={"activation_checkpointing": "layers"}, data={"train": "rows.jsonl", "max_length": 4096},
        tokens_per_step=4096 * sizes.devices, micro_batch_tokens=4096,
        placement={"devices": sizes.devices, "policy": policy, "experts": sizes.experts},
    )  # fmt: skip
    file = tmp_path / "sft.yaml"
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "podium.cli", "plan", str(file), "--dry-run", "--device", "H200", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert used.ru_utime + used.ru_stime < _MOST_SECONDS
    assert used.ru_maxrss * 1024 < _MOST_BYTES

    counted = json.loads(output)
    first = counted["ranks"][0]
    assert first["model_parameters"] == pytest.approx(parameters, rel=1e-3)
    predicted = counted["predicted"]
    assert predicted["parameters"] == pytest.approx(first["parameter_bytes"], rel=0.02)
    assert predicted["gradients"] == pytest.approx(first["gradient_bytes"], rel=0.02)
    assert predicted["optimizer state"] == pytest.approx(first["optimizer_bytes"], rel=0.02)
    split = counted["step"]
    formulas = step_collectives(
        shape_of(recipe.model), sizes, passes=split["micro_batches"], tokens=split["tokens"], itemsize=2,
        checkpointed=True, length=split["length"],
    )  # fmt: skip
    found = {(each["kind"], each["axis"]): (each["calls"], each["num_bytes"]) for each in counted["collectives"]}
    assert found == {(each.kind, each.axis): (each.calls, each.num_bytes) for each in added_up(formulas)}
