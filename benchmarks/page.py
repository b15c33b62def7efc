# SPDX-License-Identifier: Apache-2.0
"""How fast `podium ui` answers for a large run: a folder is made, a server is started, and each address is asked once.

    python benchmarks/page.py [--steps 10000] [--metrics 100] [--episodes 1000] [--runs 20] [--wait-index 0]

The first answers are those of a fresh server: nothing is in memory, and there is no index of rollouts. `--episodes` are
those of one step; one file of rollouts is written, and all steps link to it. `--wait-index` seconds are given to the
index at most, after which the addresses that use it are asked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from podium.recipe import dump_recipe, parse_recipe
from podium.runs.folder import RunFolder
from podium.ui.server import PageServer

_BEGIN_S = 1.75e9
_STEP_S = 30.0
_WORKERS = ("rollout[0]@a/0#0", "rollout[1]@a/1#0", "train[0]@a/2#0", "train[1]@a/3#0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--metrics", type=int, default=100, help="metrics of a step")
    parser.add_argument("--episodes", type=int, default=1_000, help="kept episodes of a step")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of an episode")
    parser.add_argument("--runs", type=int, default=20, help="runs in the folder, the others without rollouts")
    parser.add_argument("--wait-index", type=float, default=0.0, help="seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        begin_s = time.perf_counter()
        for number in range(options.runs):
            make_run(runs, f"run{number}", steps=options.steps if number == 0 else 100, metrics=options.metrics)
        add_rollouts(runs / "run0", steps=options.steps, episodes=options.episodes, tokens=options.tokens)
        print(
            f"made in {time.perf_counter() - begin_s:.0f} s: {options.steps * options.episodes:,} episodes", flush=True
        )
        server = PageServer(runs, cache=runs / ".cache")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            measure(server, options.steps, options.wait_index)
        finally:
            server.stop()


def measure(server: PageServer, steps: int, wait_index_s: float) -> None:
    """Prints seconds and sizes of answers."""
    names = "loss,reward/mean,m3,m4,m5,m6,m7,m8,m9,m10"
    opening = ("/api/runs", "/api/runs/run0", f"/api/runs/run0/metrics?names={names}&points=1000")
    total_s = sum(asked(server, path) for path in opening)
    print(f"the page of the run opens in {total_s:.2f} s")
    asked(server, "/api/runs/run0/metrics?points=300")
    begin_s, end_s = _BEGIN_S + steps / 2 * _STEP_S, _BEGIN_S + (steps / 2 + 3) * _STEP_S
    for path in (
        "/timeline?points=1200",
        f"/timeline?points=1200&from_s={begin_s}&to_s={end_s}",
        "/accounting",
        f"/rollouts?step={steps // 2}&sort=-reward",
        f"/rollouts?step={steps // 2}&q=needle",
        f"/rollouts/{steps // 2}/3",
        "/rollouts?sort=reward",
    ):
        asked(server, f"/api/runs/run0{path}")
    if not wait_index_s:
        return
    progress = get(server, "/api/runs/run0/rollouts?size=1")["index"]
    first, begin_s = progress["done"], time.monotonic()
    while time.monotonic() < begin_s + wait_index_s and progress["done"] < progress["of"]:
        time.sleep(1.0)
        progress = get(server, "/api/runs/run0/rollouts?size=1")["index"]
    rate = (progress["done"] - first) / (time.monotonic() - begin_s)
    size = sum(file.stat().st_size for file in (server.site.catalogue.folder / ".cache").iterdir())
    print(
        f"index: {progress['done']:,} of {progress['of']:,} episodes, {rate:,.0f} a second; "
        f"{size / 1e6:,.0f} MB, {size / max(1, progress['done']):.0f} bytes an episode"
    )
    last_page = max(1, progress["done"] // 50)
    for path in (
        "?sort=reward",
        "?sort=reward",
        "?sort=-length&page=100",
        f"?sort=-reward&page={last_page // 2}",
        f"?sort=step&page={last_page}",
        "?source=b&sort=-reward",
        "?group=3&sort=-step",
    ):
        asked(server, f"/api/runs/run0/rollouts{path}")
    begin_s = time.monotonic()
    while True:  # a search goes on with the next request
        asked(server, "/api/runs/run0/rollouts?sort=-reward&q=needle")
        if get(server, "/api/runs/run0/rollouts?sort=-reward&q=needle").get("is_whole"):
            break
        if time.monotonic() > begin_s + wait_index_s:
            print("the search did not end")
            break
    print(f"the whole search took {time.monotonic() - begin_s:.1f} s")


def asked(server: PageServer, path: str) -> float:
    """Asks once, and prints how long it took."""
    begin_s = time.perf_counter()
    size = len(urllib.request.urlopen(server.url.rstrip("/") + path, timeout=300).read())
    seconds = time.perf_counter() - begin_s
    print(f"{seconds:7.3f} s  {size / 1e3:8.0f} kB  {path}", flush=True)
    return seconds


def get(server: PageServer, path: str) -> Any:
    with urllib.request.urlopen(server.url.rstrip("/") + path, timeout=300) as answer:
        return json.load(answer)


def make_run(runs: Path, name: str, *, steps: int, metrics: int) -> None:
    """Recipe, state, metrics and timeline of a finished run."""
    recipe = parse_recipe(
        {
            "program": "sft", "model": {"path": "models/base"}, "data": {"train": [{"path": "data/train.jsonl"}]},
            "optimizer": {"lr": 1e-3}, "steps": steps, "run": {"folder": str(runs), "name": name},
        }
    )  # fmt: skip
    run, rng = RunFolder(path=runs / name), random.Random(name)
    run.checkpoints.mkdir(parents=True)
    run.recipe_file.write_text(dump_recipe(recipe))
    run.update(status="finished", step=steps, program="sft", versions={}, lineage={})
    names = ["loss", "reward/mean", "step_s", *(f"m{number}" for number in range(3, metrics))]
    with run.metrics_file.open("w") as file:
        for step in range(1, steps + 1):
            values = {each: rng.random() for each in names}
            file.write(json.dumps({"step": step, "time_s": _BEGIN_S + step * _STEP_S, **values}) + "\n")
    with (run.path / "timeline.jsonl").open("w") as file:
        write_spans(file.write, "controller", [["launch", _BEGIN_S, 0.0], ["start-up", _BEGIN_S, _STEP_S]])
        for step in range(1, steps + 1):
            at_s = _BEGIN_S + step * _STEP_S
            write_spans(
                file.write,
                "controller",
                [["rollout", at_s, 18.0], ["grade", at_s + 18, 2.0], ["update", at_s + 20, 9.0]],
            )
            for worker in _WORKERS:
                spans: list[list[object]] = [["generator.stream", at_s, round(12 + 6 * rng.random(), 6)]]
                if worker.startswith("train"):
                    spans = [
                        ["policy.update", at_s + 20, 9.0],
                        ["policy.update > forward", at_s + 20, 3.0],
                        ["policy.update > backward", at_s + 23, 5.0],
                    ]
                write_spans(file.write, worker, spans)


def write_spans(write: object, worker: str, spans: list[list[object]]) -> None:
    assert callable(write)
    write(json.dumps({"worker": worker, "spans": spans}, separators=(",", ":")) + "\n")


def add_rollouts(run: Path, *, steps: int, episodes: int, tokens: int) -> None:
    """One file of episodes, with a name for every step."""
    rng = random.Random(0)
    numbers = list(range(tokens))
    prompt = tokens // 4
    rows = [
        {
            "step": 1, "group": at // 8, "sample": at % 8, "source": rng.choice("ab"), "row": at // 8,
            "messages": json.dumps(
                [
                    {"role": "user", "content": f"prompt {at // 8} " + "word " * 40},
                    {"role": "assistant", "content": ("needle " if at % 100 == 0 else "hay ") + "answer " * 60},
                ]
            ),
            "prompt_tokens": prompt, "tokens": numbers[: tokens - rng.randrange(tokens // 2)], "reward": rng.random(),
            "rewards": [("correct", rng.random())], "ending": "stop", "trained": True,
        }
        for at in range(episodes)
    ]  # fmt: skip
    for row in rows:
        length = len(row["tokens"])  # type: ignore[arg-type]
        row |= {
            "texts": [" word"] * length, "loss_mask": [at >= prompt for at in range(length)],
            "log_probs": [-0.5] * length, "versions": [1] * length, "advantages": [0.1] * length,
        }  # fmt: skip
    types = {"rewards": pa.map_(pa.string(), pa.float64())}
    table = pa.table({name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]})
    folder = run / "rollouts"
    folder.mkdir()
    first = folder / f"step-{1:08d}.parquet"
    pq.write_table(table, first)
    for step in range(2, steps + 1):
        os.link(first, folder / f"step-{step:08d}.parquet")


if __name__ == "__main__":
    sys.exit(main())
