# SPDX-License-Identifier: Apache-2.0
"""Run folders with one injected problem each, in the formats of real runs. The simulated ones have the real controller
and a virtual clock; those whose problem a run of seconds cannot show are written. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.simulated_runs import COSTS, simulated, simulated_recipe
from podium.controller.simulation.costs import LogNormal, UpdateCost
from podium.runs.folder import RunFolder

BEGIN_S, STEP_S = 1_790_000_000.0, 4.0
STEPS = 24


def slow_grader(folder: Path) -> Path:
    """A reward of 4 s, and two graders for 16 answers."""
    costs = replace(
        COSTS, update=UpdateCost(token_s=0.0005, constant_s=0.1), grading_s=LogNormal(median=4.0), graders=2
    )
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_running": 16}
    recipe = simulated_recipe(folder, rollout=rollout, steps=12, grading={"workers": 2})
    return with_gradients(simulated(recipe, costs).result.folder)


def stale_weights(folder: Path) -> Path:
    """Answers wait for up to four updates, and nothing corrects for it."""
    costs = replace(COSTS, update=UpdateCost(token_s=0.02, constant_s=2.0), answer_tokens=LogNormal(median=20.0))
    recipe = simulated_recipe(
        folder, placement={"layout": "split", "devices": 2}, rollout={"staleness": 4}, steps=16,
        algorithm={"correction": "none"},
    )  # fmt: skip
    return with_gradients(simulated(recipe, costs).result.folder)


def with_gradients(run: Path) -> Path:
    """Simulated learners learn nothing, and gradients of 0 would be a problem of their own."""
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    changed = [{**line, "grad_norm": 1.0, "loss": 0.1 * (-1) ** line["step"]} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in changed))
    return run


def healthy(folder: Path) -> Path:
    """Nothing is wrong with this one."""
    return written(folder, lambda step: {})


def slow_generator(folder: Path) -> Path:
    """One of three engines takes twice as long for a step."""
    return written(folder, lambda step: {}, engine_ms=(28.0, 58.0, 28.5))


def length_explosion(folder: Path) -> Path:
    """Answers grow from 200 to 900 tokens while the reward goes up a little."""
    return written(folder, lambda step: {"response/mean": 200.0 + 32 * step, "episodes/truncated": step / 60})


def wrong_reward(folder: Path) -> Path:
    """The reward pays for something that held-out answers are not solved by."""
    return written(
        folder,
        lambda step: {"reward/mean": 0.2 + 0.03 * step},
        heldout={0: 0.42, 8: 0.4, 16: 0.15, 24: 0.04},
    )


def written(
    folder: Path, values: Callable[[int], Mapping[str, float]], *, engine_ms: tuple[float, ...] = (28.0, 29.0, 28.5),
    heldout: Mapping[int, float] | None = None,
) -> Path:  # fmt: skip
    """A run of three generators and a learner. `values`: metrics of a step that are not those of a healthy one;
    `engine_ms`: of a step of each engine; `heldout`: share of solved answers by step."""
    recipe = simulated_recipe(
        folder, placement={"layout": "split", "devices": 4, "rollout_devices": 3}, rollout={"staleness": 1},
        data={"heldout": [{"path": str(folder / "train.jsonl")}]}, steps=STEPS,
        evaluation={"every": 8, "generation": {"prompts": 256}},
    )  # fmt: skip
    run = RunFolder.create(recipe)
    solved = {0: 0.3, 8: 0.34, 16: 0.4, 24: 0.45} if heldout is None else heldout
    lines = []
    for step in range(STEPS + 1):
        at_s = BEGIN_S + 10 + STEP_S * step
        if step:
            lines.append({"step": step, "time_s": at_s, **healthy_metrics(step), **values(step)})
        if step in solved:
            lines.append({"step": step, "time_s": at_s, "heldout/solved": solved[step]})
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.path / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _spans(engine_ms)))
    run.update(status="finished", step=STEPS)
    return run.path


def healthy_metrics(step: int) -> dict[str, float]:
    """A step of a run that learns."""
    return {
        "step_s": STEP_S, "loss": 0.01 * (-1) ** step, "grad_norm": 0.5 + 0.02 * (step % 5), "lr": 1e-6,
        "reward/mean": 0.3 + 0.005 * step, "reward/std": 0.3, "response/mean": 200.0 + 10 * (step % 3),
        "episodes": 64.0, "episodes/truncated": 0.02, "entropy": 0.9 - 0.005 * step, "gap/mean": 1e-4,
        "kl/reference": 0.0002 * step, "kl/behavior": 1e-4, "staleness/mean": 0.6, "staleness/max": 1.0,
        "staleness/kl": 1e-3, "staleness/ess": 0.97, "groups/solve_rate": 0.3 + 0.005 * step,
        "groups/uniform": 0.2, "skipped": 0.0,
    }  # fmt: skip


def _spans(engine_ms: tuple[float, ...]) -> list[dict[str, Any]]:
    """Generation and update overlap, and both go on nearly all the time. An engine runs 8 lanes."""
    found: list[dict[str, Any]] = [
        {"worker": "controller", "spans": [["launch", BEGIN_S, 0.0], ["start-up", BEGIN_S, 10.0]]}
    ]
    for step in range(STEPS):
        at_s = BEGIN_S + 10 + STEP_S * step
        found.append({"worker": "controller", "spans": [["update", at_s, 3.7], ["publish", at_s + 3.7, 0.2]]})
        found.append({"worker": "train[0]@node/gpu0#0", "spans": [["policy.update", at_s, 3.7]]})
        for rank, step_ms in enumerate(engine_ms):
            steps = round(3800 / step_ms)
            engine = {"steps": steps, "lanes": 8.0, "generated_tokens": 8 * steps, "prefilled_tokens": 64}
            spans = [["generator.stream", at_s, 3.8], ["generator.stream > steps", at_s, 3.8, engine]]
            found.append({"worker": f"rollout[{rank}]@node/gpu{rank + 1}#0", "spans": spans})
    return found
