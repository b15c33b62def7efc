# SPDX-License-Identifier: Apache-2.0
"""Seconds of a whole GRPO step (generate, grade, update, publish): Podium on Ray beside TRL's GRPOTrainer, in turns.

    .venv/bin/python benchmarks/grpo.py                                     tiny Qwen3 on CPU, beside TRL
    python benchmarks/grpo.py --device cuda --shape 0.6b --peers ""         Podium alone on a GPU
    python benchmarks/grpo.py ... --against OTHER/src                       beside another commit of Podium
    python benchmarks/grpo.py --device cuda --shape 8b --lora 32 --adapters apart merged --peers ""
                                            an adapter, apart from its base in generation and merged into it

TRL runs in the environment of requirements.txt (.venv-bench), or in this one where it can be imported; without it only
Podium's figures are printed. Same model config, same prompts in the same order, 8 prompts x 8 samples, every answer as
long as allowed (there is no end token that the model could sample), the same reward function, no KL, one optimizer step
a batch, AdamW, clipping. Each turn of a side is a fresh process; the first `--warmup` steps are left out, the figure is
the median over the steps of all turns. On CPU: float32, oneDNN off; Podium has `--devices` workers of one thread, TRL
is tried with one thread, with a thread for each core and with as many processes (data parallel); the best one counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_task import PROMPTS, SAMPLES, SHAPES, SideResult, Task, make_task

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent / ".venv-bench" / "bin" / "python"
LIMIT_S = 900.0
# What the project measured of TRL (transformers' generation) on one H200 in the same sizes, before it began.
KNOWN_PEER = {("cuda", "0.6b"): (12.5, 13.6)}
PHASES = ("rollout", "grade", "update", "publish", "residency", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to run the task: a command, and the threads that its numerical libraries may take."""

    name: str
    command: tuple[str, ...]
    threads: int
    # Where this side's Podium lies, if it is not the one that is installed.
    source: Path | None = None

    @property
    def is_podium(self) -> bool:
        return self.name.startswith("Podium")


def main() -> None:
    asked = parsed()
    with tempfile.TemporaryDirectory() as scratch:
        task = Task(
            folder=scratch,
            shape=asked.shape,
            device=asked.device,
            steps=asked.steps,
            warmup=asked.warmup,
            shortest=asked.prompt_tokens[0],
            longest=asked.prompt_tokens[1],
            new_tokens=asked.new_tokens,
            lora=asked.lora,
        )
        make_task(task)
        task.write(Path(scratch) / "task.json")
        sides = podium_sides(
            asked.devices, asked.against, without_fork_server=asked.without_fork_server,
            without_restarts=asked.without_restarts, adapters=asked.adapters,
        )  # fmt: skip
        if "trl" in asked.peers.split(","):
            sides += trl_sides(asked.device)
        results: dict[str, list[SideResult]] = {side.name: [] for side in sides}
        for turn in range(asked.turns):
            for side in sides:
                found = run_side(side, Path(scratch))
                results[side.name].append(found)
                print(
                    f"turn {turn + 1}: {side.name:<28} {statistics.median(found.step_s):7.3f} s/step, "
                    f"mean {statistics.mean(found.step_s):7.3f} s, {found.cpu_s:7.3f} s of CPU",
                    flush=True,
                )
    print()
    for line in report(task, results):
        print(line)
    if asked.json is not None:
        every = {name: [asdict(each) for each in turns] for name, turns in results.items()}
        asked.json.write_text(json.dumps(every, indent=1), encoding="utf-8")


def podium_sides(
    devices: Sequence[int], against: Path | None, *, without_fork_server: bool, without_restarts: bool,
    adapters: Sequence[str] = (),
) -> list[Side]:  # fmt: skip
    """One for each number of devices, and beside it what it is compared with."""
    sides = []
    for count in devices:
        name = f"Podium, {count} device{'s' if count > 1 else ''}"
        command = (sys.executable, str(HERE / "grpo_podium.py"), "--devices", str(count))
        if not adapters:
            sides.append(Side(name=name, command=command, threads=1))
        for adapter in adapters:
            chosen = (*command, "--adapter", adapter)
            sides.append(Side(name=f"{name}, {adapter}", command=chosen, threads=1))
        if without_fork_server:
            sides.append(Side(name=f"{name}, no forks", command=(*command, "--without-fork-server"), threads=1))
        if without_restarts:
            sides.append(Side(name=f"{name}, no snapshots", command=(*command, "--without-restarts"), threads=1))
        if against is not None:
            sides.append(Side(name=f"{name}, other", command=command, threads=1, source=against))
    return sides


