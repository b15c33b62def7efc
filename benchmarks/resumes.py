# SPDX-License-Identifier: Apache-2.0
"""Is a resumed run the unbroken one, bit for bit? Every program is run once, saved after every step, and resumed from
random checkpoints; final weights, metrics and ledgers are compared.

    python benchmarks/resumes.py --checkpoints 120 --seed 0

Prints a table. Runs on one device are resumed in this process, the others by `podium resume`. Exit code 1: one differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kills_run import ledger_of, metrics_of, weights_of
from kills_task import STEPS, Task, make_task, recipe

_COMMAND_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recipe: a layout of the fault-injection benchmark, with sections changed key by key."""

    layout: str = "colocated"
    changes: Mapping[str, Any] = field(default_factory=dict)
    in_process: bool = True  # on one device; otherwise two workers or ranks


def _inline(**changes: Any) -> Case:
    return Case(changes={"placement": {"launcher": "inline", "layout": "colocated", "devices": 1}, **changes})


def _fixed(data: str, *, devices: int = 1, **changes: Any) -> Case:
    """A program on fixed data: what only on-policy programs know is taken out."""
    dropped = dict.fromkeys(("rollout", "reward", "environment"))
    placement = {"launcher": "local", "layout": None, "devices": devices}
    sections = {"data": {"train": [{"path": f"{data}.jsonl"}], "heldout": [{"path": f"{data}.jsonl"}]}}
    return Case(changes={"placement": placement, **dropped, **sections, **changes}, in_process=devices == 1)


_EVALUATED = {
    "data": {"heldout": [{"path": "prompts.jsonl"}]},
    "evaluation": {"every": 2, "generation": {"prompts": 3, "max_new_tokens": 8}},
}
CASES: dict[str, Case] = {
    "grpo": _inline(algorithm={"epochs": 2, "mini_batches": 2}),
    "grpo, evaluated": _inline(**_EVALUATED),
    "grpo, adaptive KL": _inline(
        algorithm={"kl": {"coefficient": 0.2, "target": 0.001, "horizon": 100, "refresh_every": 3}},
        optimizer={"schedule": "cosine"},
    ),
    "grpo, LoRA": _inline(model={"lora": {"rank": 4}}),
    "grpo, tokens kept in blocks of 8": _inline(rollout={"block_size": 8, "memory_gib": 0.0001}),
    "grpo, environment": Case(
        layout="environment",
        changes={"placement": {"launcher": "inline", "layout": "colocated", "devices": 1}},
    ),
    "dynamic sampling": _inline(algorithm={"dynamic_sampling": True}, rollout={"samples_per_prompt": 2}),
    "reinforce++": _inline(algorithm={"advantage": "reinforce_pp"}),
    "ppo": _inline(program="ppo", critic={"warmup_steps": 1}, algorithm={"lam": 0.9, "epochs": 2}),
    "expert iteration": _inline(program="expert_iteration", grading={"solved_at": 0.3}),
    "on-policy distillation": _inline(program="on_policy_distill", teachers=[{"path": "teacher"}], reward=None),
    "sft": _fixed("demonstrations", program="sft", tokens_per_step=256),
    "dpo": _fixed("pairs", program="dpo", rows_per_step=8),
    "kto": _fixed("labels", program="dpo", preference={"loss": "kto"}, rows_per_step=8),
    "reward model": _fixed("pairs", program="reward_model", rows_per_step=8),
    "distill": _fixed("demonstrations", program="distill", teachers=[{"path": "teacher"}], tokens_per_step=256),
    "sft, two ranks": _fixed("demonstrations", devices=2, program="sft", tokens_per_step=256),
    "grpo, two Ray workers": Case(in_process=False),
    "dynamic sampling, two Ray workers": Case(
        in_process=False, changes={"algorithm": {"dynamic_sampling": True}, "rollout": {"samples_per_prompt": 2}}
    ),
    "ppo, two Ray workers": Case(in_process=False, changes={"program": "ppo"}),
    "grpo, split": Case(layout="split", in_process=False),
    "grpo, environment, two Ray workers": Case(layout="environment", in_process=False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", type=int, default=110, help="resumed in all, at least one of every case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="*", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--slow-share", type=float, default=0.4, help="how often a case of several processes is taken")
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    options = parser.parse_args()
    draws = drawn(options.cases, options.checkpoints, options.seed, options.slow_share)
    with contextlib.ExitStack() as stack:
        place = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="podium-resumes-")))
        task = make_task(place.resolve())
        write_fixed_data(task)
        rows = [run_case(task, name, steps) for name, steps in draws.items()]
    print(table(rows))
    return 0 if all(row.equal == row.resumed for row in rows) else 1


