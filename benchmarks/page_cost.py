# SPDX-License-Identifier: Apache-2.0
"""What it costs a run that somebody looks at it: processor time of `podium ui` while a run goes on, and of writing a
step's rollouts.

    python benchmarks/page_cost.py [--seconds 60] [--steps 2000] [--metrics 60] [--kept 32] [--tokens 512]

A folder of a run is made, and goes on: every second a step with its metrics, spans and rollouts. `podium ui` runs as a
process of its own. One page is open, as the page in a browser is: a stream of events, and what each tab asks for
again. All processes of `podium ui` count. A step takes 1 s here, so that milliseconds of a second are shares of a step
of one second, on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from page import make_run, write_spans
from podium.runs.rollout_files import RolloutColumns, write_rollouts

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# A server has read what is there when it used less than this share of a processor for so many seconds.
_WARM_S, _MOST_WARM_S, _SETTLED = 6.0, 60.0, 0.04
_WORKERS = ("rollout[0]@a/0#0", "rollout[1]@a/1#0", "train[0]@a/2#0", "train[1]@a/3#0")
# What the page asks for again while a run goes on, by tab: address, and seconds between two requests.
_TABS: dict[str, tuple[tuple[str, float], ...]] = {
    "overview": (("/findings", 15.0),),
    "curves": (),
    "timeline": (("/timeline?points=1200", 5.0), ("/findings", 15.0)),
    "rollouts": (("/rollouts?sort=-step&size=50", 5.0),),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each tab")
    parser.add_argument("--steps", type=int, default=2_000, help="of the run when the page is opened")
    parser.add_argument("--metrics", type=int, default=60, help="metrics of a step")
    parser.add_argument("--kept", type=int, default=32, help="kept episodes of a step")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an episode")
    options = parser.parse_args()
    print(f"load of the machine: {' '.join(f'{each:.1f}' for each in os.getloadavg())}")
    columns = episodes(options.kept, options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        cost_s = [processor_s(lambda: write_rollouts(Path(folder), columns)) for _ in range(15)]
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    print(
        f"rollouts of a step ({options.kept} episodes of {options.tokens} tokens, {size / 1e3:.0f} kB): "
        f"{share(statistics.median(cost_s))}, in a thread beside the next step"
    )
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        make_run(runs, "run0", steps=options.steps, metrics=options.metrics)
        with going_on(runs / "run0", options.steps, options.metrics, columns), served(runs) as (process, address):
            print(f"podium ui, no page is open: {share(cost_of(process, options.seconds / 3))}")
            for tab in _TABS:
                with opened(address, tab):
                    print(f"podium ui, {tab} is open: {share(cost_of(process, options.seconds))}", flush=True)


def share(seconds: float) -> str:
    """Of a step of one second."""
    return f"{1000 * seconds:.1f} ms of processor time, {seconds:.2%} of a step of 1 s"


def processor_s(work: Callable[[], object]) -> float:
    """Processor time of all threads."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def cost_of(process: subprocess.Popen[str], seconds: float) -> float:
    """Processor seconds of a process and its children in a second, after it has read what is there."""
    until_s, spent = time.monotonic() + _MOST_WARM_S, -1.0
    while spent_s(process.pid) - spent > _SETTLED * _WARM_S and time.monotonic() < until_s:
        spent = spent_s(process.pid)
        time.sleep(_WARM_S)
    began_s, before_s = time.monotonic(), spent_s(process.pid)
    time.sleep(seconds)
    return (spent_s(process.pid) - before_s) / (time.monotonic() - began_s)


