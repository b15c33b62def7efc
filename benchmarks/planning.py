# SPDX-License-Identifier: Apache-2.0
"""The planner against the clock: step times of layouts and staleness, predicted from one or two runs of each workload,
beside those that were measured.

    .venv/bin/python benchmarks/planning.py --keep /tmp/planning             all 14 runs, some 40 minutes on two cores
    .venv/bin/python benchmarks/planning.py --keep /tmp/planning --read      only reads the runs that are there
    .venv/bin/python benchmarks/planning.py --keep /tmp/p --steps 8 --workloads judge --only colocated-0 split-0 split-1

The runs are those of benchmarks/overlap.py: tiny Qwen3 on CPU, two workers on Ray, 64 answers a step with a heavy tail,
and a reward of 0.3 s that blocks its grader (`reward`) or waits (`judge`). Costs come from the colocated run, and from
the split one without staleness what new weights cost there; these two are told apart. The machine should be quiet."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import podium
from grpo_task import Task, make_task
from overlap_podium import _recipe
from overlap_task import CAP, MEDIAN
from podium.planning.prediction import predict
from podium.planning.run_costs import RunCosts, estimate_costs
from podium.planning.run_records import read_records
from podium.roles import interfaces

HERE = Path(__file__).resolve().parent
CONFIGURATIONS = (
    "colocated-0", "split-0", "split-1", "split-2", "elastic-0", "elastic-1", "elastic-2",
)  # fmt: skip
# Costs are estimated from these.
SOURCES = ("colocated-0", "split-0")
# Pairs of configurations that differ by more have to be in the right order.
DIFFER = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run, measured and predicted."""

    workload: str
    configuration: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workloads", nargs="+", choices=("reward", "judge"), default=["reward", "judge"])
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--read", action="store_true", help="train nothing")
    parser.add_argument("--train", help="one run, in this process: WORKLOAD/CONFIGURATION")
    asked = parser.parse_args()
    if asked.train is not None:
        train(asked.keep, *asked.train.split("/"), asked.steps)
        return
    rows: list[Row] = []
    for workload in asked.workloads:
        for configuration in () if asked.read else asked.only:
            started = [sys.executable, __file__, "--keep", str(asked.keep), "--steps", str(asked.steps)]
            subprocess.run(
                [*started, "--train", f"{workload}/{configuration}"], check=True, cwd=HERE, timeout=3600,
                stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        rows += compared(asked.keep / workload, workload, asked.only)
    for line in report(rows):
        print(line, flush=True)


def train(keep: Path, workload: str, configuration: str, steps: int) -> None:
    """One run, in the folder KEEP/WORKLOAD/CONFIGURATION."""
    implementations: Any = interfaces.IMPLEMENTATIONS
    implementations[interfaces.Generator] = "overlap_task:MeasuredGenerator"
    layout, _, staleness = configuration.partition("-")
    scratch = keep / f"task-{steps}"
    task = Task(
        folder=str(scratch), shape="tiny", device="cpu", steps=steps, warmup=2, shortest=8, longest=64,
        new_tokens=CAP * MEDIAN,
    )  # fmt: skip
    if not task.prompts.exists():
        scratch.mkdir(parents=True, exist_ok=True)
        make_task(task)
    values = _recipe(task, str(keep / workload))
    values["run"] = {"folder": str(keep / workload), "name": configuration}
    values["placement"]["layout"] = layout
    if int(staleness):
        values["rollout"]["staleness"] = int(staleness)
    if workload == "judge":
        values["reward"] = [{"function": f"{HERE / 'overlap_task.py'}:judge"}]
    podium.train(podium.parse_recipe(values), overwrite=True)


def compared(folder: Path, workload: str, configurations: Sequence[str]) -> Iterator[Row]:
    """All runs of a workload, predicted from its sources."""
    sources = [read_records(folder / name) for name in SOURCES if (folder / name).is_dir()]
    run = estimate_costs(sources[0], others=sources[1:])
    print(f"{workload}: costs from {', '.join(SOURCES[: len(sources)])}; the first is simulated with {run.error:+.1%}")
    for each in run.estimates:
        error = "" if each.error is None else f", median error {each.error:.1%}"
        print(f"  {each.name:<22} {each.value:.5f} s, {each.quality}{error}")
    for name in configurations:
        yield _row(folder / name, workload, name, run)


def _row(folder: Path, workload: str, name: str, run: RunCosts) -> Row:
    records = read_records(folder)
    predicted = predict(
        run.costs_of(records.configuration()), run.workload, records.configuration(), seeds=(0,),
        steps=len(records.steps),
    )  # fmt: skip
    return Row(workload=workload, configuration=name, measured_s=records.step_s, predicted_s=predicted.step_s)


def report(rows: Sequence[Row]) -> Iterator[str]:
    """A table, the median error, and the order of pairs."""
    yield "| workload | configuration | measured, s/step | predicted, s/step | error |\n|---|---|---|---|---|"
    for row in rows:
        source = " (source)" if row.configuration in SOURCES else ""
        yield (
            f"| {row.workload} | {row.configuration}{source} | {row.measured_s:.3f} | {row.predicted_s:.3f} "
            f"| {row.error:+.1%} |"
        )
    others = [row for row in rows if row.configuration not in SOURCES] or rows
    of_all, of_others = ([abs(row.error) for row in some] for some in (rows, others))
    yield (
        f"median error of all {statistics.median(of_all):.1%}, without the sources {statistics.median(of_others):.1%}, "
        f"the largest {max(of_all):.1%}"
    )
    pairs = [
        (first, second)
        for first, second in itertools.combinations(rows, 2)
        if first.workload == second.workload and _ratio(first.measured_s, second.measured_s) > 1 + DIFFER
    ]
    right = sum((a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s) for a, b in pairs)
    share = right / len(pairs) if pairs else 1.0
    yield f"{right} of {len(pairs)} pairs that differ by more than {DIFFER:.0%} are in the right order ({share:.0%})"


def _ratio(a: float, b: float) -> float:
    return max(a, b) / min(a, b)


if __name__ == "__main__":
    main()