def trl_sides(device: str) -> list[Side]:
    """Empty where there is no TRL."""
    if BENCH.exists():
        python = str(BENCH)
    elif importlib.util.find_spec("trl") is not None:
        python = sys.executable
    else:
        print(f"TRL is not there: see {HERE / 'requirements.txt'}", flush=True)
        return []
    script, cores = str(HERE / "grpo_trl.py"), os.cpu_count() or 1
    if device == "cuda":
        return [Side(name="TRL", command=(python, script, "--threads", str(cores)), threads=cores)]
    found = [Side(name="TRL, 1 thread", command=(python, script, "--threads", "1"), threads=1)]
    if cores > 1:
        found.append(
            Side(name=f"TRL, {cores} threads", command=(python, script, "--threads", str(cores)), threads=cores)
        )
        ranks = max(count for count in range(1, min(cores, PROMPTS) + 1) if PROMPTS % count == 0)
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        command = (python, *torchrun, script, "--threads", "1", "--processes", str(ranks))
        found.append(Side(name=f"TRL, {ranks} processes", command=command, threads=1))
    return found


def run_side(side: Side, scratch: Path) -> SideResult:
    """One turn in a process of its own, so that no side inherits threads, caches or switches of another."""
    out = scratch / "result.json"
    out.unlink(missing_ok=True)
    command = [*side.command, "--task", str(scratch / "task.json"), "--out", str(out)]
    places = [str(side.source or ""), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(side.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # Workers do not stand in this folder: places that are relative to it would mean nothing to them.
        "PYTHONPATH": os.pathsep.join(str(Path(place).resolve()) for place in places if place),
    }
    with (scratch / "told.txt").open("w+", encoding="utf-8") as told:
        process = subprocess.Popen(command, env=environment, stdout=told, stderr=subprocess.STDOUT)
        try:
            code = process.wait(LIMIT_S)
        except BaseException as error:
            end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = -1
        told.seek(0)
        if code != 0 or not out.exists():
            ended = f"took longer than {LIMIT_S:.0f} s" if code == -1 else f"ended with {code}"
            raise SystemExit(f"{side.name} {ended}:\n{told.read()[-4000:]}")
    return SideResult.read(out)


def end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C twice does: a side that has processes of its own takes them with it."""
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            continue
        return
    process.kill()
    process.wait()


def report(task: Task, results: Mapping[str, Sequence[SideResult]]) -> list[str]:
    """Medians over the timed steps of all turns; ratios are of the medians, by wall and by CPU time."""
    step_s = {name: _median_step(turns) for name, turns in results.items()}
    cpu_s = {name: statistics.median(turn.cpu_s for turn in turns) for name, turns in results.items()}
    ours = [name for name in results if name.startswith("Podium")]
    peers = [name for name in results if name not in ours]
    turns = len(next(iter(results.values())))
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores; shape {task.shape} on {task.device}, {PROMPTS} prompts of "
        f"{task.shortest} to {task.longest} tokens x {SAMPLES} samples of {task.new_tokens}; {turns} turns of "
        f"{task.steps - task.warmup} timed steps",
        f"{'':<28} {'s/step':>7} {'(range)':>15} {'mean':>7} {'CPU s/step':>10} {'tokens/s':>9} {'reward':>6}",
    ]
    for name, each in results.items():
        every = [seconds for turn in each for seconds in turn.step_s]
        spread = f"({min(every):.2f}-{max(every):.2f})"
        reward = statistics.mean(turn.reward for turn in each)
        lines.append(
            f"{name:<28} {step_s[name]:>7.3f} {spread:>15} {statistics.mean(every):>7.3f} {cpu_s[name]:>10.3f} "
            f"{task.generated_per_step / step_s[name]:>9,.0f} {reward:>6.3f}"
        )
    if peers:
        by_wall, by_cpu = min(peers, key=step_s.__getitem__), min(peers, key=cpu_s.__getitem__)
        lines += [
            f"{name}: {step_s[by_wall] / step_s[name]:.2f}x as fast by wall time (best: {by_wall}), "
            f"{cpu_s[by_cpu] / cpu_s[name]:.2f}x by CPU time (best: {by_cpu})"
            for name in ours
        ]
    elif (known := KNOWN_PEER.get((task.device, task.shape))) is not None:
        low, high = known
        lines += [
            f"{name}: TRL was not measured in this run. Its known figure for one H200 is {low} to {high} s a step; "
            f"against that {low / step_s[name]:.1f}x to {high / step_s[name]:.1f}x"
            for name in ours
        ]
    for name in ours:
        lines += ["", *phase_lines(name, task, results[name])]
    return lines


def phase_lines(name: str, task: Task, turns: Sequence[SideResult]) -> list[str]:
    """Where Podium's step goes, by its own metrics: medians of each, so that they need not add up."""

    def of(metric: str) -> float:
        return statistics.median(turn.phases.get(metric, 0.0) for turn in turns)

    step_s, idle_s = of("step_s"), of("idle_s")
    phases = ", ".join(f"{phase} {1e3 * of(f'time/{phase}_s'):.1f}" for phase in PHASES)
    if task.device == "cuda":
        goal, holds = "below 2% of the step", idle_s < 0.02 * step_s
    else:
        goal, holds = "below 50 ms", idle_s < 0.05
    return [
        f"{name}, by its own metrics: step {1e3 * step_s:.1f} ms: {phases}",
        f"  nobody at work (the controller's overhead): {1e3 * idle_s:.1f} ms, {idle_s / step_s:.2%} of the step; "
        f"goal {goal}: {'holds' if holds else 'MISSED'}",
        f"  {of('rollout/tokens_per_s'):,.0f} tokens/s of rollout, {of('update/tokens_per_s'):,.0f} tokens/s of "
        f"update; MFU {of('mfu'):.2%} of the step, {of('update/mfu'):.2%} of the update",
        f"  prompts of {of('prompt/mean'):.0f} tokens, {of('micro_steps'):.0f} micro-steps, engine against learner "
        f"{of('gap/mean'):.1e} (log-probs, mean)",
    ]


def _median_step(turns: Sequence[SideResult]) -> float:
    return statistics.median(seconds for turn in turns for seconds in turn.step_s)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--devices", type=int, nargs="+", help="Podium's workers, each a side; CPU: 2, CUDA: 1")
    parser.add_argument("--peers", default="trl", help='"" for none')
    parser.add_argument("--against", type=Path, help="src of another commit of Podium: a side more")
    parser.add_argument("--without-fork-server", action="store_true", help="a side more: placement.fork_workers: false")
    parser.add_argument(
        "--without-restarts", action="store_true", help="a side more: placement.restarts: 0, no snapshots"
    )
    parser.add_argument("--lora", type=int, help="rank of an adapter; default: all weights are trained")
    parser.add_argument(
        "--adapters", nargs="+", choices=["auto", "merged", "apart"], default=[],
        help="rollout.adapter with --lora; each a side",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, help="of each side; CPU: 3, CUDA: 1")
    parser.add_argument("--steps", type=int, default=10, help="of a turn, warm-up included")
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not timed")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, help="shortest and longest; CPU: 8 64, CUDA: 64 256")
    parser.add_argument("--new-tokens", type=int, help="of every answer; CPU: 64, CUDA: 256")
    parser.add_argument("--json", type=Path, help="also write every turn's figures here")
    found = parser.parse_args()
    cuda = found.device == "cuda"
    found.devices = found.devices or [1 if cuda else 2]
    found.turns = found.turns or (1 if cuda else 3)
    found.prompt_tokens = found.prompt_tokens or ([64, 256] if cuda else [8, 64])
    found.new_tokens = found.new_tokens or (256 if cuda else 64)
    if found.adapters and found.lora is None:
        parser.error("--adapters needs --lora")
    if found.lora is not None and "trl" in found.peers.split(","):
        parser.error('TRL\'s side trains all weights: with --lora give --peers ""')
    if not 0 < found.warmup < found.steps:
        parser.error("--warmup must be at least 1 and below --steps")
    return found


if __name__ == "__main__":
    main()
