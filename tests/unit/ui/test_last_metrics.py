# SPDX-License-Identifier: Apache-2.0
"""The last value of every metric while its file grows, is cut short, and is replaced."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from podium.ui import last_metrics
from podium.ui.last_metrics import LastMetrics


def line(step: int, **values: Any) -> str:
    return json.dumps({"step": step, "time_s": 10.0 * step, **values}) + "\n"


def read(metrics: LastMetrics, file: Path) -> tuple[int, float, dict[str, float]] | None:
    found = metrics.read(file)
    return None if found is None else (found.step, found.time_s, dict(found.values))


def test_values_of_older_lines_stay_until_newer_ones_come(tmp_path: Path) -> None:
    file, metrics = tmp_path / "metrics.jsonl", LastMetrics()
    assert read(metrics, file) is None
    file.write_text(line(1, loss=3.0) + line(1, solved=0.5) + line(2, loss=2.0))
    assert read(metrics, file) == (2, 20.0, {"loss": 2.0, "solved": 0.5})
    with file.open("a") as opened:
        opened.write("no line of a run\n" + line(3, loss=1.0)[:9])
        opened.flush()
        assert read(metrics, file) == (2, 20.0, {"loss": 2.0, "solved": 0.5})
        opened.write(line(3, loss=1.0)[9:])
    assert read(metrics, file) == (3, 30.0, {"loss": 1.0, "solved": 0.5})


def test_a_file_of_a_resumed_run_is_read_anew(tmp_path: Path) -> None:
    file, metrics = tmp_path / "metrics.jsonl", LastMetrics()
    file.write_text(line(1, loss=3.0) + line(2, old=2.0))
    read(metrics, file)
    (tmp_path / "shorter").write_text(line(1, loss=3.0))
    os.replace(tmp_path / "shorter", file)
    assert read(metrics, file) == (1, 10.0, {"loss": 3.0})
    file.unlink()
    assert read(metrics, file) is None


def test_of_a_long_file_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_metrics, "_TAIL_BYTES", 100)
    file, metrics = tmp_path / "metrics.jsonl", LastMetrics()
    file.write_text(line(1, first=1.0) + "".join(line(step, loss=1 / step) for step in range(2, 50)))
    assert read(metrics, file) == (49, 490.0, {"loss": 1 / 49})
