# SPDX-License-Identifier: Apache-2.0
"""Where a restarted group of ranks goes on, and what it says about it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from helpers.recipes import make_recipe
from podium.engine.checkpoint import CheckpointReader
from podium.engine.checkpoint_files import Extras, bring_back, complete, saved_steps, set_aside_later, write_json
from podium.engine.mesh import Mesh
from podium.engine.snapshot_copies import SHARD_BYTES
from podium.engine.train_step import TrainEngine
from podium.errors import CheckpointError
from podium.observe import Console, StepMetrics
from podium.observe.metrics import MetricsFile, newest_step
from podium.runs.events import recoveries
from podium.runs.folder import RunFolder
from podium.runs.milestones import Milestones
from podium.spmd.launch import RankPlace
from podium.spmd.restart_budget import Restart, RestartBudget
from podium.spmd.restarting import newest_state, open_snapshots, report_restart, restarted_milestones, snapshot_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoRanks(Mesh):
    """Rank 0, and what rank 1 has to say."""

    other: Any = None

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers(Mesh):
    """Rank 0, and what rank 1 says each time."""

    others: list[Any]

    def gather(self, value: Any) -> list[Any]:
        return [value, self.others.pop(0)]


ALONE = Mesh(rank=0, world=1, device=torch.device("cpu"), devices=None)


def with_other(other: Any) -> TwoRanks:
    return TwoRanks(rank=0, world=2, device=torch.device("cpu"), devices=None, other=other)


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        partial = folder / f".partial-{step:08d}"
        partial.mkdir(parents=True)
        write_json(partial / "rank-00000.json", {"pieces": {}, "files": {}, SHARD_BYTES: 4})
        (partial / "rank-00000.safetensors").write_bytes(b"four")
        complete(folder, partial, step, Extras(values={"in": str(folder)}, arrays={}), ranks=1)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(path=tmp_path / "run")


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "memory"


def state(found: CheckpointReader | None) -> tuple[Path, int] | None:
    return None if found is None else (found.folder.parent, found.step)


class TestTheNewestState:
    def test_is_a_snapshot_that_is_later_than_all_checkpoints(self, run: RunFolder, memory: Path) -> None:
        save(run.checkpoints, 3, 6)
        save(memory, 6, 7)

        assert state(newest_state(run, memory, ALONE)) == (memory, 7)

    @pytest.mark.parametrize("snapshots", [(), (4, 5)])
    def test_is_a_checkpoint_that_is_later_than_all_snapshots(
        self, snapshots: tuple[int, ...], run: RunFolder, memory: Path
    ) -> None:
        save(run.checkpoints, 3, 6)
        save(memory, *snapshots)

        assert state(newest_state(run, memory, ALONE)) == (run.checkpoints, 6)

    def test_is_a_snapshot_where_no_checkpoint_is_later(self, run: RunFolder, memory: Path) -> None:
        save(run.checkpoints, 3, 6)
        save(memory, 5, 6)
        (run.checkpoints / "step-00000006" / "rank-00000.json").unlink()  # it is not read

        assert state(newest_state(run, memory, ALONE)) == (memory, 6)

    @pytest.mark.parametrize(("snapshots", "step"), [((), 3), ((2, 3), 3), ((4, 5), 5)])
    def test_passes_over_damaged_checkpoints_and_sets_them_aside(
        self, snapshots: tuple[int, ...], step: int, run: RunFolder, memory: Path
    ) -> None:
        """They would count as saved when the run gets to their steps again."""
        warnings: list[str] = []
        save(run.checkpoints, 3, 6, 9)
        save(memory, *snapshots)
        for each in (6, 9):
            (run.checkpoints / f"step-{each:08d}" / "rank-00000.json").write_text("{}")

        found = newest_state(run, memory, ALONE, warnings.append)

        assert state(found) == (memory if snapshots else run.checkpoints, step)
        assert [each.step for each in saved_steps(run.checkpoints)] == [3]
        assert ["step-00000009/rank-00000.json is damaged" in each for each in warnings] == [True, False]
        assert "The run goes on from an older state." in warnings[1]

    def test_is_one_that_no_rank_finds_damaged(self, run: RunFolder) -> None:
        save(run.checkpoints, 3, 6)
        mesh = Answers(
            rank=0, world=2, device=torch.device("cpu"), devices=None,
            others=[([3, 6], ()), "step-00000006 is damaged", ""],
        )  # fmt: skip

        assert state(newest_state(run, None, mesh)) == (run.checkpoints, 3)

    def test_damaged_checkpoints_and_nothing_else_are_an_error(self, run: RunFolder) -> None:
        """To begin again would throw away the run's work without a word."""
        save(run.checkpoints, 3)
        (run.checkpoints / "step-00000003" / "rank-00000.json").write_text("{}")

        with pytest.raises(CheckpointError, match=r"damaged.* No other one is whole"):
            newest_state(run, None, ALONE)

    def test_is_a_snapshot_where_there_is_no_checkpoint(self, run: RunFolder, memory: Path) -> None:
        save(memory, 1)

        assert state(newest_state(run, memory, ALONE)) == (memory, 1)

    def test_is_none_before_the_first_step(self, run: RunFolder, memory: Path) -> None:
        assert newest_state(run, memory, ALONE) is None
        assert newest_state(run, None, ALONE) is None

    def test_is_one_that_all_ranks_can_read(self, run: RunFolder, memory: Path) -> None:
        save(run.checkpoints, 3)
        save(memory, 6, 7)

        assert state(newest_state(run, memory, with_other(([3], (5, 6))))) == (memory, 6)
        mesh = Answers(rank=0, world=2, device=torch.device("cpu"), devices=None, others=[([3], ()), ""])
        assert state(newest_state(run, memory, mesh)) == (run.checkpoints, 3)

    def test_is_no_snapshot_that_was_just_being_overwritten(self, run: RunFolder, memory: Path) -> None:
        save(memory, 6, 7)
        (memory / "step-00000007" / "checkpoint.json").unlink()

        assert state(newest_state(run, memory, ALONE)) == (memory, 6)

    def test_is_no_snapshot_that_was_cut(self, run: RunFolder, memory: Path) -> None:
        """The one before it is taken, or the newest checkpoint where both are."""
        save(run.checkpoints, 3)
        save(memory, 6, 7)

        (memory / "step-00000007" / "rank-00000.safetensors").write_bytes(b"thr")
        assert state(newest_state(run, memory, ALONE)) == (memory, 6)

        (memory / "step-00000006" / "rank-00000.safetensors").write_bytes(b"")
        assert state(newest_state(run, memory, ALONE)) == (run.checkpoints, 3)


