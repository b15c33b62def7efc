# SPDX-License-Identifier: Apache-2.0
"""Steps a second of learning from pairs on one CPU thread: Podium's dpo and reward_model beside TRL, in turns.

    .venv-bench/bin/python benchmarks/preferences.py --program dpo              beside DPOTrainer
    .venv-bench/bin/python benchmarks/preferences.py --program reward_model     beside RewardTrainer
    .venv-bench/bin/python benchmarks/preferences.py --program dpo --against sft

(see requirements.txt for the environment). Same tiny Qwen3 (0.9M parameters; the scorer has a head of one number),
same pairs in the same order, as many of them a step, AdamW, clipping, float32, one thread and oneDNN off on every side;
that the sides do the same work is checked by the tokens and the loss of every step. Prompts and answers are log-normal
(medians 24 and 40, at most 512 tokens together). Each turn is a fresh process; only what comes after warm-up is timed,
so the pass that computes the reference's log-probs is not (of either side). "One pair a forward" is TRL tuned for a CPU
by hand: a pair is padded to its own length only, gradients are accumulated over the step.

`--against sft`: what DPO costs beyond fine-tuning on the same completions, both by Podium.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from preferences_task import SideResult, Task, make_task

HERE = Path(__file__).resolve().parent
LIMIT_S = 900.0
SAME_LOSS = 2e-3
PODIUM = "Podium"

_DPO, _REWARD = ("--program", "dpo"), ("--program", "reward_model")
_TRL, _PODIUM = "preferences_trl.py", "preferences_podium.py"
SIDES: Mapping[tuple[str, str], Mapping[str, tuple[str, ...]]] = {
    ("dpo", "trl"): {
        "TRL, live reference": (_TRL, *_DPO, "--reference", "live"),
        "TRL, precomputed": (_TRL, *_DPO),
        "TRL, precomputed, one pair a forward": (_TRL, *_DPO, "--pairs-per-forward", "1"),
        PODIUM: (_PODIUM, *_DPO),
    },
    ("reward_model", "trl"): {
        "TRL": (_TRL, *_REWARD),
        "TRL, one pair a forward": (_TRL, *_REWARD, "--pairs-per-forward", "1"),
        PODIUM: (_PODIUM, *_REWARD),
    },
    ("dpo", "sft"): {
        "Podium, sft on both completions": (_PODIUM, "--program", "sft"),
        PODIUM: (_PODIUM, *_DPO),
    },
}


def main() -> None:
    asked = parsed()
    sides = SIDES[asked.program, asked.against]
    with tempfile.TemporaryDirectory() as scratch:
        task = Task(folder=scratch, pairs=asked.pairs, steps=asked.steps, warmup=asked.warmup)
        make_task(task)
        task.write(Path(scratch) / "task.json")
        results: dict[str, list[SideResult]] = {side: [] for side in sides}
        for turn in range(asked.turns):
            for side, command in sides.items():
                found = run_side(side, command, Path(scratch))
                results[side].append(found)
                print(
                    f"turn {turn + 1}: {side:<37} {found.steps_per_s:6.3f} steps/s, {found.steps_per_cpu_s:6.3f} per "
                    f"CPU second; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    print()
    for line in report(task, results, same_loss=asked.against == "trl"):
        print(line)
    if asked.json is not None:
        every = {side: [asdict(each) for each in turns] for side, turns in results.items()}
        asked.json.write_text(json.dumps(every, indent=1), encoding="utf-8")


def run_side(side: str, command: Sequence[str], scratch: Path) -> SideResult:
    """One turn in a process of its own, so that no side inherits threads, caches or switches of another."""
    script, *options = command
    out = scratch / "result.json"
    out.unlink(missing_ok=True)
    full = [sys.executable, str(HERE / script), *options, "--task", str(scratch / "task.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*full, "--side", side, "--out", str(out)],
        env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    if done.returncode != 0 or not out.exists():
        raise SystemExit(f"{side} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return SideResult.read(out)


def report(task: Task, results: Mapping[str, Sequence[SideResult]], *, same_loss: bool) -> list[str]:
    """Medians over the turns; Podium's advantage is the median of the turns' own ratios, by wall and by CPU time."""
    ours, peers = results[PODIUM], [side for side in results if side != PODIUM]
    head = f"{'':<37} {'steps/s':>7} {'(range)':>15} {'CPU ms/step':>11} {'tokens':>7} {'places':>7} {'loss 1':>7}"
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, one thread used; {task.pairs} pairs a step; {len(ours)} turns "
        f"of {task.steps - task.warmup} timed steps",
        f"{head} {'mean':>7}  Podium is faster by wall, by CPU time",
    ]
    for side, turns in results.items():
        rates = [turn.steps_per_s for turn in turns]
        first = turns[0]
        lines.append(
            f"{side:<37} {statistics.median(rates):>7.3f} {f'({min(rates):.3f}-{max(rates):.3f})':>15} "
            f"{1e3 * statistics.median(1 / turn.steps_per_cpu_s for turn in turns):>11.1f} "
            f"{statistics.mean(first.tokens):>7,.0f} {statistics.mean(first.places):>7,.0f} {first.losses[0]:>7.4f} "
            f"{statistics.mean(first.losses):>7.4f}"
            + ("" if side == PODIUM else "  {:.2f}x, {:.2f}x".format(*advantage(ours, turns)))
        )
    faults = [fault for side in peers for fault in unlike(ours[0], results[side][0], same_loss=same_loss)]
    return lines + (
        faults or ["Same work: " + ("tokens and losses" if same_loss else "tokens") + " agree at every step"]
    )


def advantage(ours: Sequence[SideResult], peers: Sequence[SideResult]) -> tuple[float, float]:
    """How many times as fast `ours` is, by wall and by CPU time."""
    turns = list(zip(ours, peers, strict=True))
    return (
        statistics.median(mine.steps_per_s / other.steps_per_s for mine, other in turns),
        statistics.median(mine.steps_per_cpu_s / other.steps_per_cpu_s for mine, other in turns),
    )


def unlike(ours: SideResult, other: SideResult, *, same_loss: bool) -> list[str]:
    """Where the two did not do the same work."""
    faults = []
    for step, (mine, theirs) in enumerate(zip(ours.tokens, other.tokens, strict=True), 1):
        if mine != theirs:
            faults.append(f"NOT THE SAME WORK: step {step} has {mine} tokens, and {theirs} in {other.side}")
            break
    for step, (loss, theirs_loss) in enumerate(zip(ours.losses, other.losses, strict=True), 1):
        if same_loss and abs(loss - theirs_loss) > SAME_LOSS:
            faults.append(f"NOT THE SAME WORK: step {step} has loss {loss:.4f}, and {theirs_loss:.4f} in {other.side}")
            break
    return faults


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="dpo", choices=["dpo", "reward_model"])
    parser.add_argument("--against", default="trl", choices=["trl", "sft"])
    parser.add_argument("--pairs", type=int, default=8, help="of one optimizer step")
    parser.add_argument("--turns", type=int, default=3, help="of each side")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps a turn, warm-up included")
    parser.add_argument("--warmup", type=int, default=10, help="steps that are not timed")
    parser.add_argument("--json", type=Path, help="also write every turn's figures here")
    found = parser.parse_args()
    if not 0 < found.warmup < found.steps:
        parser.error("--warmup must be at least 1 and below --steps")
    if (found.program, found.against) not in SIDES:
        parser.error("--against sft is for --program dpo")
    return found


if __name__ == "__main__":
    main()
