# SPDX-License-Identifier: Apache-2.0
"""Runs of every program compute what they did when `golden.runs` recorded them, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from golden.runs import PIPELINE, RECORDED, RUNS, fingerprint, machine, make_task, run

_SLOW = ("sft-two-ranks", PIPELINE)  # several processes, or two runs
_FOUND: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    make_task(folder)
    return folder


@pytest.mark.skipif(machine() != _FOUND["where"], reason=f"recorded on {_FOUND['where']}, and this is {machine()}")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else []) for name in [*RUNS, PIPELINE]]
)
def test_a_run_computes_what_was_recorded(name: str, task: Path) -> None:
    recorded = _FOUND["runs"][name]
    now = fingerprint(run(name, task))
    assert now["metrics"].keys() == recorded["metrics"].keys()
    differing = [metric for metric, value in now["metrics"].items() if value != recorded["metrics"][metric]]
    assert not differing
    assert now == recorded
