# SPDX-License-Identifier: Apache-2.0
"""GRPO on real Ray with a generator of two ranks gives the numbers of one process, also when one of the ranks dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.on_policy import numbers, rl_recipe
from helpers.processes import wait_until
from helpers.workspace import Workspace
from podium import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TENSOR = {"launcher": "ray", "layout": "split", "devices": 3, "rollout_devices": 2, "generator": {"tensor": 2}}
COMPARED = ("reward/mean", "response/mean", "loss", "grad_norm", "entropy", "trained_tokens")
# Kills the second rank of the generator, once, while answers of the second step may be under way.
KILLING = """
import os, signal, threading
from pathlib import Path
from typing import Any

LOCK, DONE, CALLS = threading.Lock(), Path(__file__).with_name("killed"), []

def ranks():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = entry.joinpath("cmdline").read_bytes()
            except OSError:
                continue
            if b"rollout.native.tensor_ranks" in words and os.fsencode(str(Path(__file__).parent)) in words:
                yield int(entry.name)

def digits(answer, reference):
    with LOCK:
        CALLS.append(1)
        if len(CALLS) == 20 and not DONE.exists():
            found = list(ranks())
            for rank in found:
                os.kill(rank, signal.SIGKILL)
            DONE.write_text(str(len(found)))
    return sum(letter.isdigit() for letter in answer) / max(1, len(answer))
"""


def ranks_of_engines() -> list[str]:
    """Processes of ranks that follow, of this machine's engines in this test's session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = entry.joinpath("cmdline").read_bytes()
            except OSError:
                continue
            if b"rollout.native.tensor_ranks" in words:
                found.append(entry.name)
    return found


def require_same(workspace: Workspace, name: str) -> None:
    inline, found = (numbers(workspace.path / "runs" / each) for each in ("inline", name))
    assert found.keys() == inline.keys()
    for step, values in inline.items():
        for metric in COMPARED:
            assert found[step][metric] == pytest.approx(values[metric], rel=1e-4, abs=1e-5), (step, metric)


def test_a_generator_of_two_ranks_has_the_numbers_of_one_process_also_after_a_death(
    workspace: Workspace, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ranks_of_engines()
    api.train(workspace.path / rl_recipe(workspace, "inline"))
    api.train(workspace.path / rl_recipe(workspace, "tensor", placement=TENSOR))
    require_same(workspace, "tensor")
    assert all(0 < numbers(workspace.path / "runs" / "tensor")[step]["gap/mean"] < 1e-5 for step in (1, 2, 3))
    monkeypatch.syspath_prepend(workspace.path)  # by which its ranks are found
    (workspace.path / "killing.py").write_text(KILLING)
    recipe = rl_recipe(workspace, "killed", placement=TENSOR, reward=[{"function": "killing.py:digits"}])
    api.train(workspace.path / recipe)
    assert (workspace.path / "killed").read_text() == "1"
    require_same(workspace, "killed")
    stale = rl_recipe(workspace, "stale", placement=TENSOR, rollout={"staleness": 1})  # installs while it generates
    api.train(workspace.path / stale)
    assert {1, 2, 3} <= numbers(workspace.path / "runs" / "stale").keys()
    wait_until(lambda: set(ranks_of_engines()) <= set(before), "the end of all ranks", deadline_s=30)


COLOCATED = {"launcher": "ray", "devices": 2, "generator": {"tensor": 2}}


@pytest.mark.parametrize("more", [{}, {"policy": {"tensor": 2}}], ids=["sharded", "divided"])
def test_learners_that_generate_together_have_the_numbers_of_one_process(
    workspace: Workspace, local_ray: None, more: dict[str, Any]
) -> None:
    """Two learners' devices hold one generator, with a part of the weights each."""
    api.train(workspace.path / rl_recipe(workspace, "inline"))
    api.train(workspace.path / rl_recipe(workspace, "together", placement={**COLOCATED, **more}))
    require_same(workspace, "together")
    assert all(0 < numbers(workspace.path / "runs" / "together")[step]["gap/mean"] < 1e-5 for step in (1, 2, 3))
