# SPDX-License-Identifier: Apache-2.0
"""Small runs of every program, and fingerprints of what they compute.

`PYTHONPATH=tests python -m golden.runs` records them anew: only where a change of numbers is meant.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import random
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors import safe_open

import podium
from helpers.tiny import save_tiny_folder, save_tiny_model, tiny_tokenizer
from podium.observe import read_metrics

RECORDED = Path(__file__).with_name("fingerprints.json")
STEPS, MORE_STEPS = 4, 20
# Times, and what depends on them.
_TIMED = ("_s", "_per_s", "/s", "mfu", "cache_used", "reused_tokens", "prefilled_tokens", "preemptions")
_INLINE = {"placement": {"launcher": "inline", "devices": 1}}
_FIXED = {"rollout": None, "reward": None, "tokens_per_step": 256}
_PAIRS = {**_FIXED, "data": {"train": [{"path": "pairs.jsonl"}]}, "rows_per_step": 8, "tokens_per_step": None}

_RUNS: Mapping[str, Mapping[str, Any]] = {
    "sft": {
        "program": "sft", **_FIXED, "data": {"train": [{"path": "chats.jsonl"}], "heldout": [{"path": "chats.jsonl"}]},
    },
    "sft-two-ranks": {
        "program": "sft", **_FIXED, "data": {"train": [{"path": "chats.jsonl"}]}, "placement": {"devices": 2},
    },
    "dpo": {"program": "dpo", **_PAIRS},
    "kto": {
        "program": "dpo", **_PAIRS, "data": {"train": [{"path": "labels.jsonl"}]}, "preference": {"loss": "kto"},
    },
    "reward-model": {"program": "reward_model", **_PAIRS},
    "distill": {
        "program": "distill", **_FIXED, "data": {"train": [{"path": "chats.jsonl"}]}, "teachers": [{"path": "teacher"}],
    },
    "grpo": {**_INLINE, "algorithm": {"kl": {"coefficient": 0.05}, "epochs": 2, "mini_batches": 2}},
    "dapo": {
        **_INLINE,
        "algorithm": {
            "dynamic_sampling": True, "clip_high": 0.28, "reduction": "token_mean", "overlong": {"buffer_tokens": 4},
        },
    },
    "ppo": {**_INLINE, "program": "ppo", "critic": {"warmup_steps": 1}, "algorithm": {"lam": 0.9, "epochs": 2}},
    "on-policy-distillation": {
        **_INLINE, "program": "on_policy_distill", "teachers": [{"path": "teacher"}], "reward": None,
    },
    "expert-iteration": {**_INLINE, "program": "expert_iteration", "grading": {"solved_at": 0.3}},
    "tool-agent": {
        **_INLINE, "environment": {"tools": ["task.py:calculate"], "max_turns": 2, "hidden_tools": True},
        "rollout": {"max_new_tokens": 12},
    },
    "lora-grpo": {**_INLINE, "model": {"lora": {"rank": 4}}},
}  # fmt: skip
LONG_RUNS = tuple(f"{name}-{MORE_STEPS}-steps" for name in ("grpo", "tool-agent"))
RUNS: Mapping[str, Mapping[str, Any]] = {
    **_RUNS,
    **{
        name: {**_RUNS[name.removesuffix(f"-{MORE_STEPS}-steps")], "steps": MORE_STEPS,
               "checkpoint": {"every": MORE_STEPS}}
        for name in LONG_RUNS
    },
}  # fmt: skip
PIPELINE = "pipeline"

_TASK = '''
def digits(answer, **_):
    return sum(character.isdigit() for character in answer) / 10


def calculate(expression: str) -> str:
    """Adds two numbers.

    Args:
        expression: What to add.
    """
    left, _, right = expression.partition("+")
    return str(int(left) + int(right))
'''


def make_task(folder: Path) -> None:
    """Models, data and reward that all runs share; the same files every time."""
    save_tiny_folder(folder / "model")
    tokenizer = tiny_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    save_tiny_model("qwen3", folder / "teacher", seed=1, vocab_size=len(tokenizer), **ends)
    tokenizer.save_pretrained(folder / "teacher")
    (folder / "task.py").write_text(_TASK, encoding="utf-8")
    draw = random.Random(0)
    sums = [(draw.randrange(10 ** draw.randint(1, 4)), draw.randrange(10)) for _ in range(64)]
    prompts = [[{"role": "user", "content": f"what is {left}+{right}?"}] for left, right in sums]
    good = [[{"role": "assistant", "content": f"{left + right}"}] for left, right in sums]
    bad = [[{"role": "assistant", "content": f"{left} or so"}] for left, _ in sums]
    rows = {
        "prompts": [{"messages": prompt} for prompt in prompts],
        "chats": [{"messages": prompt + answer} for prompt, answer in zip(prompts, good, strict=True)],
        "pairs": [
            {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            for prompt, chosen, rejected in zip(prompts, good, bad, strict=True)
        ],
        "labels": [
            {"prompt": prompt, "completion": (bad if at % 2 else good)[at], "label": at % 2 == 0}
            for at, prompt in enumerate(prompts)
        ],
    }
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each), encoding="utf-8")


def recipe(name: str) -> dict[str, Any]:
    """GRPO on prompts but for the changes of RUNS; None takes a section out."""
    values: dict[str, Any] = {
        "program": "grpo",
        "model": {"path": "model"},
        "data": {"train": [{"path": "prompts.jsonl"}]},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8, "max_running": 6},
        "reward": [{"function": "task.py:digits"}],
        "optimizer": {"lr": 3e-3, "schedule": "linear", "warmup_steps": 1, "weight_decay": 0.1},
        "steps": STEPS,
        "placement": {"device": "cpu", "threads": 1, "onednn": False},
        "checkpoint": {"every": 2, "background": False},
        "run": {"name": name, "folder": "runs"},
    }
    for key, change in RUNS[name].items():
        values[key] = {**values.get(key, {}), **change} if isinstance(change, dict) else change
    return {key: value for key, value in values.items() if value is not None}


def pipeline() -> dict[str, Any]:
    """A GRPO that begins with what an SFT has learned."""
    stages = {stage: recipe(stage) for stage in ("sft", "grpo")}
    for stage in stages.values():
        del stage["run"]
    stages["grpo"]["model"] = {"path": "${stage.sft}"}
    return {"program": "pipeline", "stages": stages, "run": {"name": PIPELINE, "folder": "runs"}}


def run(name: str, folder: Path) -> Path:
    """Trains in `folder`, where make_task has been; returns the run folder whose weights count."""
    return train(pipeline(), folder) / "grpo" if name == PIPELINE else train(recipe(name), folder)


def train(values: Mapping[str, Any], folder: Path) -> Path:
    """Trains a recipe in `folder`, where make_task has been; returns the run folder."""
    name = values["run"]["name"]
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    with contextlib.chdir(folder), (folder / f"{name}.log").open("w") as log, contextlib.redirect_stdout(log):
        podium.train(file)
    return folder / "runs" / name


def num_steps(name: str) -> int:
    """Steps of a run."""
    return MORE_STEPS if name in LONG_RUNS else STEPS


def fingerprint(run: Path, *, step: int = STEPS) -> dict[str, Any]:
    """Of the checkpoint of the last step (optimizer state included), of each metric's values, and of the ledger."""
    return {"weights": _weights(run, step), "ledger": _ledger(run), "metrics": _metrics(run)}


