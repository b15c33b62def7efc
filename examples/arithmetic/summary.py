# SPDX-License-Identifier: Apache-2.0
"""Accuracy before and after each run on the arithmetic task, and answers of the last run side by side.

python examples/arithmetic/summary.py demo/runs/arithmetic/sft demo/runs/arithmetic/grpo
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.observe import read_metrics

EXPECTED_GAIN = 0.20  # of the last stage, in held-out accuracy
SHOWN = 6
SCORE = "heldout/score"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run by its first and its last evaluation."""

    run: Path
    first_step: int
    last_step: int
    before: float
    after: float

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def line(self) -> str:
        accuracy = f"{self.before:6.1%} -> {self.after:6.1%}"
        return f"  {self.run.name:<18} {accuracy}   {100 * self.gain:+.1f} points in {self.last_step} steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, in the order in which they ran")
    summarise(parser.parse_args().runs)


def summarise(runs: Sequence[Path]) -> None:
    stages = [read_stage(run) for run in runs]
    print("\nheld-out accuracy, greedy answers to questions that no training row has:")
    for stage in stages:
        print(stage.line)
    last = stages[-1]
    for line in side_by_side(last):
        print(line)
    if last.gain < EXPECTED_GAIN:
        print(
            f"warning: {last.run.name} gained {100 * last.gain:.1f} points, and {100 * EXPECTED_GAIN:.0f} or more were "
            f"expected. {last.run / 'metrics.jsonl'} has its steps."
        )
    print(f"run folders: {', '.join(map(str, runs))}")


def read_stage(run: Path) -> Stage:
    scored = [(line.step, line.values[SCORE]) for line in read_metrics(run / "metrics.jsonl") if SCORE in line.values]
    (first, before), (last, after) = scored[0], scored[-1]
    return Stage(run=run, first_step=first, last_step=last, before=before, after=after)


def side_by_side(stage: Stage) -> list[str]:
    rows = [json.loads(line) for line in (stage.run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    before = {row["prompt"]: row["answer"].strip() for row in rows if row["step"] == stage.first_step}
    after = [row for row in rows if row["step"] == stage.last_step and row["prompt"] in before]
    return [
        f"  {row['prompt']:<26} before: {before[row['prompt']]:<12} after: {row['answer'].strip():<12} {verdict(row)}"
        for row in after[:SHOWN]
    ]


def verdict(row: dict[str, Any]) -> str:
    return "right" if row["score"] == 1 else f"wrong, it is {row['reference']}"


if __name__ == "__main__":
    main()
