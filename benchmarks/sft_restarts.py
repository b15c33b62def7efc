# SPDX-License-Identifier: Apache-2.0
"""What `placement.restarts` costs supervised fine-tuning that nobody disturbs: with a copy of every step in memory, and
without, in turns.

    .venv/bin/python benchmarks/sft_restarts.py                                       tiny Qwen3, two ranks on CPU
    python benchmarks/sft_restarts.py --device cuda --shape 0.6b --ranks 1 --turns 2

The model and the documents of sft_gpu.py. Each turn of a side is `podium train` in a fresh process. A figure is the
wall time from the end of the warm-up to the last step, divided by the steps; the ratio is the median over the turns of
each turn's own ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from podium.observe import read_metrics
from sft_gpu import make_data, make_model
from sft_step_gpu import SHAPES

LIMIT_S = 600.0
SIDES = (0, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step, over all ranks")
    parser.add_argument("--steps", type=int, default=60, help="of a turn, warm-up included")
    parser.add_argument("--warmup", type=int, default=10, help="steps that are not timed")
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model", asked.shape)
        words = min(20_000, SHAPES[asked.shape]["vocab_size"] - 1)
        make_data(folder / "train.jsonl", (asked.steps + 4) * asked.tokens + 512 * 1000, words)
        for turn in range(asked.turns):
            seconds = {restarts: step_s(folder, asked, turn, restarts) for restarts in SIDES}
            ratios.append(seconds[3] / seconds[0])
            print(
                f"turn {turn + 1}: restarts 0 {1e3 * seconds[0]:.2f} ms a step, restarts 3 {1e3 * seconds[3]:.2f} ms: "
                f"{ratios[-1]:.4f}",
                flush=True,
            )
    print(f"median {statistics.median(ratios):.4f} of {asked.turns} turns, {asked.shape} on {asked.device}")


def step_s(folder: Path, asked: argparse.Namespace, turn: int, restarts: int) -> float:
    """Mean seconds of a step after the warm-up."""
    name = f"{turn}-{restarts}"
    placement = {"device": asked.device, "devices": asked.ranks, "restarts": restarts}
    recipe = {
        "program": "sft",
        "model": {"path": str(folder / "model"), "init": "random"},
        "data": {"train": [{"path": str(folder / "train.jsonl")}], "max_length": min(4097, asked.tokens)},
        "tokens_per_step": asked.tokens,
        "optimizer": {"lr": 1e-5},
        "steps": asked.steps,
        "placement": placement | ({"threads": 1, "onednn": False} if asked.device == "cpu" else {}),
        "run": {"name": name, "folder": str(folder / "runs"), "log_every": 10},
    }
    file = folder / f"{name}.yaml"  # JSON is YAML
    file.write_text(json.dumps(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "podium", "train", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"podium train failed with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    times = {m.step: m.time_s for m in read_metrics(folder / "runs" / name / "metrics.jsonl") if "step_s" in m.values}
    return (times[asked.steps] - times[asked.warmup]) / (asked.steps - asked.warmup)


if __name__ == "__main__":
    main()
