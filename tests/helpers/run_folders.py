# SPDX-License-Identifier: Apache-2.0
"""Folders of runs that never ran: files in the formats of real ones, with values that tests know."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from helpers.recipes import make_recipe
from podium.runs.events import append_membership, append_recovery
from podium.runs.folder import RunFolder

BEGIN_S = 1_750_000_000.0
STEP_S = 2.0
GENERATOR, LEARNER = "rollout[0]@node/cpu#0", "train[0]@node/cpu#0"
UNSAFE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
_PROMPT_TOKENS = 3
_SCHEMA = pa.schema([
    ("step", pa.int32()), ("group", pa.int64()), ("sample", pa.int32()), ("source", pa.string()), ("row", pa.int64()),
    ("messages", pa.string()), ("prompt_tokens", pa.int32()), ("tokens", pa.list_(pa.int32())),
    ("texts", pa.list_(pa.string())), ("loss_mask", pa.list_(pa.bool_())), ("log_probs", pa.list_(pa.float32())),
    ("versions", pa.list_(pa.int32())), ("advantages", pa.list_(pa.float32())), ("reward", pa.float64()),
    ("rewards", pa.map_(pa.string(), pa.float64())), ("ending", pa.string()), ("trained", pa.bool_()),
])  # fmt: skip


def make_run_folder(runs: Path, name: str, *, steps: int = 10, lr: float = 1e-3, status: str = "finished") -> RunFolder:
    """A run with metrics and a timeline. The loss of step n is 10 / n, its reward n / 10; a step takes 2 s."""
    run = RunFolder.create(
        make_recipe(f"run.folder={runs}", f"run.name={name}", f"steps={steps}", f"optimizer.lr={lr}")
    )
    append_steps(run, range(1, steps + 1))
    write_timeline(run, steps)
    run.update(status=status, step=steps)
    return run


def append_steps(run: RunFolder, steps: Iterable[int], **values: float | str) -> None:
    with run.metrics_file.open("a") as file:
        for step in steps:
            known = {"loss": 10 / step, "reward/mean": step / 10, "step_s": STEP_S, **values}
            file.write(json.dumps({"step": step, "time_s": BEGIN_S + STEP_S * step, **known}) + "\n")


def write_timeline(run: RunFolder, steps: int) -> None:
    """Of each step: 1.2 s of generation, 0.3 s of grading, 0.5 s of update. The learner is idle in all but the last."""
    lines: list[Mapping[str, Any]] = [
        {"worker": "controller", "spans": [["launch", BEGIN_S, 0.0], ["start-up", BEGIN_S, STEP_S]]}
    ]
    for step in range(1, steps + 1):
        at = BEGIN_S + STEP_S * step
        lines += [
            {
                "worker": "controller",
                "spans": [["rollout", at, 1.2], ["grade", at + 1.2, 0.3], ["update", at + 1.5, 0.5]],
            },
            {"worker": GENERATOR, "spans": [["generator.stream", at, 1.2]]},
            {
                "worker": LEARNER,
                "spans": [["policy.update", at + 1.5, 0.5], ["policy.update > forward", at + 1.5, 0.25]],
            },
        ]
    (run.path / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def episode(step: int, group: int, sample: int, **values: Any) -> dict[str, Any]:
    """One row of a file of rollouts: reward group + sample / 10, length 5 + sample."""
    length = 5 + sample
    tokens = list(range(_PROMPT_TOKENS + length))
    answered = [at >= _PROMPT_TOKENS for at in tokens]
    reward = group + sample / 10
    messages = [
        {"role": "user", "content": f"What is {group} + {sample}?"},
        {"role": "assistant", "content": f"It is {group + sample}, at step {step}."},
    ]
    return {
        "step": step, "group": group, "sample": sample, "source": "sums" if group % 2 else "words", "row": group,
        "messages": json.dumps(messages), "prompt_tokens": _PROMPT_TOKENS, "tokens": tokens,
        "texts": [f" t{at}" for at in tokens], "loss_mask": answered,
        "log_probs": [-0.5 if each else None for each in answered],
        "versions": [step - 1 if each else None for each in answered],
        "advantages": [0.25 if each else None for each in answered], "reward": reward,
        "rewards": [("correct", reward)], "ending": "stop", "trained": sample > 0, **values,
    }  # fmt: skip


def write_rollouts(run: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
    folder = run / "rollouts"
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}.parquet"
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(list(rows), schema=_SCHEMA), temporary)
    temporary.replace(path)
    return path


def add_extras(run: RunFolder) -> None:
    """Rollouts of steps 1 to 3 in two groups of two, one of them hostile; events, a warning and held-out answers."""
    for step in (1, 2, 3):
        rows = [episode(step, group, sample) for group in (0, 1) for sample in (0, 1)]
        write_rollouts(run.path, step, rows)
    hostile = json.dumps([{"role": "user", "content": "<b>hi</b>"}, {"role": "assistant", "content": UNSAFE}])
    write_rollouts(run.path, 4, [episode(4, 7, 0, messages=hostile, texts=[UNSAFE] * 8, source=UNSAFE)])
    append_recovery(run.path, part="generator", cause="rollout[0] died.", remedy="respawn", step=3, seconds=1.5)
    append_membership(run.path, change="joined", generator="rollout[1]", cause="asked", step=4, generators=2)
    run.console_file.write_text("step 1\nwarning: steps 3 to 5: every episode has the same\n  total reward\nstep 6\n")
    answers = [
        {"step": step, "prompt": prompt, "answer": f"{prompt} at {step}", "reference": "x", "score": float(step > 1)}
        for step in (0, 5)
        for prompt in ("first", UNSAFE)
    ]
    run.samples_file.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
