# SPDX-License-Identifier: Apache-2.0
"""The ledger has the groups that are on their way when a run stops, fails or is killed."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_roles import FakeLearner, answer_slowly
from helpers.simulated_runs import groups_by_step, simulated, simulated_recipe
from helpers.trials import Trial
from podium.controller.layout import ROLLOUT
from podium.controller.ledger import Ledger, OpenGroupRecord
from podium.controller.run import OnPolicyRun
from podium.controller.simulation.controlled import simulate_run
from podium.controller.simulation.costs import CostModel, GenerationCost, LogNormal, SimulatedSlowness, UpdateCost
from podium.controller.simulation.faults import SimulatedStop
from podium.errors import ClusterError
from podium.programs.grpo import grpo
from podium.runs.folder import RunFolder

PLAIN = CostModel(
    generation=GenerationCost(weights_s=1.0), answer_tokens=LogNormal(median=10.0), update=UpdateCost(token_s=0.05)
)
COLUMNS = "prompt_index, step, state, attempts, admitted_version, oldest_version, newest_version"
SPLIT = ("placement={layout: split, devices: 2}", "steps=9", "rollout.staleness=2")


def open_rows(folder: Path) -> list[tuple[Any, ...]]:
    file = sqlite3.connect(folder / "episodes.sqlite")
    try:
        return file.execute(f"SELECT {COLUMNS} FROM open_groups ORDER BY prompt_index").fetchall()
    finally:
        file.close()


def test_groups_that_are_on_their_way_at_a_stop_are_in_the_ledger_until_a_resumed_run_trains_on_them(
    tmp_path: Path,
) -> None:
    """Generator 1 takes 30 s for a group, generator 0 takes 10 s. Step 2 begins after 60 s with groups 1 and 3. Groups
    4 and 5, of version 1, are graded then and wait for step 3, before which the run stops."""
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_running": 2, "staleness": 1}
    placement = {"layout": "split", "devices": 3, "rollout_devices": 2}
    recipe = simulated_recipe(tmp_path, rollout=rollout, placement=placement, steps=4)
    slow = SimulatedSlowness(at_s=0.0, pool=ROLLOUT, slot=1, seconds=1e6, factor=3.0)

    stopped = simulate_run(
        grpo, recipe, RunFolder.create(recipe), PLAIN, faults=[slow, SimulatedStop(at_s=40.0)]
    )  # fmt: skip

    folder = stopped.result.folder
    assert stopped.result.step == 2
    assert open_rows(folder) == [(4, 2, "graded", 1, 1, 1, 1), (5, 2, "graded", 1, 1, 1, 1)]

    (RunFolder.of(recipe).stop_file).unlink(missing_ok=True)
    simulated(recipe, PLAIN, resume_step=2)

    assert open_rows(folder) == []
    trained = [group[0] for groups in groups_by_step(folder).values() for group in groups]
    assert sorted(trained) == list(range(8))


@pytest.mark.parametrize("staleness", [1, 2])
def test_after_every_step_the_ledger_has_every_group_that_has_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """A copy of the ledger is all that a killed run leaves. Trained, void and open groups are then the first prompts,
    each once; a resumed run begins with the open ones."""
    answer_slowly(monkeypatch)
    trial = Trial(tmp_path, *SPLIT, f"rollout.staleness={staleness}", "checkpoint.every=1")
    copies = tmp_path / "copies"
    original = OnPolicyRun.commit

    async def commit(self: OnPolicyRun, step: Any, *arguments: Any, **named: Any) -> None:
        await original(self, step, *arguments, **named)
        await self._log.written()
        shutil.copytree(trial.folder.path, copies / str(step.number), ignore=lambda *_: {"steps", "rollouts"})

    monkeypatch.setattr(OnPolicyRun, "commit", commit)
    trial.run()
    monkeypatch.setattr(OnPolicyRun, "commit", original)

    for step in range(1, 9):
        file = sqlite3.connect(copies / str(step) / "episodes.sqlite")
        done = [index for (index,) in file.execute("SELECT prompt_index FROM groups")]
        file.close()
        rows = open_rows(copies / str(step))
        found = sorted([*done, *(row[0] for row in rows)])
        assert found == list(range(len(found))), step
        assert len(done) == 4 * step
        assert {row[1] for row in rows} == {step}
        assert {row[2] for row in rows} <= {"offered", "running", "complete", "graded"}
        assert rows or step == 8
    assert open_rows(trial.folder.path) == []  # it has come to its end


def test_a_failing_run_notes_what_was_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_slowly(monkeypatch)
    trial = Trial(tmp_path, *SPLIT, "checkpoint.every=1")
    original = FakeLearner.update

    async def update(self: FakeLearner, *arguments: Any, **named: Any) -> Any:
        if trial.state.step == 3:
            raise ClusterError("the learner is gone")
        return await original(self, *arguments, **named)

    async def failing(self: Trial, run: OnPolicyRun) -> None:
        with pytest.raises(ClusterError, match="the learner is gone"):
            await grpo(run)
        await run.save_before_failing()
        self.close()

    monkeypatch.setattr(FakeLearner, "update", update)
    monkeypatch.setattr(Trial, "_program", failing)
    trial.run()

    rows = open_rows(trial.folder.path)
    assert [row[2] for row in rows].count("claimed") == 4  # those of the step that failed
    assert {row[1] for row in rows} == {3}


def test_a_rewound_ledger_keeps_the_open_groups_of_its_last_step_only(tmp_path: Path) -> None:
    def row(index: int, step: int) -> OpenGroupRecord:
        return OpenGroupRecord(
            prompt_index=index, step=step, state="running", attempts=1, admitted_version=step, oldest_version=-1,
            newest_version=-1,
        )  # fmt: skip

    ledger = Ledger(tmp_path / "episodes.sqlite")
    ledger.close_step([], [], [row(1, 1)])
    ledger.close_step([], [], [row(2, 2), row(3, 2)])
    assert [each[0] for each in open_rows(tmp_path)] == [2, 3]
    ledger.rewind(2)
    assert [each[0] for each in open_rows(tmp_path)] == [2, 3]
    ledger.rewind(1)
    assert open_rows(tmp_path) == []
    ledger.close()
