# SPDX-License-Identifier: Apache-2.0
"""A few trials of the fault-injection benchmark, `benchmarks/kills.py`: processes of runs are killed at seeded random
moments, start-up and recovery included, and the runs end with the weights, optimizer state and ledger of the run that
nobody killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"
sys.path.append(str(SCRIPT.parent))  # benchmarks are scripts that import each other by name, not a package

import kills  # noqa: E402
from kills_trials import Row, trials  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(580)]


SELECTION = [
    (19, "split", ("controller", "learner", "generator")),
    (1, "elastic", ("generator", "learner")),
    (2, "environment", ("grader", "runner")),
    (3, "ppo", ("learner", "raylet")),
    (4, "lora", ("controller", "gcs_server")),
]
"""Seed, layout and victims, with moments that no run reaches its end before."""


@pytest.mark.parametrize(("seed", "layout", "victims"), SELECTION)
def test_runs_end_as_if_nobody_had_been_killed(
    seed: int, layout: str, victims: tuple[str, ...], tmp_path: Path
) -> None:
    assert all(trial.is_certain for trial in trials(len(victims), seed=seed, layouts=(layout,), victims=victims))
    command = [
        sys.executable, str(SCRIPT), "--layouts", layout, "--victims", ",".join(victims), "--trials", str(len(victims)),
        "--seed", str(seed), "--folder", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    said = f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, said
    rows = [Row.read(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert sorted(row.trial.victim for row in rows) == sorted(victims)
    assert all(row.weights_equal and row.ledger_equal for row in rows)
    missed = [kills.summary(row) for row in rows if row.num_missed]
    assert not missed, "\n".join([*missed, said])