def test_snapshots_of_another_launch_are_elsewhere(tmp_path: Path) -> None:
    assert snapshot_folder(tmp_path, None) is None
    assert snapshot_folder(tmp_path, "one") != snapshot_folder(tmp_path, "two")


def test_every_attempt_takes_snapshots_where_there_are_restarts(memory: Path) -> None:
    """A step that the last one completes gives it more."""
    engine = Mock(spec=TrainEngine, mesh=ALONE)

    assert open_snapshots(RankPlace(restarts_left=1), None, engine) is None
    assert open_snapshots(RankPlace(restarts_left=1), memory, engine) is not None
    assert open_snapshots(RankPlace(restarts_left=0), memory, engine) is not None


class TestTheBudgetOfRestarts:
    def numbers(self, most: int, *newest_steps: int) -> list[int | None]:
        """The number of each restart; None: the run ends."""
        budget = RestartBudget(most)
        answers = [budget.restart("it died", step=step, failed_s=0.0) for step in newest_steps]
        return [None if each is None else each.number for each in answers]

    def test_counts_failures_without_a_completed_step_between_them(self) -> None:
        assert self.numbers(2, 5, 5, 5) == [1, 2, None]
        assert self.numbers(2, 0, 0, 0) == [1, 2, None]
        assert self.numbers(0, 7) == [None]

    def test_is_whole_again_after_each_completed_step(self) -> None:
        assert self.numbers(2, 5, 5, 6, 6, 7, 7, 7) == [1, 2, 1, 2, 1, 2, None]

    def test_is_not_renewed_by_steps_that_were_completed_before(self) -> None:
        """A restart may go back some steps, and fail before it is where the last one was."""
        assert self.numbers(2, 5, 3, 4) == [1, 2, None]
        assert self.numbers(2, 5, 3, 5) == [1, 2, None]

    def test_says_whether_a_failure_would_be_answered(self) -> None:
        budget = RestartBudget(1)
        assert budget.has_left(5)
        budget.restart("it died", step=5, failed_s=0.0)

        assert [budget.has_left(step) for step in (4, 5, 6)] == [False, False, True]

    def test_numbers_attempts_over_the_whole_launch(self) -> None:
        budget = RestartBudget(1)
        restarts = [budget.restart("it died", step=step, failed_s=0.0) for step in (1, 2, 3)]

        numbers = [(each.attempt, each.number, each.left) for each in restarts if each is not None]
        assert numbers == [(1, 1, 0), (2, 1, 0), (3, 1, 0)]


