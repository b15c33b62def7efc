# SPDX-License-Identifier: Apache-2.0
"""Podium's side of the preference benchmark: podium.train on a recipe, as a user calls it, on one CPU thread."""

from __future__ import annotations

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Literal

import podium
from podium.observe import read_metrics
from podium.recipe import Recipe, parse_recipe
from preferences_task import BETA, CLIP_NORM, LEARNING_RATE, MAX_TOKENS, SideResult, Task
from sft_clock import StepClock

Program = Literal["dpo", "reward_model", "sft"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--program", choices=("dpo", "reward_model", "sft"), required=True)
    parser.add_argument("--side", required=True, help="what the result is called")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        train(Task.read(asked.task), asked.program, asked.side, scratch).write(asked.out)


def train(task: Task, program: Program, side: str, scratch: str) -> SideResult:
    """Trains through the whole task; figures are the run's own metrics, clocks those of its logger."""
    podium.train(_recipe(task, program, scratch))
    lines = [each for each in read_metrics(Path(scratch) / "run" / "metrics.jsonl") if "step_s" in each.values]
    assert [line.step for line in lines] == list(range(1, task.steps + 1))
    assert len(StepClock.wall_s) == task.steps
    counted = "tokens" if program == "reward_model" else "trained_tokens"
    return SideResult(
        side=side,
        wall_s=[end - begin for begin, end in pairwise(StepClock.wall_s[task.warmup - 1 :])],
        cpu_s=[end - begin for begin, end in pairwise(StepClock.cpu_s[task.warmup - 1 :])],
        losses=[line.values["loss"] for line in lines],
        tokens=[round(line.values[counted]) for line in lines],
        places=[round(line.values["tokens"]) for line in lines],
    )


def _recipe(task: Task, program: Program, scratch: str) -> Recipe:
    """`sft` trains on the two completions of every pair, as many documents a step as `dpo` does."""
    file = {"dpo": task.pairs_file, "reward_model": task.ended_pairs_file, "sft": task.documents_file}[program]
    values = {
        "program": program,
        "model": {"path": str(task.scorer if program == "reward_model" else task.model)},
        "data": {"train": [{"path": str(file)}], "max_length": MAX_TOKENS, "shuffle": False},
        "optimizer": {"lr": LEARNING_RATE, "clip_norm": CLIP_NORM},
        "steps": task.steps,
        "rows_per_step": 2 * task.pairs if program == "sft" else task.pairs,
        "placement": {"device": "cpu", "threads": 1, "onednn": False},
        "run": {"folder": scratch, "name": "run", "loggers": ["sft_clock:StepClock"]},
    }
    if program == "dpo":
        values["preference"] = {"loss": "sigmoid", "beta": BETA, "reference": "cached"}
    return parse_recipe(values)


if __name__ == "__main__":
    main()