def machine() -> dict[str, str]:
    """Where the same sums give the same bits: libraries choose kernels by the processor."""
    with contextlib.suppress(OSError):
        about = Path("/proc/cpuinfo").read_text()
        names = re.findall(r"^(?:model name|cpu family|model|stepping|CPU part)\s*: (.*)$", about, re.MULTILINE)
        return {"machine": platform.machine(), "torch": torch.__version__, "processor": ", ".join(sorted(set(names)))}
    return {"machine": platform.machine(), "torch": torch.__version__, "processor": platform.processor()}


def read_recorded() -> list[dict[str, Any]]:
    """A record for each kind of machine: `where` and `runs`, the fingerprints by name."""
    records: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return records


def _weights(run: Path, step: int) -> str:
    digest = hashlib.sha256()
    for kind in ("checkpoints", "critic", "reference"):
        files = sorted((run / kind / f"step-{step:08d}").glob("rank-*.safetensors"))
        assert files or kind != "checkpoints", f"{run} has no checkpoint of step {step}"
        for file in files:
            with safe_open(file, "np") as tensors:
                for key in sorted(tensors.keys()):
                    value = tensors.get_tensor(key)
                    digest.update(f"{key} {value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()[:16]


def _ledger(run: Path) -> str | None:
    file = run / "episodes.sqlite"
    if not file.exists():
        return None
    columns = "prompt_index, sample, branch, step, state, finish, version, tokens, reward"
    with contextlib.closing(sqlite3.connect(file)) as ledger:
        rows = ledger.execute(f"SELECT {columns} FROM episodes ORDER BY 1, 2, 3").fetchall()
    assert rows
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def _metrics(run: Path) -> dict[str, str]:
    series: dict[str, list[tuple[int, str]]] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        for name, value in line.values.items():
            if not name.endswith(_TIMED) and "_s/" not in name:  # such as learner/idle_s/tail
                series.setdefault(name, []).append((line.step, float(value).hex()))
    return {name: hashlib.sha256(repr(values).encode()).hexdigest()[:16] for name, values in sorted(series.items())}


def main() -> None:
    """Runs everything twice: what is not the same twice is no fingerprint."""
    found = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            make_task(Path(folder))
            names = [*RUNS, PIPELINE]
            found.append({name: fingerprint(run(name, Path(folder)), step=num_steps(name)) for name in names})
    if found[0] != found[1]:
        differing = [
            f"{name}: {key}"
            for name in found[0]
            for key in found[0][name]
            if found[0][name][key] != found[1][name][key]
        ]
        sys.exit(f"not the same twice: {', '.join(differing)}")
    elsewhere = [each for each in read_recorded() if each["where"] != machine()]
    records = [*elsewhere, {"where": machine(), "runs": found[0]}]
    RECORDED.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