def test_the_newest_step_is_that_of_the_metrics(run: RunFolder) -> None:
    assert newest_step(run.metrics_file) == 0
    with MetricsFile(run.metrics_file) as file:
        for step in (3, 4, 4):
            file.append(StepMetrics(step=step, time_s=0.0, values={"loss": 1.0}))

    assert newest_step(run.metrics_file) == 4


class TestMilestonesOfARestartedRun:
    RECIPE = ("steps=12", "checkpoint.every=3", "evaluation.every=2", "data.heldout=[{path: rows.jsonl}]")

    def milestones(self, run: RunFolder, step: int, mesh: Mesh = ALONE) -> Milestones:
        return restarted_milestones(make_recipe(*self.RECIPE), step, run, mesh, evaluates=True)

    def test_an_evaluation_counts_for_its_own_step_only(self, run: RunFolder) -> None:
        with MetricsFile(run.metrics_file) as file:
            for step, name in [(3, "loss"), (4, "loss"), (4, "heldout/loss"), (5, "loss")]:
                file.append(StepMetrics(step=step, time_s=0.0, values={name: 1.0}))

        assert [step for step in range(7) if self.milestones(run, step).evaluated_step == step] == [4]

    def test_the_newest_checkpoint_is_known(self, run: RunFolder) -> None:
        save(run.checkpoints, 3, 6)

        assert [self.milestones(run, step).starts_with_save(step) for step in (6, 7, 8, 9, 10)] == [
            False, False, False, True, True,
        ]  # fmt: skip
        assert self.milestones(run, 8).whole_step == 6

    def test_all_ranks_take_what_rank_0_found(self, run: RunFolder) -> None:
        save(run.checkpoints, 3)
        milestones = self.milestones(run, 4, with_other((6, True)))

        assert (milestones.saved_step, milestones.evaluated_step) == (3, None)


def test_a_restart_is_reported_with_its_time_and_kept_in_the_events(run: RunFolder) -> None:
    console = Mock(spec=Console)
    restart = Restart(attempt=2, number=2, most=3, cause="rank 1 died with SIGKILL", failed_s=time.monotonic() - 4.0)

    report_restart(RankPlace(attempt=2, restart=restart), run, console, 7)
    report_restart(RankPlace(rank=1, attempt=2, restart=restart), run, console, 7)
    report_restart(RankPlace(), run, console, 0)

    ((text,), _) = console.note.call_args
    assert console.note.call_count == 1
    assert text.startswith("restart 2 of 3: going on after step 7, 4.")
    (event,) = recoveries(run.path)
    assert (event.part, event.remedy, event.step) == ("rank", "restart", 7)
    assert event.cause == "rank 1 died with SIGKILL"
    assert 4.0 <= event.seconds < 60.0


def test_checkpoints_that_were_set_aside_are_brought_back(run: RunFolder) -> None:
    save(run.checkpoints, 3, 6, 9)

    later = set_aside_later(run.checkpoints, 3)
    assert [each.step for each in saved_steps(run.checkpoints)] == [3]
    bring_back(run.checkpoints, later)

    assert [each.step for each in saved_steps(run.checkpoints)] == [3, 6, 9]
