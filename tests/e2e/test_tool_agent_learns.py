# SPDX-License-Identifier: Apache-2.0
"""The agent of examples/calculator is rewarded for right answers only, and learns to call its tool, since the
calculator gives them, where its demonstrations mostly guess."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podium import api
from podium.observe import StepMetrics, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
ONE_THREAD = ("placement.threads=1", "placement.onednn=false")
STEPS = 16


@pytest.fixture(scope="module", autouse=True)
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of somebody who followed the comments of the example's sft.yaml."""
    folder = tmp_path_factory.mktemp("calculator")
    (folder / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _task_maker().make_task(Path("demo/calculator"), seed=0)
        result = api.train("examples/calculator/sft.yaml", overrides=ONE_THREAD)
        api.export(result.folder, "demo/calculator/warm")
        yield folder


def _task_maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_agents_task", ROOT / "examples/calculator/make_task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _learned(*overrides: str, recipe: str = "examples/calculator/grpo.yaml") -> list[StepMetrics]:
    result = api.train(
        recipe,
        overrides=[
            *ONE_THREAD, "placement.launcher=inline", f"steps={STEPS}", "evaluation.every=null",
            "evaluation.generation.prompts=100", "evaluation.generation.show=0", *overrides,
        ],
    )  # fmt: skip
    return read_metrics(result.folder / "metrics.jsonl")


def test_the_share_of_calls_and_the_reward_of_heldout_samples_rise() -> None:
    """Calls by 30 per hundred episodes, and right answers among samples for held-out questions by 15 points."""
    lines = _learned()
    calls = [line.values["environment/tool_calls"] for line in lines if "environment/tool_calls" in line.values]
    assert len(calls) == STEPS
    first, last = sum(calls[:2]) / 2, sum(calls[-4:]) / 4
    assert 0.15 < first < 0.55
    assert last >= first + 0.30, calls
    before, after = (line.values["heldout/pass@1"] for line in lines if "heldout/pass@1" in line.values)
    assert before < 0.40
    assert after >= before + 0.15, f"{before:.1%} -> {after:.1%}"


def test_the_same_agent_as_a_client_of_an_api_learns_too() -> None:
    """A second turn is the answer behind a call: it rises as the calls of the built-in agent do."""
    lines = _learned(recipe="examples/agent_client/grpo.yaml")
    turns = [line.values.get("turns/mean", 1.0) for line in lines if "environment/requests" in line.values]
    assert len(turns) == STEPS
    assert sum(turns[-4:]) / 4 >= sum(turns[:2]) / 2 + 0.30, turns
    before, after = (line.values["heldout/pass@1"] for line in lines if "heldout/pass@1" in line.values)
    assert before < 0.40
    assert after >= before + 0.15, f"{before:.1%} -> {after:.1%}"