def spent_s(pid: int) -> float:
    """Processor seconds of a process, of its children that have ended, and of those that live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for task in Path(f"/proc/{pid}/task").iterdir():
            if task.name != str(pid):
                children += (task / "children").read_text().split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) * _TICK_S + sum(spent_s(int(child)) for child in children)


@contextmanager
def served(runs: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`podium ui` as a user starts it, and its address."""
    command = [sys.executable, "-m", "podium", "ui", str(runs), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split()[2]
        finally:
            process.terminate()


@contextmanager
def opened(address: str, tab: str, run: str = "run0") -> Iterator[None]:
    """A page of the run: a stream of events, and the requests of a tab."""
    ended = threading.Event()
    base = f"{address}api/runs/{run}"
    names = "loss,reward/mean,m3,m4,m5,m6"
    for path in ("", f"/metrics?names={names}&points=1000"):
        urllib.request.urlopen(base + path, timeout=120).read()

    def listen() -> None:
        with urllib.request.urlopen(f"{address}api/events?run={run}", timeout=120) as stream:
            while not ended.is_set():
                stream.readline()

    def ask(path: str, every_s: float) -> None:
        known = ""
        while not ended.is_set():
            answer = urllib.request.urlopen(base + path + known, timeout=120).read()
            if path.startswith("/timeline"):  # from now on only what is new
                view = json.loads(answer)
                known = f"&from_s={view['begin_s']}&after={view['version']}&point_s={view['point_s']}"
            ended.wait(every_s)

    threads = [threading.Thread(target=listen, daemon=True)]
    threads += [threading.Thread(target=ask, args=each, daemon=True) for each in _TABS[tab]]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(timeout=120)


@contextmanager
def going_on(run: Path, step: int, metrics: int, columns: RolloutColumns) -> Iterator[None]:
    """Writes a step every second, as a run does."""
    ended, rng = threading.Event(), random.Random(0)
    names = ["loss", "reward/mean", "step_s", *(f"m{number}" for number in range(3, metrics))]

    def write() -> None:
        number = step
        while not ended.wait(1.0):
            number, now_s = number + 1, time.time()
            with (run / "timeline.jsonl").open("a") as file:
                for worker in ("controller", *_WORKERS):
                    names_of = ("update", "publish") if worker == "controller" else ("policy.update", "policy.share")
                    write_spans(
                        file.write, worker, [[each, now_s - 1 + at / 3, 0.3] for at, each in enumerate(names_of)]
                    )
            write_rollouts(run / "rollouts", columns)
            made = run / "rollouts" / f"step-{columns.step:08d}.parquet"
            made.replace(run / "rollouts" / f"step-{number:08d}.parquet")
            with (run / "metrics.jsonl").open("a") as file:
                line = {"step": number, "time_s": now_s, **{each: rng.random() for each in names}}
                file.write(json.dumps(line) + "\n")

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=30)


def episodes(count: int, tokens: int) -> RolloutColumns:
    """Answers of random tokens, in groups of eight."""
    rng = np.random.default_rng(0)
    number = count * tokens
    prompt = tokens // 4
    sampled_T = np.tile(np.arange(tokens) >= prompt, count)
    words = [f" w{at}" for at in range(4096)]
    which_T = rng.integers(0, len(words), number)
    answers = ["".join(words[at] for at in which_T[row * tokens + prompt : (row + 1) * tokens]) for row in range(count)]
    return RolloutColumns(
        step=0, facts={}, group_N=np.arange(count) // 8, sample_N=np.arange(count) % 8, sources=["sums"] * count,
        rows=list(range(count)), references=[None] * count,
        messages=[
            json.dumps([{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": each}])
            for each in answers
        ],
        prompt_N=np.full(count, prompt), offsets=np.arange(count + 1) * tokens,
        tokens_T=which_T.astype(np.int32), token_texts=(words, which_T), loss_mask_T=sampled_T, sampled_T=sampled_T,
        versions_T=np.zeros(number, np.int32),
        values_T={
            name: np.where(sampled_T, rng.normal(size=number), np.nan).astype(np.float32)
            for name in ("log_probs", "advantages")
        },
        rewards_N=rng.random(count), rewards=[{"correct": 1.0}] * count, endings=["stop"] * count,
        trained_N=np.ones(count, bool), states=["consumed"] * count, errors=[None] * count,
    )  # fmt: skip


if __name__ == "__main__":
    main()
