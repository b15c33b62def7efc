# SPDX-License-Identifier: Apache-2.0
"""Rows over ranks: Podium's splitting beside verl's balancing, on the same lengths, in one run.

    .venv/bin/python benchmarks/splitting.py                 (see requirements-verl.txt for verl's environment)

Lengths are log-normal (sigma 1, mean 2000, at most 32768), but for the last part. A row of L tokens costs L (linear) or
24576 L + L² (quadratic, verl's own formula). Quality is the sum over micro-steps of the slowest rank's cost: over
perfectly even work ("of even"), and over what no plan with these mini-batches can beat ("of bound"). Times are CPU
milliseconds of one thread, the least of several turns. Without verl only Podium's figures are printed.

verl's ways: "default" is its default trainer, which gives the balancing a tensor and cuts a rank's rows into
mini-batches in the order in which they came; "as list" the same, given plain numbers; "legacy" its legacy trainer,
which sorts a rank's rows by work first, so that it chooses itself which rows are updated together; "keep mini-batches"
an argument of that trainer which no caller sets.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from podium.data.costs import SequenceCost
from podium.data.splitting import SplitPlan, split_rows

ROOT = Path(__file__).parent.parent
ROOMY = 1 << 40
SIZES, RANKS = (1024, 10240, 102400), (8, 64, 512)
COSTS = {False: SequenceCost.plain(linear=1.0), True: SequenceCost.plain(linear=24576.0, quadratic=1.0)}
NAMES = {False: "linear", True: "quadratic"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem, and the ways in which verl is asked to solve it."""

    num_rows: int
    num_ranks: int
    quadratic: bool
    mini_batches: int = 1
    max_tokens: int = ROOMY
    group: int | None = None
    short: bool = False
    ways: tuple[str, ...] = ()

    @property
    def lengths(self) -> str:
        return f"{'short' if self.short else 'long'}-{self.num_rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """How good and how quick; or why there is nothing to tell."""

    slowest: float = float("nan")
    ms: float = float("nan")
    micro_steps: int = 0
    error: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, default=ROOT / ".venv-bench-verl/bin/python", help="python that has verl")
    parser.add_argument("--limit", type=int, default=120, help="CPU seconds that verl has for one case")
    parser.add_argument("--most-rows", type=int, default=max(SIZES), help="leave out larger cases")
    parser.add_argument("--repeats", type=int, default=5, help="turns of which the fastest counts")
    asked = parser.parse_args()
    parts = {name: [case for case in cases if case.num_rows <= asked.most_rows] for name, cases in PARTS.items()}
    with tempfile.TemporaryDirectory() as scratch:
        theirs = verl_figures([case for cases in parts.values() for case in cases], asked, Path(scratch))
    print(f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}, one thread")
    for name, cases in parts.items():
        print(f"\n### {name}")
        for line in table(cases, theirs, asked.repeats):
            print(line, flush=True)
    print("\nA plan, printed (10,240 rows, 64 ranks, 4 mini-batches, quadratic, at most 65,536 tokens):\n")
    print(podium_plan(Case(num_rows=10240, num_ranks=64, quadratic=True, mini_batches=4, max_tokens=65536)))


def lengths_of(case: Case) -> np.ndarray:
    random = np.random.default_rng(0)
    if case.short:
        return random.integers(400, 600, case.num_rows)
    return np.clip(random.lognormal(np.log(2000) - 0.5, 1.0, case.num_rows), 1, 32768).astype(np.int64)


def podium_plan(case: Case) -> SplitPlan:
    lengths_N, rows_N = lengths_of(case), np.arange(case.num_rows)
    return split_rows(
        lengths_N, COSTS[case.quadratic].of(lengths_N), num_ranks=case.num_ranks, max_tokens=case.max_tokens,
        mini_batch_N=rows_N * case.mini_batches // case.num_rows,
        group_N=None if case.group is None else rows_N // case.group,
    )  # fmt: skip


def podium_figure(case: Case, repeats: int) -> tuple[Figure, SplitPlan]:
    """The time is that of all of `split_rows`, the plan's own account of itself included."""
    lengths_N, rows_N = lengths_of(case), np.arange(case.num_rows)
    costs_N = COSTS[case.quadratic].of(lengths_N)
    mini_batch_N = rows_N * case.mini_batches // case.num_rows
    group_N = None if case.group is None else rows_N // case.group
    times = []
    for _ in range(repeats):
        began = time.process_time()
        plan = split_rows(
            lengths_N, costs_N, num_ranks=case.num_ranks, max_tokens=case.max_tokens, mini_batch_N=mini_batch_N,
            group_N=group_N,
        )  # fmt: skip
        times.append(time.process_time() - began)
    slowest = sum_of_slowest(case, plan.rank_N, plan.mini_batch_N, plan.micro_step_N)
    return Figure(slowest=slowest, ms=1000 * min(times), micro_steps=plan.num_micro_steps), plan


def sum_of_slowest(case: Case, rank_N: np.ndarray, mini_batch_N: np.ndarray, micro_step_N: np.ndarray) -> float:
    """Counted the same way for both sides: the dearest rank of every micro-step of every mini-batch."""
    steps_N = mini_batch_N * (micro_step_N.max() + 1) + micro_step_N
    costs = np.bincount(steps_N * case.num_ranks + rank_N, COSTS[case.quadratic].of(lengths_of(case)))
    costs = np.concatenate([costs, np.zeros(-len(costs) % case.num_ranks)])
    return float(costs.reshape(-1, case.num_ranks).max(axis=1).sum())


