# SPDX-License-Identifier: Apache-2.0
"""Event log and page server as a share of the GRPO benchmark's step on CPU, by processor time.

    .venv/bin/python benchmarks/log_and_page_cost.py [--turns 3] [--steps 40] [--devices 2]

Runs of the GRPO benchmark take turns: nobody looks, then `podium ui` runs with an open page, which one is first
alternates. In the turns with a page its processes are measured from the end of the warm-up to the last step. The event
log is written in every run: what its spans cost is measured in the same turn (timeline_cost.py) and multiplied by
their number. Both are divided by the processor time of a step without a page. The last line is the row; the one before
it says how much more processor time the run itself takes while somebody looks, which the row does not count."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from grpo_podium import train
from grpo_task import SideResult, Task, make_task
from page_cost import opened, served, spent_s
from timeline_cost import costs, log_s

HERE = Path(__file__).resolve().parent
LIMIT_S = 900.0
RUN = "grpo"
TABS = ("timeline", "overview")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One run. All figures are processor seconds of a step, but `wall_s`."""

    step_s: float
    wall_s: float
    log_s: float
    page_s: float | None  # None: nobody looked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="of each kind")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=5, help="first steps, which are not measured")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--inline", action="store_true", help="one process without Ray: quicker, and not the benchmark")
    parser.add_argument("--train", type=Path, help="one run of the task in this folder, in this process")
    asked = parser.parse_args()
    if asked.train is not None:
        placement = {"launcher": "inline", "devices": 1} if asked.inline else {}
        task = Task.read(asked.train / "task.json")
        train(task, asked.devices, placement, str(asked.train)).write(asked.train / "out.json")
        return
    print(f"load of the machine: {' '.join(f'{each:.1f}' for each in os.getloadavg())}", flush=True)
    turns: list[Turn] = []
    for number in range(asked.turns):
        for is_open in (False, True) if number % 2 else (True, False):
            found = turn(asked, TABS[number % len(TABS)] if is_open else None)
            turns.append(found)
            page = "nobody looks" if found.page_s is None else f"podium ui {1e3 * found.page_s:.2f} ms"
            print(
                f"turn {number + 1}: {found.step_s:.3f} s of processor time a step (wall: {found.wall_s:.3f} s), "
                f"event log {1e3 * found.log_s:.2f} ms, {page}",
                flush=True,
            )
    for line in report(turns):
        print(line)


def turn(asked: argparse.Namespace, tab: str | None) -> Turn:
    """One run in processes of its own. `tab`: the one that is open in a page."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        task = Task(
            folder=scratch, shape="tiny", device="cpu", steps=asked.steps, warmup=asked.warmup, shortest=8, longest=64,
            new_tokens=64,
        )  # fmt: skip
        make_task(task)
        task.write(folder / "task.json")
        command = [sys.executable, __file__, "--train", scratch, "--devices", str(asked.devices)]
        command += ["--inline"] if asked.inline else []
        metrics = folder / RUN / "metrics.jsonl"
        run = subprocess.Popen(command, cwd=HERE, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            spent = None
            if tab is not None:
                wait_for(metrics, 1, run)
                server, address = stack.enter_context(served(folder))
                stack.enter_context(opened(address, tab, run=RUN))
                began = wait_for(metrics, asked.warmup, run)
                before_s = spent_s(server.pid)
                steps = wait_for(metrics, asked.steps, run) - began
                spent = (spent_s(server.pid) - before_s) / steps
            code = run.wait(LIMIT_S)
        finally:
            if run.poll() is None:
                run.terminate()
                run.wait(60)
        if code:
            raise SystemExit(f"the run failed with exit code {code}")
        side = SideResult.read(folder / "out.json")
        return Turn(
            step_s=side.cpu_s, wall_s=statistics.median(side.step_s), log_s=log_s(folder / RUN, costs(3)), page_s=spent
        )


def wait_for(metrics: Path, steps: int, run: subprocess.Popen[bytes]) -> int:
    """Until a run has recorded so many steps; returns how many it has."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        count = metrics.read_bytes().count(b'"step_s"') if metrics.is_file() else 0
        if count >= steps:
            return count
        if run.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"the run ended, or took too long, with {count} of {steps} steps")
        time.sleep(0.05)


def report(turns: list[Turn]) -> list[str]:
    """The medians of the turns, and the row."""
    alone, watched = (
        [each for each in turns if each.page_s is None],
        [each for each in turns if each.page_s is not None],
    )
    step_s, watched_s = (statistics.median(each.step_s for each in some) for some in (alone, watched))
    log = statistics.median(each.log_s for each in turns)
    page = statistics.median(each.page_s for each in watched if each.page_s is not None)
    spread = max(each.step_s for each in alone) / min(each.step_s for each in alone) - 1
    return [
        f"event log {log / step_s:.2%}, page server {page / step_s:.2%} of {step_s:.3f} s of processor time a step",
        f"the run itself takes {watched_s / step_s - 1:+.2%} while somebody looks (turns without a page differ by "
        f"{spread:.2%})",
        f"event log + page server: {(log + page) / step_s:.2%} of the GRPO benchmark's step (CPU)",
    ]


if __name__ == "__main__":
    main()