def drawn(cases: Sequence[str], checkpoints: int, seed: int, slow_share: float) -> dict[str, list[int]]:
    """Which steps each case is resumed after. Without repetition, until all steps of all cases are taken."""
    draw = random.Random(seed)
    left = {name: draw.sample(range(1, STEPS), STEPS - 1) for name in cases}
    taken: dict[str, list[int]] = {name: [left[name].pop()] for name in cases}
    while sum(map(len, taken.values())) < checkpoints and any(left.values()):
        open_cases = [name for name in cases if left[name]]
        weights = [1.0 if CASES[name].in_process else slow_share for name in open_cases]
        name = draw.choices(open_cases, weights)[0]
        taken[name].append(left[name].pop())
    return {name: sorted(steps) for name, steps in taken.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one case."""

    name: str
    resumed: int
    weights: int  # as many had equal final weights and moments
    metrics: int
    ledger: int
    equal: int  # in all of these
    seconds: float
    differing: tuple[int, ...]  # steps after which a resumed run was another


def run_case(task: Task, name: str, steps: Sequence[int]) -> Row:
    """The unbroken run, then a copy of it resumed after each of these steps."""
    began, case = time.monotonic(), CASES[name]
    file, runs = task.folder / f"case-{list(CASES).index(name)}.yaml", task.folder / "runs"
    file.write_text(json.dumps(recipe_of(task, case)), encoding="utf-8")
    whole = runs / file.stem
    run_podium(case, ["train", file.name], task.folder)
    same: list[tuple[bool, bool, bool]] = []
    for step in steps:
        again = Path(shutil.copytree(whole, runs / f"{file.stem}-after-{step}"))
        run_podium(case, ["resume", str(again), "--step", str(step)], task.folder)
        same.append(
            (
                weights_of(again) == weights_of(whole),
                metrics_of(again) == metrics_of(whole),
                ledger_of(again) == ledger_of(whole),
            )
        )
        shutil.rmtree(again)
    shutil.rmtree(whole)
    row = Row(
        name=name,
        resumed=len(steps),
        weights=sum(each[0] for each in same),
        metrics=sum(each[1] for each in same),
        ledger=sum(each[2] for each in same),
        equal=sum(map(all, same)),
        seconds=time.monotonic() - began,
        differing=tuple(step for step, each in zip(steps, same, strict=True) if not all(each)),
    )
    print(row, flush=True)
    return row


def recipe_of(task: Task, case: Case) -> dict[str, Any]:
    """What a change replaces is keys of its section; None takes a key or the section out."""
    values = recipe(task, case.layout)
    for key, change in case.changes.items():
        if isinstance(change, dict):
            merged = {**values.get(key, {}), **change}
            change = {name: value for name, value in merged.items() if value is not None}
        values[key] = change
    values["checkpoint"] = {"every": 1, "keep": STEPS, "background": False}
    values["run"] = {"folder": "runs"}
    return {key: value for key, value in values.items() if value is not None}


def run_podium(case: Case, arguments: list[str], folder: Path) -> None:
    """To its end, or an error with what it said."""
    if not case.in_process:
        command = [sys.executable, "-m", "podium", *arguments]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        if ended.returncode:
            raise SystemExit(
                f"`podium {' '.join(arguments)}` ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
            )
        return
    import podium

    with contextlib.chdir(folder), (folder / "console.txt").open("a") as out, contextlib.redirect_stdout(out):
        if arguments[0] == "train":
            podium.train(arguments[1])
        else:
            podium.resume(arguments[1], step=int(arguments[3]))


def write_fixed_data(task: Task) -> None:
    """Demonstrations, pairs, labelled answers, and a teacher: another model of the same shape."""
    draw = random.Random(1)
    questions = [(draw.randrange(10 ** draw.randint(1, 4)), draw.randrange(10)) for _ in range(200)]
    demonstrations, pairs, labels = [], [], []
    for at, (left, right) in enumerate(questions):
        asked = [{"role": "user", "content": f"what is {left}+{right}?"}]
        good, bad = ([{"role": "assistant", "content": text}] for text in (f"{left + right}.", f"{left - right} or so"))
        demonstrations.append({"messages": [*asked, *good]})
        pairs.append({"prompt": asked, "chosen": good, "rejected": bad})
        labels.append({"prompt": asked, "completion": bad if at % 2 else good, "label": at % 2 == 0})
    for name, rows in (("demonstrations", demonstrations), ("pairs", pairs), ("labels", labels)):
        (task.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if not (task.folder / "teacher").exists():
        import torch
        import transformers

        shutil.copytree(task.model, task.folder / "teacher")
        torch.manual_seed(1)
        config = transformers.AutoConfig.from_pretrained(task.model)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(task.folder / "teacher")


def table(rows: Sequence[Row]) -> str:
    """Markdown, with a line for all."""
    head = "| run | resumed | weights equal | metrics equal | ledger equal | seconds |\n|---|---|---|---|---|---|"
    cells = [
        f"| {row.name} | {row.resumed} | {row.weights} | {row.metrics} | {row.ledger} | {row.seconds:.0f} |"
        for row in rows
    ]
    total = (
        f"| all | {sum(r.resumed for r in rows)} | {sum(r.weights for r in rows)} | {sum(r.metrics for r in rows)} | "
        f"{sum(r.ledger for r in rows)} | {sum(r.seconds for r in rows):.0f} |"
    )
    return "\n".join([head, *cells, total])


if __name__ == "__main__":
    sys.exit(main())
