# SPDX-License-Identifier: Apache-2.0
"""A GRPO step where answers have a heavy tail and the reward is slow: this commit beside another, or layouts of this
commit beside each other, in turns.

    .venv/bin/python benchmarks/overlap.py --against OTHER/src
    .venv/bin/python benchmarks/overlap.py --layouts --workload judge
    .venv/bin/python benchmarks/overlap.py --layouts --workload agent

Tiny Qwen3 on CPU, two workers on Ray, 8 prompts x 8 samples (or `--samples`). Answers have log-normal lengths (sigma 1,
at most 16 times the median), the same on both sides: the generator ends each at its given length, and the learning rate
changes no weight. The reward takes 0.3 s a call and has 4 graders. The figure is the median over the timed steps of all
turns. A run goes on for `--cooldown` steps after those: towards its end the scheduler admits less. With --layouts the
figure is trained tokens per second, the median of the turns. With `judge` the reward waits for its 0.3 s (async def),
so that graders do not limit the speed: 64 blocking calls take 4 graders 4.8 s. `agent` has episodes of `--agent-turns`
turns of up to `--turn-tokens` tokens, with a tool of 0.2 to 1 s after each, instead of the reward."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo import HERE, Side, run_side
from grpo_task import SAMPLES, SideResult, Task, make_task
from overlap_task import CAP, MEDIAN

LAYOUTS = (
    ("colocated", "colocated", 0), ("split", "split", 0), ("split, staleness 1", "split", 1),
    ("split, staleness 2", "split", 2), ("elastic, staleness 0", "elastic", 0), ("elastic, staleness 1", "elastic", 1),
    ("elastic, staleness 2", "elastic", 2),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="src of another commit of Podium")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a turn, warm-up included")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--cooldown", type=int, help="further steps, which are not timed; default: staleness + 1")
    parser.add_argument("--layouts", action="store_true", help="compare colocated, split and elastic, with staleness")
    parser.add_argument(
        "--only", nargs="+", metavar="LAYOUT", help="some of them; colocated and split are always there"
    )
    parser.add_argument("--workload", choices=("reward", "judge", "agent"), default="reward")
    parser.add_argument("--agent-turns", type=int, default=3, help="of an episode of workload agent")
    parser.add_argument("--turn-tokens", type=int, default=MEDIAN, help="the most of a turn of workload agent")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a prompt")
    asked = parser.parse_args()
    command = (sys.executable, str(HERE / "overlap_podium.py"))
    command += ("--workload", asked.workload)
    if asked.cooldown is not None:
        command += ("--cooldown", str(asked.cooldown))
    if asked.samples != SAMPLES:
        command += ("--samples", str(asked.samples))
    if asked.workload == "agent":
        command += ("--agent-turns", str(asked.agent_turns), "--turn-tokens", str(asked.turn_tokens))
    sides = [Side(name="this commit", command=command, threads=1)]
    if asked.layouts:
        sides = [
            Side(name=name, command=(*command, "--layout", layout, "--staleness", str(staleness)), threads=1)
            for name, layout, staleness in LAYOUTS
            if asked.only is None or name in ("colocated", "split", *asked.only)
        ]
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
                    f"{name} {found.phases.get(f'time/{name}_s', 0.0):.2f}"
                    for name in ("rollout", "wait", "grade", "update")
                )
                print(
                    f"turn {turn + 1}: {side.name:<20} {statistics.median(found.step_s):6.3f} s/step ({shares}, "
                    f"install {found.phases.get('rollout/install_s', 0.0):.3f}, "
                    f"gain {found.phases.get('lending/gain', 0.0):.2f}), "
                    f"{found.phases['trained_tokens_per_s']:.0f} trained tokens/s",
                    flush=True,
                )
    if asked.layouts:
        compare_layouts(results)
        return
    medians = {
        name: statistics.median(second for turn in turns for second in turn.step_s) for name, turns in results.items()
    }
    rewards = {round(turn.reward, 9) for turns in results.values() for turn in turns}
    print(f"rewards {'equal' if len(rewards) == 1 else f'differ: {rewards}'}")
    for name, seconds in medians.items():
        print(f"{name}: {seconds:.3f} s/step")
    if asked.against is not None:
        print(f"this commit is {medians['other commit'] / medians['this commit']:.2f} times as fast")


def compare_layouts(results: Mapping[str, Sequence[SideResult]]) -> None:
    """Trained tokens per second, and each overlapped layout against the better synchronous one."""
    speeds = {
        name: statistics.median(turn.phases["trained_tokens_per_s"] for turn in turns)
        for name, turns in results.items()
    }
    best = max(speeds["colocated"], speeds["split"])
    for name, speed in speeds.items():
        print(f"{name:<20} {speed:8.0f} trained tokens/s, {speed / best:.2f} of the better synchronous layout")


if __name__ == "__main__":
    main()
