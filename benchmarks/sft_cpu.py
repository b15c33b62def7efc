# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on one CPU thread: Podium beside TRL's SFTTrainer, packing off and on, in turns.

    .venv-bench/bin/python benchmarks/sft_cpu.py            (see requirements.txt for the environment)

Same tiny Qwen3 (0.9M parameters), same 4096 documents (log-normal, median 40, at most 512 tokens), the same number of
tokens per optimizer step, AdamW, clipping, float32, one thread and oneDNN off on every side. Each turn is a fresh
process; the figure is predicted tokens over wall time from the end of the last warm-up step to the end of the run.
"Packing accumulated" is TRL tuned for a CPU by hand: one packed row per forward, gradients accumulated over the step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from sft_task import SideResult, Task, make_task

HERE = Path(__file__).parent
SIDES = {
    "TRL, packing off": ["sft_trl.py", "--packing", "off"],
    "TRL, packing on": ["sft_trl.py", "--packing", "on"],
    "TRL, packing accumulated": ["sft_trl.py", "--packing", "accumulated"],
    "Podium": ["sft_podium.py"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="documents of average length in one optimizer step")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps a turn, warm-up included")
    parser.add_argument("--warmup", type=int, default=10, help="steps that are not timed")
    parser.add_argument("--json", type=Path, help="also write every turn's figures here")
    asked = parser.parse_args()
    if not 0 < asked.warmup < asked.steps:
        parser.error("--warmup must be at least 1 and below --steps")

    with tempfile.TemporaryDirectory() as scratch:
        task = make_task(Path(scratch) / "task", asked.rows)
        results: list[SideResult] = []
        for turn in range(asked.repeats):
            for side in SIDES:
                results.append(run_side(side, task, asked.steps, asked.warmup, Path(scratch)))
                print(
                    f"turn {turn + 1}: {side:<25} {results[-1].tokens_per_s:>8,.0f} tokens/s, "
                    f"{results[-1].tokens_per_cpu_s:>8,.0f} per CPU second",
                    flush=True,
                )
    print()
    for line in table(results):
        print(line)
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(each) for each in results], indent=1), encoding="utf-8")


def run_side(side: str, task: Task, steps: int, warmup: int, scratch: Path) -> SideResult:
    """One turn in a process of its own, so that no side inherits threads, caches or switches of another."""
    script, *options = SIDES[side]
    out = scratch / "result.json"
    command = [sys.executable, str(HERE / script), *options, "--task", str(task.folder), "--rows", str(task.rows)]
    command += ["--steps", str(steps), "--warmup", str(warmup), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{side} failed with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return SideResult.read(out)


def table(results: list[SideResult]) -> list[str]:
    """Medians over the turns; Podium's advantage is the median of the turns' own ratios, by wall and by CPU time."""
    by_side = {side: [each for each in results if each.side == side] for side in SIDES}
    ours = by_side["Podium"]
    head = f"{'':<25} {'tokens/s':>9} {'(range)':>15} {'tokens/step':>12} {'ms/step':>8} {'loss':>6}"
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, one thread used; {len(ours)} turns",
        f"{head}  Podium is faster by wall, by CPU time",
    ]
    for side, turns in by_side.items():
        rates = [each.tokens_per_s for each in turns]
        per_step = statistics.median(each.tokens / each.steps for each in turns)
        step_ms = statistics.median(1000 * each.wall_s / each.steps for each in turns)
        loss = statistics.median(each.loss for each in turns)
        pairs = list(zip(ours, turns, strict=True))
        by_wall = statistics.median(mine.tokens_per_s / each.tokens_per_s for mine, each in pairs)
        by_cpu = statistics.median(mine.tokens_per_cpu_s / each.tokens_per_cpu_s for mine, each in pairs)
        spread = f"({min(rates):,.0f}-{max(rates):,.0f})"
        lines.append(
            f"{side:<25} {statistics.median(rates):>9,.0f} {spread:>15} {per_step:>12,.0f} {step_ms:>8.1f} {loss:>6.3f}"
            + ("" if side == "Podium" else f"  {by_wall:.2f}x, {by_cpu:.2f}x")
        )
    return lines


if __name__ == "__main__":
    main()
