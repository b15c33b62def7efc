# SPDX-License-Identifier: Apache-2.0
"""Lines of metrics that are parsed when somebody looks at them, against those that are all parsed."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podium.errors import RunFolderError
from podium.observe import read_metrics
from podium.planning.run_records import heldout_lines, step_lines

LINES = [
    '{"step": 1, "time_s": 1.0, "step_s": 2.0, "loss": "NaN"}',
    '{"step": 1, "time_s": 1.0, "heldout/solved": 0.5}',
    '{"step": 2, "time_s": 2.0, "step_s": 2.5, "loss": 1.0}',
    '{"step": 2, "time_s": 2.0, "time/step_s": 9.0}',
    '{"step": 3, "time_s": 3.0, "step_s": 2.5, "heldout/loss": 1.0}',
]


def folder(tmp_path: Path, text: str) -> Any:
    (tmp_path / "metrics.jsonl").write_text(text)
    return SimpleNamespace(metrics_file=tmp_path / "metrics.jsonl")


def test_they_are_the_lines_of_the_file(tmp_path: Path) -> None:
    run = folder(tmp_path, "\n".join(LINES) + "\n")
    every = read_metrics(run.metrics_file)
    steps, evaluations = step_lines(run), heldout_lines(run)

    assert [step for step, _ in steps] == [1, 2, 3]
    assert math.isnan(steps[0][1]["loss"])
    assert list(steps[1:]) == [(line.step, line.values) for line in every if "step_s" in line.values][1:]
    assert steps[-1] == steps[2]
    assert [(step, dict(values)) for step, values in evaluations] == [
        (1, {"heldout/solved": 0.5}), (3, {"step_s": 2.5, "heldout/loss": 1.0}),
    ]  # fmt: skip


def test_half_a_last_line_is_left_out(tmp_path: Path) -> None:
    assert len(step_lines(folder(tmp_path, "\n".join(LINES[:3]) + "\n" + LINES[4][:40]))) == 2
    assert len(step_lines(folder(tmp_path, ""))) == 0
    assert len(step_lines(SimpleNamespace(metrics_file=tmp_path / "none"))) == 0  # type: ignore[arg-type]


def test_a_line_that_no_run_wrote_is_an_error_when_it_is_looked_at(tmp_path: Path) -> None:
    steps = step_lines(folder(tmp_path, "\n".join([LINES[0], 'what is "step_s"?', LINES[2]]) + "\n"))
    assert steps[-1][0] == 2
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl has a line that Podium did not write"):
        steps[1]
