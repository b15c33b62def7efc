# SPDX-License-Identifier: Apache-2.0
"""Runs of every program compute what they did when `golden.runs` recorded them, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden.runs import PIPELINE, RUNS, fingerprint, machine, make_task, num_steps, read_recorded, run

_FAST = ("sft", "dpo", "grpo", "tool-agent")  # one of each kind; `make test-slow` has the others
_RECORDED = read_recorded()
_HERE = next((each["runs"] for each in _RECORDED if each["where"] == machine()), None)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    make_task(folder)
    return folder


@pytest.mark.skipif(
    _HERE is None, reason=f"recorded on {[each['where'] for each in _RECORDED]}, and this is {machine()}"
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _FAST else [pytest.mark.slow]) for name in [*RUNS, PIPELINE]]
)
def test_a_run_computes_what_was_recorded(name: str, task: Path) -> None:
    assert _HERE is not None
    if name not in _HERE:
        pytest.skip("not recorded on this kind of machine")
    recorded = _HERE[name]
    now = fingerprint(run(name, task), step=num_steps(name))
    assert now["metrics"].keys() == recorded["metrics"].keys()
    differing = [metric for metric, value in now["metrics"].items() if value != recorded["metrics"][metric]]
    assert not differing
    assert now == recorded
