# SPDX-License-Identifier: Apache-2.0
"""Seconds of a GRPO step where answers have a heavy tail and the reward is slow: this commit beside another, in turns.

    .venv/bin/python benchmarks/overlap.py --against OTHER/src

Tiny Qwen3 on CPU, two workers on Ray, 8 prompts x 8 samples. Answers have log-normal lengths (sigma 1, at most 16 times
the median), the same on both sides: the generator ends each at its given length, and the learning rate changes no
weight. The reward takes 0.3 s a call and has 4 graders. The figure is the median over the timed steps of all turns."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from grpo import HERE, Side, run_side
from grpo_task import SideResult, Task, make_task
from overlap_task import CAP, MEDIAN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="src of another commit of Podium")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a turn, warm-up included")
    parser.add_argument("--warmup", type=int, default=2)
    asked = parser.parse_args()
    command = (sys.executable, str(HERE / "overlap_podium.py"))
    sides = [Side(name="this commit", command=command, threads=1)]
    if asked.against is not None:
        sides.append(Side(name="other commit", command=command, threads=1, source=asked.against))
    results: dict[str, list[SideResult]] = {side.name: [] for side in sides}
    with tempfile.TemporaryDirectory() as scratch:
        task = Task(
            folder=scratch, shape="tiny", device="cpu", steps=asked.steps, warmup=asked.warmup, shortest=8, longest=64,
            new_tokens=CAP * MEDIAN,
        )  # fmt: skip
        make_task(task)
        task.write(Path(scratch) / "task.json")
        for turn in range(asked.turns):
            for side in sides:
                found = run_side(side, Path(scratch))
                results[side.name].append(found)
                shares = ", ".join(
                    f"{name} {found.phases.get(f'time/{name}_s', 0.0):.2f}" for name in ("rollout", "grade", "update")
                )
                print(
                    f"turn {turn + 1}: {side.name:<13} {statistics.median(found.step_s):6.3f} s/step ({shares})",
                    flush=True,
                )
    medians = {
        name: statistics.median(second for turn in turns for second in turn.step_s) for name, turns in results.items()
    }
    rewards = {round(turn.reward, 9) for turns in results.values() for turn in turns}
    print(f"rewards {'equal' if len(rewards) == 1 else f'differ: {rewards}'}")
    for name, seconds in medians.items():
        print(f"{name}: {seconds:.3f} s/step")
    if asked.against is not None:
        print(f"this commit is {medians['other commit'] / medians['this commit']:.2f} times as fast")


if __name__ == "__main__":
    main()
