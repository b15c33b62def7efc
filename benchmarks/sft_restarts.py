# SPDX-License-Identifier: Apache-2.0
"""What `placement.restarts` costs supervised fine-tuning that nobody disturbs: with a copy of every step in memory, and
without, in turns.

    .venv/bin/python benchmarks/sft_restarts.py                                       tiny Qwen3, two ranks on CPU
    python benchmarks/sft_restarts.py --device cuda --shape 0.6b --ranks 1 --turns 2

The model and the documents of sft_gpu.py. Each turn of a side is `podium train` in a fresh process; the side that
begins changes with every turn. Figures are of a step, from the end of the warm-up to the last one: wall time, and
processor time of the launcher and all ranks. A ratio is the median over the turns of each turn's own ratio. On a
machine with other work the processor time says more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from sft_gpu import make_data, make_model
from sft_restarts_clock import STEPS_FILE, Clocks, clocked
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
    turns: list[dict[int, Clocks]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model", asked.shape)
        words = min(20_000, SHAPES[asked.shape]["vocab_size"] - 1)
        make_data(folder / "train.jsonl", (asked.steps + 4) * asked.tokens + 512 * 1000, words)
        for turn in range(asked.turns):
            order = SIDES if turn % 2 == 0 else SIDES[::-1]
            turns.append({restarts: measured(folder, asked, turn, restarts) for restarts in order})
            print(turn_line(turn + 1, turns[-1]), flush=True)
    wall, cpu = ratios(turns)
    print(
        f"restarts 3 over restarts 0, {len(turns)} turns, {asked.shape} on {asked.device}, {asked.ranks} ranks: "
        f"wall time {wall:.4f}, processor time {cpu:.4f}"
    )


def turn_line(number: int, turn: dict[int, Clocks]) -> str:
    """What a turn of both sides took."""
    sides = ", ".join(
        f"restarts {restarts} {1e3 * turn[restarts].wall_s:.2f} ms a step ({1e3 * turn[restarts].cpu_s:.2f} ms of "
        "processors)"
        for restarts in SIDES
    )
    wall, cpu = ratios([turn])
    return f"turn {number}: {sides}: wall {wall:.4f}, processors {cpu:.4f}"


def ratios(turns: list[dict[int, Clocks]]) -> tuple[float, float]:
    """Medians of the ratios of wall time and of processor time."""
    without, with_copies = SIDES
    return (
        statistics.median(turn[with_copies].wall_s / turn[without].wall_s for turn in turns),
        statistics.median(turn[with_copies].cpu_s / turn[without].cpu_s for turn in turns),
    )


def measured(folder: Path, asked: argparse.Namespace, turn: int, restarts: int) -> Clocks:
    """A step after the warm-up, on average."""
    name, steps, runs = f"{turn}-{restarts}", (asked.warmup, asked.steps), folder / "runs"
    runs.mkdir(exist_ok=True)
    (runs / STEPS_FILE).write_text(json.dumps(steps), encoding="utf-8")
    placement = {"device": asked.device, "devices": asked.ranks, "restarts": restarts}
    clock = f"{Path(__file__).resolve().parent}/sft_restarts_clock.py:CommandClock"
    recipe = {
        "program": "sft",
        "model": {"path": str(folder / "model"), "init": "random"},
        "data": {"train": [{"path": str(folder / "train.jsonl")}], "max_length": min(4097, asked.tokens)},
        "tokens_per_step": asked.tokens,
        "optimizer": {"lr": 1e-5},
        "steps": asked.steps,
        "placement": placement | ({"threads": 1, "onednn": False} if asked.device == "cpu" else {}),
        "run": {"name": name, "folder": str(runs), "log_every": 10, "loggers": [clock]},
    }
    file = folder / f"{name}.yaml"  # JSON is YAML
    file.write_text(json.dumps(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "podium", "train", str(file)]
    path = os.pathsep.join([str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"podium train failed with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return clocked(runs / name, steps)


if __name__ == "__main__":
    main()
