# SPDX-License-Identifier: Apache-2.0
"""Whether this checkout has become slower: CPU benchmarks beside those of an earlier commit, in one run, as ratios.

    make bench                                                 beside the commit in regression.json, about 5 minutes
    .venv/bin/python benchmarks/regression.py --against HEAD~5 --turns 5

Both sides run in this environment and take turns, each in processes of its own, and the one that begins alternates. The
figure is the median of the ratios of the turns, with its range: on a busy machine the range says whether it means
anything. A ratio above 1 is slower than before; CPU time counts all processes of a side. It ends with code 1 if a
ratio, also that of the best turn, is above --worst."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpo
import grpo_task
import kills_task
import sft_task
import start_up

HERE = Path(__file__).resolve().parent
REFERENCE = HERE / "regression.json"
LIMIT_S = 300.0
SFT_STEPS, SFT_WARMUP = 40, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure over all turns: seconds of both sides, less is better."""

    name: str
    now_s: tuple[float, ...]
    before_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Of each turn: above 1 is slower than before."""
        return [now / before for now, before in zip(self.now_s, self.before_s, strict=True)]

    def line(self) -> str:
        """A row of the table."""
        spread = f"({min(self.ratios):.2f}-{max(self.ratios):.2f})"
        now_s, before_s = statistics.median(self.now_s), statistics.median(self.before_s)
        return f"{self.name:<34} {before_s:>9.3f} {now_s:>9.3f} {statistics.median(self.ratios):>6.2f} {spread:>13}"


class Tasks:
    """The work of both sides, made once."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        (scratch / "grpo").mkdir()
        (scratch / "runs").mkdir()
        self._grpo = grpo_task.Task(
            folder=str(scratch / "grpo"), shape="tiny", device="cpu", steps=7, warmup=3, shortest=8, longest=64,
            new_tokens=32,
        )  # fmt: skip
        grpo_task.make_task(self._grpo)
        self._grpo.write(scratch / "grpo" / "task.json")
        sft_task.make_task(scratch / "sft", 16)
        self._start = kills_task.make_task(scratch / "start").recipe_file("colocated")
        self._num_starts = 0

    def turn(self, source: Path) -> dict[str, float]:
        """Seconds of everything with the code of this `src` folder."""
        return {
            **self._checked(source),
            **self._fine_tuned(source),
            **self._reinforced(source),
            **self._started(source),
        }

    def _checked(self, source: Path) -> dict[str, float]:
        command = [sys.executable, "-m", "podium", "check", str(self._start)]
        began = time.perf_counter()
        _run(command, source)
        return {"podium check": time.perf_counter() - began}

    def _fine_tuned(self, source: Path) -> dict[str, float]:
        out = self._scratch / "sft.json"
        steps = ["--steps", str(SFT_STEPS), "--warmup", str(SFT_WARMUP), "--rows", "16"]
        command = [sys.executable, str(HERE / "sft_podium.py"), "--task", str(self._scratch / "sft"), *steps]
        _run([*command, "--out", str(out)], source)
        found = sft_task.SideResult.read(out)
        return {"SFT, 1000 tokens": 1e3 / found.tokens_per_s, "SFT, 1000 tokens, CPU": 1e3 / found.tokens_per_cpu_s}

    def _reinforced(self, source: Path) -> dict[str, float]:
        command = (sys.executable, str(HERE / "grpo_podium.py"), "--devices", "1")
        side = grpo.Side(name="GRPO", command=command, threads=1, source=source)
        found = grpo.run_side(side, self._scratch / "grpo")
        phases = {f"GRPO, {name}": found.phases[f"time/{name}_s"] for name in ("rollout", "update", "publish")}
        return {"GRPO, step": statistics.median(found.step_s), "GRPO, step, CPU": found.cpu_s, **phases}

    def _started(self, source: Path) -> dict[str, float]:
        self._num_starts += 1
        found = start_up.measured(self._start, source, self._scratch / "runs" / str(self._num_starts))
        return {"GRPO, start to first step": found.seconds, "GRPO, start to first step, CPU": found.cpu_s}


def main() -> None:
    asked = parsed()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        commit = source_of(asked.against, scratch / "before")
        tasks = Tasks(scratch)
        sides = {"now": HERE.parent / "src", "before": scratch / "before" / "src"}
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for number in range(asked.turns):
            for name in sorted(sides, reverse=bool(number % 2)):
                turns[name].append(tasks.turn(sides[name]))
            print(f"turn {number + 1} of {asked.turns} is over", flush=True)
    figures = figures_of(turns["now"], turns["before"])
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; before: {commit[:10]}")
    print(f"{'seconds':<34} {'before':>9} {'now':>9} {'ratio':>6} {'(range)':>13}")
    for figure in figures:
        print(figure.line())
    if asked.json is not None:
        asked.json.write_text(json.dumps(record(commit, figures), indent=1), encoding="utf-8")
    slower = [each.name for each in figures if min(each.ratios) > asked.worst]
    if slower:
        raise SystemExit(f"slower than {asked.worst:g} times before in every turn: {', '.join(slower)}")


def figures_of(now: Sequence[Mapping[str, float]], before: Sequence[Mapping[str, float]]) -> list[Figure]:
    """What both sides have, in the order of this one's."""
    return [
        Figure(name=name, now_s=tuple(each[name] for each in now), before_s=tuple(each[name] for each in before))
        for name in now[0]
    ]


def record(commit: str, figures: Sequence[Figure]) -> dict[str, object]:
    """For comparisons over time: what was measured, where, and with what."""
    import torch

    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "now": _git("rev-parse", "HEAD").decode().strip(),
        "before": commit,
        "figures": [asdict(each) for each in figures],
    }


def source_of(commit: str | None, folder: Path) -> str:
    """Unpacks `src` of a commit, by default the reference's. Returns its full name."""
    commit = commit or json.loads(REFERENCE.read_text(encoding="utf-8"))["commit"]
    try:
        found = _git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
        packed = _git("archive", "--format=tar", found, "src")
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"commit {commit} is not in this clone, so there is nothing to compare with; fetch the history "
            "(git fetch --unshallow), or name another one with --against."
        ) from error
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    return found


def _git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(HERE.parent), *arguments], capture_output=True, check=True, timeout=60
    ).stdout


def _run(command: Sequence[str], source: Path) -> None:
    places = os.pathsep.join([str(source), str(HERE)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": places, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="a commit; default: the one in regression.json")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--worst", type=float, default=1.25, help="ratio from which on it fails")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
