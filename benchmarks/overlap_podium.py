# SPDX-License-Identifier: Apache-2.0
"""One side of the overlap benchmark: podium.train with answers of given lengths and a slow reward, on Ray."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import podium
from grpo_clock import StepClock
from grpo_task import PROMPTS, SAMPLES, SideResult, Task
from overlap_task import CAP, MEDIAN
from podium.observe import read_metrics
from podium.roles import interfaces

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layout", choices=("colocated", "split", "elastic"), default="colocated")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--workload", choices=("reward", "judge", "agent"), default="reward")
    parser.add_argument("--agent-turns", type=int, default=3)
    parser.add_argument("--turn-tokens", type=int, default=MEDIAN)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--cooldown", type=int, help="steps after the timed ones; default: staleness + 1")
    asked = parser.parse_args()
    implementations: Any = interfaces.IMPLEMENTATIONS
    implementations[interfaces.Generator] = "overlap_task:MeasuredGenerator"
    with tempfile.TemporaryDirectory() as scratch:
        values = _recipe(Task.read(asked.task), scratch)
        values["placement"]["layout"] = asked.layout
        values["rollout"]["samples_per_prompt"] = asked.samples
        if asked.staleness:  # other commits may not know the key
            values["rollout"]["staleness"] = asked.staleness
        if asked.workload == "agent":
            _make_agent(values, asked.agent_turns, asked.turn_tokens)
        if asked.workload == "judge":
            values["reward"] = [{"function": f"{HERE / 'overlap_task.py'}:judge"}]
        values["steps"] += asked.staleness + 1 if asked.cooldown is None else asked.cooldown
        train(Task.read(asked.task), values, scratch).write(asked.out)


def train(task: Task, recipe: dict[str, Any], scratch: str) -> SideResult:
    """Trains, and accounts the steps after `warmup` up to `steps`. The recipe may have more: the scheduler admits less
    when it sees the end, and timed steps should not know of it."""
    samples = recipe["rollout"]["samples_per_prompt"]
    StepClock.cpu_at = frozenset({task.warmup, task.steps})
    podium.train(podium.parse_recipe(recipe))
    lines = [each for each in read_metrics(Path(scratch) / "overlap" / "metrics.jsonl") if "step_s" in each.values]
    timed = [line.values for line in lines[task.warmup : task.steps]]
    assert all(values["episodes/learned_from"] == PROMPTS * samples for values in timed)
    names = set.intersection(*(set(values) for values in timed))
    step_s = [end - begin for begin, end in pairwise(StepClock.wall_s[task.warmup - 1 : task.steps])]
    phases = {name: statistics.median(values[name] for values in timed) for name in sorted(names)}
    # Steps of a stale run have other groups than those of a synchronous one: only their sum can be compared.
    phases["trained_tokens_per_s"] = sum(values["trained_tokens"] for values in timed) / sum(step_s)
    return SideResult(
        step_s=step_s,
        cpu_s=(StepClock.cpu_s[task.steps] - StepClock.cpu_s[task.warmup]) / len(timed),
        reward=statistics.mean(values["reward/mean"] for values in timed),
        phases=phases,
    )


def _recipe(task: Task, scratch: str) -> dict[str, Any]:
    return {
        "program": "grpo",
        "model": {"path": str(task.model), "init": "random"},
        "data": {
            "train": [{"path": str(task.prompts)}], "shuffle": False, "max_length": task.longest + CAP * MEDIAN,
        },
        "rollout": {
            "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "max_new_tokens": CAP * MEDIAN,
        },
        "reward": [{"function": f"{HERE / 'overlap_task.py'}:slow_reward"}],
        "grading": {"workers": 4},
        # Weights stay as they are, so that both sides sample the same tokens in every step.
        "optimizer": {"lr": 1e-12, "clip_norm": 1.0},
        "steps": task.steps,
        "placement": {
            "launcher": "ray", "layout": "colocated", "devices": 2, "device": "cpu", "threads": 1, "onednn": False,
        },
        "run": {"folder": scratch, "name": "overlap", "loggers": ["grpo_clock:StepClock"]},
    }  # fmt: skip


def _make_agent(values: dict[str, Any], turns: int, turn_tokens: int) -> None:
    """Episodes of short turns, with a tool of 0.2 to 1 s after each, instead of a slow reward."""
    values["rollout"]["max_new_tokens"] = turn_tokens
    values["environment"] = {
        "environment": f"{HERE / 'overlap_task.py'}:SlowTool", "max_turns": turns, "timeout_s": 30,
        "options": {"turns": turns},
    }  # fmt: skip
    del values["reward"]
    values["grading"]["workers"] = 1  # the environment gives the rewards, and two cores have no room for more


if __name__ == "__main__":
    main()
