# SPDX-License-Identifier: Apache-2.0
"""What staleness does to learning: the demo's sums, or the agent with the calculator, at several bounds and seeds, with
and without correction.

    .venv/bin/python benchmarks/staleness.py --task sums --folder FOLDER
    .venv/bin/python benchmarks/staleness.py --task agent --folder FOLDER

Each task is prepared once (a model that imitates its demonstrations), then trained by GRPO with one device that learns
and enough that generate for episodes to reach the bound. Prints a table of held-out scores. A second call repeats
nothing that is finished in `--folder`."""

from __future__ import annotations

import argparse
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from podium.observe import read_metrics
from podium.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = (0, 1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """How a task is prepared, and the recipe that is compared."""

    maker: tuple[str, ...]
    sft: str
    warm: str  # folder of the model that GRPO begins with
    grpo: str
    score: str
    generators: int  # beside one device that learns


SUMS_SFT = """
program: sft
model: demo/model
data: {train: [{path: demo/train.jsonl}]}
tokens_per_step: 576
optimizer: {lr: 4.0e-3, schedule: cosine, warmup_steps: 20, weight_decay: 0.1, betas: [0.9, 0.95]}
steps: 340
placement: {devices: 1, threads: 1, onednn: false}
run: {name: sft, folder: runs}
"""
SUMS_GRPO = """
program: grpo
model: warm
data: {train: [{path: demo/train.jsonl}], heldout: [{path: demo/heldout.jsonl}]}
reward: [{function: examples/arithmetic/rewards.py:exact_answer}]
rollout: {prompts_per_step: 32, samples_per_prompt: 8, max_new_tokens: 12}
algorithm: {advantage: group_centered, loss: clipped, clip_high: 0.28, reduction: token_mean}
optimizer: {lr: 5.0e-4, schedule: linear, warmup_steps: 3, betas: [0.9, 0.95]}
steps: 40
evaluation: {generation: {prompts: 600, max_new_tokens: 12}}
"""
TASKS = {
    "sums": Task(
        maker=("examples/arithmetic/make_task.py", "demo"), sft="sums-sft.yaml", warm="warm", grpo="sums-grpo.yaml",
        score="heldout/score", generators=3,
    ),
    "agent": Task(
        maker=("examples/calculator/make_task.py", "demo/calculator"), sft="examples/calculator/sft.yaml",
        warm="demo/calculator/warm", grpo="examples/calculator/grpo.yaml", score="heldout/pass@1", generators=1,
    ),
}  # fmt: skip
# How old tokens are treated -> the recipe's changes.
TREATMENTS = {
    "ratios": ("algorithm.correction=none",),  # the loss clips ratios against the weights that sampled
    "truncated": ("algorithm.correction=token_truncate",),  # truncated importance sampling; nothing is clipped
    "ignored": ("algorithm.correction=none", "algorithm.proximal=always"),  # as if the newest weights had sampled
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A bound, and how old tokens are treated."""

    staleness: int
    treatment: str

    @property
    def name(self) -> str:
        return f"{self.staleness}, {self.treatment}" if self.staleness else "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one run."""

    score: float
    reward: float  # mean of the last ten steps
    staleness: float  # mean over all steps
    ess: float  # lowest effective sample size of the ratios by which old tokens are corrected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), default="sums")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--staleness", type=int, nargs="+", default=list(BOUNDS))
    parser.add_argument("--treatments", nargs="+", choices=list(TREATMENTS), default=list(TREATMENTS))
    parser.add_argument("--set", dest="changes", action="append", default=[], help="a change of the recipe, KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--folder", type=Path, required=True)
    asked = parser.parse_args()
    task, folder = TASKS[asked.task], asked.folder
    prepare(task, folder)
    variants = [
        Variant(staleness=bound, treatment=treatment)
        for treatment in asked.treatments
        for bound in asked.staleness
        if bound or treatment == asked.treatments[0]
    ]
    with ThreadPoolExecutor(asked.jobs) as pool:
        runs = {
            variant.name: [pool.submit(run, task, folder, variant, seed, asked.changes) for seed in range(asked.seeds)]
            for variant in variants
        }
        rows = []
        for name, outcomes in runs.items():
            rows.append((name, [outcome.result() for outcome in outcomes]))
            print(line(*rows[-1]), flush=True)
    print("\nHeld-out scores with their standard error.\n")
    print("| staleness | held-out score | of each seed | reward, last 10 steps | age of episodes | lowest ESS |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(line(*row))


def prepare(task: Task, folder: Path) -> None:
    """Makes the task and the model that GRPO begins with, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / task.warm).exists():
        return
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "sums-sft.yaml").write_text(SUMS_SFT, encoding="utf-8")
    (folder / "sums-grpo.yaml").write_text(SUMS_GRPO, encoding="utf-8")
    call(folder, task.maker)
    podium(folder, "train", task.sft, "--set", "run.name=sft", "--set", "run.folder=runs")
    podium(folder, "export", "runs/sft", task.warm)


def run(task: Task, folder: Path, variant: Variant, seed: int, more: Sequence[str]) -> Outcome:
    """One run; of a finished one, only its result."""
    name = "-".join([Path(task.grpo).stem, str(variant.staleness), variant.treatment, str(seed)])
    name = "-".join([name, *(re.sub(r"[^A-Za-z0-9.]+", "_", change) for change in more)])
    path = folder / "runs" / name
    if not (path.exists() and RunFolder.open(path).status == "finished"):
        changes = [placement(task), f"rollout.staleness={variant.staleness}", f"run.seed={seed}", f"run.name={name}"]
        changes += ["run.folder=runs", "evaluation.every=null", "evaluation.at_start=false"]
        changes += [*TREATMENTS[variant.treatment], *more] if variant.staleness else more
        podium(folder, "train", task.grpo, "--overwrite", *(part for each in changes for part in ("--set", each)))
    lines = [each.values for each in read_metrics(path / "metrics.jsonl")]
    steps = [values for values in lines if "reward/mean" in values]
    return Outcome(
        score=next(values[task.score] for values in reversed(lines) if task.score in values),
        reward=statistics.mean(values["reward/mean"] for values in steps[-10:]),
        staleness=statistics.mean(values["staleness/mean"] for values in steps),
        ess=min(values.get("staleness/ess", 1.0) for values in steps),
    )


def placement(task: Task) -> str:
    devices = f"devices: {task.generators + 1}, rollout_devices: {task.generators}"
    return f"placement={{layout: split, {devices}, device: cpu, threads: 1, onednn: false}}"


def line(name: str, outcomes: Sequence[Outcome]) -> str:
    scores = [each.score for each in outcomes]
    error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else math.nan
    return (
        f"| {name} | {statistics.mean(scores):.1%} ± {100 * error:.1f} | "
        f"{', '.join(f'{score:.1%}' for score in scores)} | "
        f"{statistics.mean(each.reward for each in outcomes):.3f} | "
        f"{statistics.mean(each.staleness for each in outcomes):.2f} | {min(each.ess for each in outcomes):.2f} |"
    )


def podium(folder: Path, *arguments: str) -> None:
    call(folder, ("-m", "podium", *arguments))


def call(folder: Path, arguments: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


if __name__ == "__main__":
    main()
