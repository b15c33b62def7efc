# SPDX-License-Identifier: Apache-2.0
"""Podium's side of the GRPO benchmark: podium.train on a recipe, as a user calls it, on Ray, colocated."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import podium
from grpo_clock import StepClock
from grpo_task import CLIP_NORM, LEARNING_RATE, PROMPTS, SAMPLES, SideResult, Task
from podium.observe import read_metrics

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--without-fork-server", action="store_true")
    parser.add_argument("--without-restarts", action="store_true", help="no snapshots in memory")
    parser.add_argument("--adapter", choices=["auto", "merged", "apart"], help="rollout.adapter, with an adapter")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        # Named only where it is not the default: other commits that are compared may not know it.
        placement: dict[str, object] = {"fork_workers": False} if asked.without_fork_server else {}
        placement |= {"restarts": 0} if asked.without_restarts else {}
        train(Task.read(asked.task), asked.devices, placement, scratch, asked.adapter).write(asked.out)


def train(
    task: Task, devices: int, placement: Mapping[str, object], scratch: str, adapter: str | None = None
) -> SideResult:
    """Trains for `steps` and accounts what came after `warmup`."""
    StepClock.cpu_at = frozenset({task.warmup, task.steps})
    podium.train(recipe_of(task, devices, placement, scratch, adapter))
    lines = [each for each in read_metrics(Path(scratch) / "grpo" / "metrics.jsonl") if "step_s" in each.values]
    assert [line.step for line in lines] == list(range(1, task.steps + 1))
    timed = [line.values for line in lines[task.warmup :]]
    for values in timed:
        assert values["rollout/generated_tokens"] == task.generated_per_step, "an answer ended early"
        assert values["episodes/learned_from"] == PROMPTS * SAMPLES
        assert values["optimizer_steps"] == 1
    wall_s = StepClock.wall_s[task.warmup - 1 :]
    names = set.intersection(*(set(values) for values in timed))
    return SideResult(
        step_s=[end - begin for begin, end in pairwise(wall_s)],
        cpu_s=(StepClock.cpu_s[task.steps] - StepClock.cpu_s[task.warmup]) / len(timed),
        reward=statistics.mean(values["reward/mean"] for values in timed),
        phases={name: statistics.median(values[name] for values in timed) for name in sorted(names)},
    )


def recipe_of(
    task: Task, devices: int, placement: Mapping[str, object], scratch: str, adapter: str | None = None
) -> podium.Recipe:
    """The recipe of the task, whose run is in `scratch`. `adapter`: rollout.adapter, if it is not the default."""
    # The thread and the kernels that suit so small a model are given, as they are to the peer: measuring them at the
    # start, as Podium does otherwise, is at the mercy of what else runs then.
    cpu = {"threads": 1, "onednn": False} if task.device == "cpu" else {}
    return podium.parse_recipe(
        {
            "program": "grpo",
            "model": {"path": str(task.model), "init": "random"}
            | ({} if task.lora is None else {"lora": {"rank": task.lora}}),
            "data": {
                "train": [{"path": str(task.prompts)}],
                "shuffle": False,
                "max_length": task.longest + task.new_tokens,
            },
            "rollout": {
                "prompts_per_step": PROMPTS,
                "samples_per_prompt": SAMPLES,
                "max_new_tokens": task.new_tokens,
            }
            | ({} if adapter is None else {"adapter": adapter}),
            "reward": [{"function": f"{HERE / 'grpo_reward.py'}:small_digits"}],
            "optimizer": {"lr": LEARNING_RATE, "clip_norm": CLIP_NORM},
            "steps": task.steps,
            "placement": {
                "launcher": "ray",
                "layout": "colocated",
                "devices": devices,
                "device": task.device,
                **cpu,
                **placement,
            },
            "run": {"folder": scratch, "name": "grpo", "loggers": ["grpo_clock:StepClock"]},
        }
    )


if __name__ == "__main__":
    main()
