# SPDX-License-Identifier: Apache-2.0
"""The remaining time on the console comes from steps, and not from what was before them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.recipes import make_recipe
from podium.observe import Console, StepView
from podium.runs import log as run_log
from podium.runs.folder import RunFolder


class EtaConsole(Console):
    """Remembers the remaining time of each step."""

    def __init__(self) -> None:
        self.etas: list[float | None] = []

    def step(self, view: StepView) -> None:
        self.etas.append(view.eta_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [0.0]
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize("resumed_at", [0, 4])
def test_the_remaining_time_leaves_out_the_start_up(tmp_path: Path, clock: list[float], resumed_at: int) -> None:
    recipe, console = make_recipe(f"run.folder={tmp_path}", "steps=10"), EtaConsole()
    with ExitStack() as stack:
        log = run_log.open_log(stack, recipe, RunFolder.create(recipe), console, step=resumed_at)
        for step_s, pause_s in ((2.0, 500.0), (2.0, 0.0), (2.0, 4.0)):  # start-up before the first, an evaluation later
            clock[0] += pause_s + step_s
            step = resumed_at + len(console.etas) + 1
            log.step(StepView(step=step, num_steps=10, loss=1.0, lr=0.1, tokens_per_s=1.0), {"step_s": step_s})

    left = [10 - resumed_at - done for done in (1, 2, 3)]
    assert console.etas == [2.0 * left[0], 2.0 * left[1], (2.0 + 6.0) / 2 * left[2]]


def test_a_first_step_without_a_time_has_no_remaining_time(tmp_path: Path) -> None:
    recipe, console = make_recipe(f"run.folder={tmp_path}", "steps=10"), EtaConsole()
    with ExitStack() as stack:
        log = run_log.open_log(stack, recipe, RunFolder.create(recipe), console, step=0)
        log.step(StepView(step=1, num_steps=10, loss=1.0, lr=0.1, tokens_per_s=1.0), {})

    assert console.etas == [None]
