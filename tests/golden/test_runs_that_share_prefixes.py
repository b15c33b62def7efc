# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose models always share prefixes: the same twice and after a resume, and close to what they were."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import podium
from golden.runs import fingerprint, make_task, run
from helpers.prefixes import sharing_always
from podium.observe import read_metrics


def first_values(folder: Path, name: str) -> float:
    return next(line.values[name] for line in read_metrics(folder / "metrics.jsonl") if name in line.values)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo", "tool-agent", "lora-grpo", "dpo"])
def test_a_run_is_the_same_twice_and_resumed(name: str, tmp_path: Path) -> None:
    make_task(tmp_path)
    plain = run(name, tmp_path)
    loss, norm = (first_values(plain, each) for each in ("loss", "grad_norm"))
    with sharing_always() as counts:
        once = fingerprint(run(name, tmp_path))
        assert counts["computed"] < counts["packed"]
        again = run(name, tmp_path)
        assert fingerprint(again) == once
        assert first_values(again, "loss") == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert first_values(again, "grad_norm") == pytest.approx(norm, rel=1e-4)
        with contextlib.chdir(tmp_path):
            podium.resume(again, step=2)
        assert fingerprint(again)["weights"] == once["weights"]
