# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/plan_gpu.py predicts for one H200, and how it sets figures side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

import plan_gpu
from podium.planning.devices import GIB, device_named


def case(folder: Path, program: str, shape: str, device: str = "cuda") -> plan_gpu.Case:
    made = plan_gpu.Case(program=program, shape=shape, device=device, steps=8, warmup=3, folder=folder)
    made.make_files()
    return made


@pytest.mark.slow
def test_grpo_of_the_recorded_shape_is_predicted_as_the_docs_say(tmp_path: Path) -> None:
    """docs/planning.md: 608 ms of rollout, 255 ms of update, 65 ms of publish. These prompts are a little shorter."""
    found = plan_gpu.predictions(case(tmp_path, "grpo", "0.6b"), device_named("H200"))

    assert found["rollout"] == pytest.approx(0.608, rel=0.02)
    assert found["update"] == pytest.approx(0.255, rel=0.06)
    assert found["publish and residency"] == pytest.approx(0.065, rel=0.06)
    assert found["grading"] == pytest.approx(0.010)
    parts = found["rollout"] + found["update"] + found["publish and residency"] + found["grading"]
    assert found["step"] == pytest.approx(parts)
    assert 30 * GIB < found["peak bytes"] < 60 * GIB


def test_a_tiny_run_is_predicted_on_cpu(tmp_path: Path) -> None:
    found = plan_gpu.predictions(case(tmp_path, "sft", "tiny", "cpu"), device_named("cpu"))
    assert set(found) == {"step", "peak bytes"}
    assert 0.0 < found["step"] < 1.0


def test_figures_are_set_side_by_side() -> None:
    told = {"grpo tiny": {"update": 0.9, "peak bytes": 2.0 * GIB}}
    found = {"grpo tiny": {"update": 1.0, "grading": 0.05, "peak bytes": 1.6 * GIB}}
    rows = [line.split() for line in plan_gpu.report(told, found)[1:]]

    assert rows == [
        ["grpo", "tiny", "update", "1000.0", "ms", "900.0", "ms", "-10.0%"],
        ["grpo", "tiny", "grading", "50.0", "ms", "-"],
        ["grpo", "tiny", "peak", "bytes", "1.60", "GiB", "2.00", "GiB", "+25.0%"],
    ]