def verl_figures(cases: Sequence[Case], asked: argparse.Namespace, scratch: Path) -> dict[tuple[Case, str], Figure]:
    """All of verl's side in one process of its own environment; nothing when there is none."""
    if not asked.verl.exists():
        print(
            f"no verl at {asked.verl}: only Podium's figures. benchmarks/requirements-verl.txt says how to install it."
        )
        return {}
    tasks = {f"case-{number}": task for number, task in enumerate((case, way) for case in cases for way in case.ways)}
    for case in cases:
        np.save(scratch / f"{case.lengths}.npy", lengths_of(case))
    orders = [
        asdict(case) | {"name": name, "lengths": case.lengths, "way": way, "limit_s": asked.limit, "repeats": 3}
        for name, (case, way) in tasks.items()
    ]
    (scratch / "cases.json").write_text(json.dumps(orders), encoding="utf-8")
    command = [str(asked.verl), str(Path(__file__).with_name("splitting_verl.py")), str(scratch)]
    # Its own limits are CPU time; a busy machine may give it a tenth of a core.
    deadline_s = 10 * (60 + asked.limit * len(orders))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=deadline_s)
    if done.returncode != 0:
        raise SystemExit(f"verl's side failed with exit code {done.returncode}; what it said is above")
    figures = {}
    for line in done.stdout.splitlines():
        answer = json.loads(line)
        figures[tasks[answer["name"]]] = _verl_figure(tasks[answer["name"]][0], answer, scratch)
    return figures


def _verl_figure(case: Case, answer: dict[str, object], scratch: Path) -> Figure:
    if "error" in answer:
        return Figure(error=str(answer["error"]))
    plan = np.load(scratch / f"{answer['name']}.npz")
    micro_steps = len(np.unique(plan["mini_batch_N"] * (plan["micro_step_N"].max() + 1) + plan["micro_step_N"]))
    slowest = sum_of_slowest(case, plan["rank_N"], plan["mini_batch_N"], plan["micro_step_N"])
    return Figure(slowest=slowest, ms=float(str(answer["ms"])), micro_steps=micro_steps)


def table(cases: Sequence[Case], theirs: dict[tuple[Case, str], Figure], repeats: int) -> Iterator[str]:
    ways = list(dict.fromkeys(way for case in cases for way in case.ways if (case, way) in theirs))
    sides = ["Podium", *(f"verl, {way}" for way in ways)]
    columns = ["rows", "ranks", "cost", "asked", "bound", *(f"{side}: of even, of bound, ms" for side in sides)]
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"
    for case in cases:
        ours, plan = podium_figure(case, repeats)
        even = float(COSTS[case.quadratic].of(lengths_of(case)).sum()) / case.num_ranks
        cells = [f"{case.num_rows:,}", f"{case.num_ranks}", NAMES[case.quadratic], _asked(case)]
        cells += [f"{plan.lower_bound:.4f}", _cell(case, ours, even, plan.lower_bound)]
        cells += [_cell(case, theirs.get((case, way), Figure(error="-")), even, plan.lower_bound) for way in ways]
        yield "| " + " | ".join(cells) + " |"


def _asked(case: Case) -> str:
    said = [f"{case.mini_batches} mini-batches"] if case.mini_batches > 1 else []
    said += [f"groups of {case.group}"] if case.group else []
    said += [f"{case.max_tokens:,} tokens"] if case.max_tokens != ROOMY else []
    return ", ".join(said) or "-"


def _cell(case: Case, figure: Figure, even: float, bound: float) -> str:
    if figure.error is not None:
        return figure.error
    steps = f" ({figure.micro_steps} micro-steps)" if case.max_tokens != ROOMY else ""
    ratio = figure.slowest / even
    return f"{ratio:.4f}, {ratio / bound:.4f}, {figure.ms:,.1f}{steps}"


BOTH = (False, True)
PAIRS = tuple(zip(SIZES, RANKS, strict=True))
FROM_BOTH = ("default", "as list")
SLICED = ("as list", "legacy", "keep mini-batches")
PARTS = {
    "Ranks": [
        # From a tensor the largest take half a minute each, whatever the ranks: once is enough.
        Case(num_rows=n, num_ranks=r, quadratic=q, ways=FROM_BOTH if n < 102400 or (r == 512 and q) else ("as list",))
        for n in SIZES for r in RANKS for q in BOTH
    ],
    "Mini-batches": [
        Case(num_rows=n, num_ranks=r, quadratic=q, mini_batches=b, ways=SLICED if (n, r) in PAIRS else ())
        for b in (4, 16) for n in SIZES for r in RANKS for q in BOTH
    ],
    "Micro-batches under a limit of tokens": [
        Case(num_rows=n, num_ranks=r, quadratic=q, max_tokens=tokens, ways=("micro-batches",))
        for n, r in PAIRS for tokens in (32768, 65536) for q in BOTH
    ],
    "Groups of 8 kept together": [
        Case(num_rows=n, num_ranks=r, quadratic=True, group=8, ways=("groups",)) for n in SIZES for r in RANKS
    ],
    "Short rows without a tail (400 to 599 tokens)": [
        Case(num_rows=n, num_ranks=r, quadratic=q, short=True, ways=("as list",)) for n, r in PAIRS for q in BOTH
    ],
}  # fmt: skip

if __name__ == "__main__":
    main()
