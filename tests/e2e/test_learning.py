# SPDX-License-Identifier: Apache-2.0
"""Every named method learns the arithmetic task within a dozen steps, by its own recipe in examples/methods; and with
rewards that say nothing nothing is learned.

All begin with the model that imitation left: it answers about a quarter of the held-out sums, because it estimates the
others as its demonstrations do, and could work out most of them. Margins are in held-out accuracy of greedy answers,
and well below what was seen with several seeds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podium import api
from podium.observe import read_metrics
from podium.recipe import PipelineRecipe, Recipe
from podium.recipe.pipeline_loading import load_any_recipe, stage_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
INLINE = ("placement.launcher=inline", "placement.devices=1", "placement.threads=1", "placement.onednn=false")
STEPS = 12
NUM_HELDOUT = 300
# Method -> (what is changed to make the run short, the least gain). Three of PPO's sixteen steps train the critic only.
SMALLER = ("rollout.prompts_per_step=16", f"steps={STEPS}")
METHODS: dict[str, tuple[tuple[str, ...], float]] = {
    "grpo": (SMALLER, 0.25),
    "dr_grpo": (SMALLER, 0.25),
    "dapo": (SMALLER, 0.25),
    "gspo": (SMALLER, 0.25),
    "cispo": (SMALLER, 0.20),
    "rloo": (SMALLER, 0.25),
    "opo": (SMALLER, 0.25),
    "reinforce_pp": (("rollout.prompts_per_step=128", f"steps={STEPS}"), 0.25),
    "reinforce_pp_baseline": (SMALLER, 0.25),
    "ppo": (("rollout.prompts_per_step=16", "steps=16", "critic.warmup_steps=3"), 0.15),
    "on_policy_distill": (SMALLER, 0.25),
    "expert_iteration": (SMALLER, 0.20),
    "best_half": (SMALLER, 0.15),
}
# What a careful teacher imitates: rows whose demonstration ends in the right number.
CAREFUL = """
def only_right(row):
    return row if row["messages"][1]["content"].rpartition("=")[2] == row["answer"] else None
"""
SHUFFLED = """
import random


class Shuffled:
    def __init__(self, seed):
        self.dice = random.Random(seed)

    def __call__(self, answers, references):
        rewards = [float(answer.rpartition("=")[2] == right) for answer, right in zip(answers, references, strict=True)]
        self.dice.shuffle(rewards)
        return rewards
"""


@pytest.fixture(scope="module", autouse=True)
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of somebody who ran the first half of `make demo`: the task, and the model that imitation left."""
    folder = tmp_path_factory.mktemp("arithmetic")
    (folder / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _task_maker().make_task(Path("demo"), seed=0)
        result = api.train(_imitation(), overrides=[*INLINE[1:], "evaluation={}", "data.heldout=[]"])
        api.export(result.folder, "demo/export")
        yield folder


def _imitation() -> Recipe:
    """The first stage of the demo, by itself."""
    pipeline = load_any_recipe("examples/arithmetic/pipeline.yaml")
    assert isinstance(pipeline, PipelineRecipe)
    return stage_recipe(pipeline, "sft", {}, Path("demo/runs"))


def _task_maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_arithmetic_task", ROOT / "examples/arithmetic/make_task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _teacher() -> str:
    """Trained further than the others begin, and on right demonstrations only."""
    Path("careful.py").write_text(CAREFUL)
    result = api.train(
        _imitation(),
        overrides=[
            *INLINE[1:], "model.path=demo/export", "data.train.0.map=careful.py:only_right", "data.heldout=[]",
            "evaluation={}", "optimizer.lr=2e-3", "steps=100", "run.name=teacher",
        ],
    )  # fmt: skip
    api.export(result.folder, "demo/teacher")
    return "demo/teacher"


def _scores(recipe: str, *overrides: str) -> list[float]:
    """Held-out accuracy before and after a run."""
    shorter = [*INLINE, f"evaluation.generation.prompts={NUM_HELDOUT}", "evaluation.generation.show=0"]
    result = api.train(recipe, overrides=[*shorter, *overrides])
    scores = [line.values.get("heldout/score") for line in read_metrics(result.folder / "metrics.jsonl")]
    return [score for score in scores if score is not None]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_raises_heldout_accuracy_by_its_margin(method: str) -> None:
    overrides, margin = METHODS[method]
    if method == "on_policy_distill":
        _teacher()
    before, after = _scores(f"examples/methods/{method}.yaml", *overrides)
    assert 0.15 < before < 0.45
    assert after >= before + margin, f"{method}: {before:.1%} -> {after:.1%}"


def test_nothing_is_learned_from_rewards_that_were_shuffled_over_the_batch() -> None:
    """The same run as Dr.GRPO's, with the same number of rewards in every step: only who gets them has changed."""
    Path("shuffled.py").write_text(SHUFFLED)
    reward = "{function: 'shuffled.py:Shuffled', per: batch, options: {seed: 0}}"
    before, after = _scores(
        "examples/methods/dr_grpo.yaml",
        *SMALLER,
        f"reward=[{reward}]",
        "evaluation.generation.score=examples/arithmetic/rewards.py:exact_answer",
        "run.name=shuffled",
    )
    # Accuracy wanders as the weights do: between -17 and +4 points with several seeds, where rewards gave 29 to 58.
    assert after < before + 0.10, f"{before:.1%} -> {after:.1%}"
