# SPDX-License-Identifier: Apache-2.0
"""Makes a folder of runs for the page: real formats, made-up numbers. Some of its answers try to be HTML.

PYTHONPATH=src python tests/browser/demo_runs.py FOLDER     # then: podium ui FOLDER
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from podium.recipe import parse_recipe
from podium.runs.folder import RunFolder

BEGIN_S = 1_790_000_000.0
STEP_S = 4.0
# Run if the page takes text for HTML: each sets window.hacked.
HOSTILE = (
    "<img src=x onerror=\"window.hacked='img'\">",
    "</script><script>window.hacked='script'</script>",
    "<svg onload=\"window.hacked='svg'\"></svg>",
    '"><iframe srcdoc="<script>parent.hacked=1</script>">',
)
_GROUPS, _SAMPLES = 6, 4
_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("group", pa.int64()),
        ("sample", pa.int32()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("messages", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("texts", pa.list_(pa.string())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("log_probs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("advantages", pa.list_(pa.float32())),
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("ending", pa.string()),
        ("trained", pa.bool_()),
    ]
)


def make_runs(folder: Path) -> None:
    """A finished agent run with everything, one like it with other settings, an SFT run, and two damaged folders."""
    agent = make_run(folder, "agent", _grpo(), steps=60)
    write_timeline(agent, steps=60)
    write_rollouts(agent, steps=range(1, 61))
    write_events(agent)
    write_samples(agent)
    make_run(folder, "agent-higher-lr", _grpo() | {"optimizer": {"lr": 3e-6}}, steps=45, seed=1)
    write_rows(make_run(folder, "imitation", _sft(), steps=300, seed=2))
    broken = folder / "broken-recipe"
    broken.mkdir()
    (broken / "run.json").write_text('{"status": "finished", "program": "sft"}')
    (broken / "recipe.yaml").write_text("program: sft\nmodel: [unclosed\n")
    (folder / "half-written").mkdir()
    (folder / "half-written" / "run.json").write_text('{"status": "runn')
    (folder / "half-written" / "recipe.yaml").write_text("program: sft\n")


def make_run(folder: Path, name: str, values: Mapping[str, Any], *, steps: int, seed: int = 0) -> Path:
    """A run with metrics. Its recipe is checked as that of a real run."""
    run = RunFolder.create(parse_recipe({**values, "run": {"folder": str(folder), "name": name}}))
    lines = [metrics_line(values["program"], step, random.Random(1000 * seed + step)) for step in range(1, steps + 1)]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.update(status="finished")
    return run.path


def metrics_line(program: str, step: int, chance: random.Random) -> dict[str, float]:
    """A line of metrics.jsonl."""
    progress = 1 - math.exp(-step / 25)
    common = {
        "step": step, "time_s": BEGIN_S + 20 + STEP_S * step, "step_s": STEP_S + chance.gauss(0, 0.1),
        "grad_norm": 0.4 + 0.1 * chance.random(), "lr": 1e-6, "mfu": 0.31 + 0.01 * chance.random(),
        "tokens_per_s": 21_000 + 800 * chance.random(),
    }  # fmt: skip
    if program == "sft":
        return common | {
            "loss": 1.9 - 1.2 * progress + 0.08 * chance.random(),
            "trained_tokens": 8192,
            "epoch": step // 100,
        }
    reward = 0.15 + 0.6 * progress + 0.06 * chance.gauss(0, 1)
    return common | {
        "loss": chance.gauss(0, 0.01), "reward/mean": reward, "reward/std": 0.3, "reward/correct/mean": reward - 0.05,
        "reward/format/mean": min(1.0, 0.5 + progress), "reward/source/sums/mean": reward + 0.1,
        "reward/source/proofs/mean": reward - 0.2, "response/mean": 220 + 90 * progress + 20 * chance.random(),
        "response/max": 512, "response/min": 40 + 10 * chance.random(), "entropy": 0.9 - 0.5 * progress,
        "kl/reference": 0.002 * step ** 0.5, "kl/behavior": 1e-4 * chance.random(),
        "staleness/mean": 0.8, "staleness/max": 1,
        "gap/mean": 2e-3, "time/rollout_s": 2.4, "time/update_s": 1.2, "time/publish_s": 0.2,
        "rollout/tokens_per_s": 32_000,
    }  # fmt: skip


def write_timeline(run: Path, *, steps: int) -> None:
    """Two trainers, two generators and a grader; the second generator is slow, and dies once."""
    lines: list[dict[str, Any]] = []

    def add(worker: str, *spans: tuple[str, float, float]) -> None:
        lines.append({"worker": worker, "spans": [[name, begin, length] for name, begin, length in spans]})

    add("controller", ("launch", BEGIN_S, 0.0), ("start-up", BEGIN_S, 20.0))
    for step in range(steps):
        at = BEGIN_S + 20 + STEP_S * step
        add(
            "controller",
            ("rollout", at, 2.4),
            ("grade", at + 2.4, 0.2),
            ("update", at + 2.6, 1.2),
            ("publish", at + 3.8, 0.2),
            (f"published version {step + 1}", at + 4.0, 0.0),
        )
        if step % 10 == 5:
            add("controller", ("devices lent", at + 0.5, 0.0), ("devices recalled", at + 2.5, 0.0))
        for rank in range(2):
            add(f"train[{rank}]@node-a/gpu{rank}#0", ("policy.update", at + 2.6, 1.2), ("policy.share", at + 3.8, 0.2))
            incarnation = int(rank == 1 and step >= 30)
            length = 1.2 if rank == 0 else 2.3
            add(
                f"rollout[{rank}]@node-b/gpu{rank}#{incarnation}",
                ("generator.stream", at, length),
                ("generator.install", at + 3.85, 0.1),
            )
            steps = {"steps": 40, "lanes": 8.0, "generated_tokens": 320, "prefilled_tokens": 64, "prefill_s": 0.1}
            lines[-1]["spans"].append(["generator.stream > steps", at, length, steps])
        add("graders[0]@node-a/cpu#0", ("grader.grade", at + 1.0, 1.5))
    (run / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_events(run: Path) -> None:
    """A death with its recovery, and a warning."""
    values = {"part": "generator", "cause": "rollout[1] was killed", "remedy": "respawn", "step": 30, "seconds": 3.2}
    (run / "events.jsonl").write_text(
        json.dumps({"event": "recovery", **values, "time_s": BEGIN_S + 20 + STEP_S * 30}) + "\n"
    )
    (run / "console.log").write_text("step 1/60\nwarning: at step 40 the entropy has fallen by half in 20 steps.\n")


def write_samples(run: Path) -> None:
    """Held-out answers of two prompts."""
    rows = [
        {
            "step": step, "prompt": f"What is {a} plus 5?", "reference": str(a + 5), "score": float(step == 20),
            "answer": f"{a + 5 - (20 - step) // 10} {HOSTILE[0] if step else ''}",
        }
        for step in (0, 10, 20)
        for a in (12, 30)
    ]  # fmt: skip
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_rows(run: Path) -> None:
    """Rows of fixed data: a question that is not trained, and an answer that is; the second is a pair."""
    document = {"tokens": [1, 2, 3], "texts": ["What?", " It is", f" {HOSTILE[0]}"], "loss_mask": [False, True, True]}
    rows = [
        {"source": "sums", "value": 0.0, "documents": [{**document, "length": 3}]},
        {"source": "pairs", "value": 1.5, "documents": [{**document, "length": 9}, {**document, "length": 3}]},
    ]
    (run / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_rollouts(run: Path, *, steps: Sequence[int]) -> None:
    """Groups of four episodes: every second group calls a tool."""
    (run / "rollouts").mkdir(exist_ok=True)
    for step in steps:
        chance = random.Random(step)
        rows = [
            _episode(step, group, sample, chance)
            for group in range((step - 1) * _GROUPS, step * _GROUPS)
            for sample in range(_SAMPLES)
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), run / "rollouts" / f"step-{step:08d}.parquet")


def _episode(step: int, group: int, sample: int, chance: random.Random) -> dict[str, Any]:
    a, b = group % 89 + 10, group * 7 % 83 + 10
    right = chance.random() < 0.3 + step / 120
    total = a + b if right else a + b - chance.randint(1, 9)
    call = {"name": "calculator", "arguments": json.dumps({"expression": f"{a} + {b}"})}
    question = f"What is {a} plus {b}? Think first, then answer."
    hostile = HOSTILE[sample % len(HOSTILE)] if group % 3 == 0 else ""
    answer = f"I add the tens: {a // 10 * 10} + {b // 10 * 10}.\nThen the ones.\n{hostile}\nThe answer is {total}."
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    if group % 2:
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": call}]})
        messages.append({"role": "tool", "name": "calculator", "content": str(a + b)})
    messages.append({"role": "assistant", "content": answer})
    prompt, texts, sampled = _pieces(question), [], []
    for message in messages[1:]:
        said = _pieces(message["content"] or json.dumps(call))
        texts += said
        sampled += [message["role"] == "assistant"] * len(said)
    count = len(prompt)
    old, advantage = len(texts) // 2 if group % 4 == 1 else 0, (0.9 if right else -0.6)
    return {
        "step": step, "group": group, "sample": sample, "row": group % 40,
        "source": "sums" if group % 2 == 0 else "tools",
        "messages": json.dumps(messages), "prompt_tokens": count, "texts": prompt + texts,
        "tokens": [sum(map(ord, text)) % 32_000 for text in prompt + texts], "loss_mask": [False] * count + sampled,
        "log_probs": [None] * count + [round(-abs(chance.gauss(0, 1.2)), 4) if each else None for each in sampled],
        "versions": [None] * count + [(step - 1 - (at < old)) if each else None for at, each in enumerate(sampled)],
        "advantages": [None] * count + [advantage if each else None for each in sampled],
        "reward": float(right) + 0.1, "rewards": {"correct": float(right), "format": 0.1},
        "ending": "stop" if sample else "length", "trained": group % 5 != 4,
    }  # fmt: skip


def _pieces(text: str) -> list[str]:
    """Words with the space before them, as tokens have it."""
    pieces = text.split(" ")
    return [pieces[0], *(f" {each}" for each in pieces[1:])]


def _grpo() -> dict[str, Any]:
    return {
        "program": "grpo", "model": {"path": "models/small"}, "data": {"train": [{"path": "sums.jsonl"}]},
        "reward": [{"function": "rewards.py:correct"}], "optimizer": {"lr": 1e-6}, "steps": 60,
        "rollout": {"prompts_per_step": _GROUPS, "samples_per_prompt": _SAMPLES, "max_new_tokens": 512},
        "placement": {"devices": 2},
    }  # fmt: skip


def _sft() -> dict[str, Any]:
    return {
        "program": "sft", "model": {"path": "models/small"}, "data": {"train": [{"path": "chats.jsonl"}]},
        "optimizer": {"lr": 1e-5}, "steps": 300, "tokens_per_step": 8192,
    }  # fmt: skip


if __name__ == "__main__":
    make_runs(Path(sys.argv[1]))
