# SPDX-License-Identifier: Apache-2.0
"""Podium's side of the fine-tuning benchmark: podium.train on a recipe, as a user calls it, on one CPU thread."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import podium
from podium.observe import read_metrics
from podium.recipe import (
    DocumentDataSection,
    ModelSection,
    OptimizerSection,
    RunSection,
    SftRecipe,
    SourceSection,
    SpmdPlacementSection,
)
from sft_clock import StepClock
from sft_task import CLIP_NORM, LEARNING_RATE, MAX_TOKENS, SideResult, Task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        train(Task(folder=asked.task, rows=asked.rows), asked.steps, asked.warmup, scratch).write(asked.out)


def train(task: Task, steps: int, warmup: int, scratch: str) -> SideResult:
    """Trains for `steps` and accounts what came after `warmup`, from the run's own metrics."""
    podium.train(_recipe(task, steps, scratch))
    lines = [each for each in read_metrics(Path(scratch) / "sft" / "metrics.jsonl") if "step_s" in each.values]
    assert [line.step for line in lines] == list(range(1, steps + 1))
    assert len(StepClock.wall_s) == steps
    timed = lines[warmup:]
    return SideResult(
        side="Podium",
        steps=len(timed),
        tokens=round(sum(line.values["trained_tokens"] for line in timed)),
        wall_s=StepClock.wall_s[-1] - StepClock.wall_s[warmup - 1],
        cpu_s=StepClock.cpu_s[-1] - StepClock.cpu_s[warmup - 1],
        loss=sum(line.values["loss"] for line in lines) / steps,
    )


def _recipe(task: Task, steps: int, scratch: str) -> SftRecipe:
    return SftRecipe(
        program="sft",
        model=ModelSection(path=str(task.model)),
        data=DocumentDataSection(train=(SourceSection(path=str(task.documents)),), max_length=MAX_TOKENS),
        optimizer=OptimizerSection(lr=LEARNING_RATE, clip_norm=CLIP_NORM),
        steps=steps,
        tokens_per_step=task.tokens_per_step,
        placement=SpmdPlacementSection(device="cpu", threads=1, onednn=False),
        run=RunSection(folder=scratch, name="sft", loggers=("sft_clock:StepClock",)),
    )


if __name__ == "__main__":
    main()
