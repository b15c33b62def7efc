# SPDX-License-Identifier: Apache-2.0
"""An on-policy run over a disk that fails: checkpoints wait for the ledger and the record, and nothing counts twice."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_roles import Bandit, FakeLearner
from helpers.trials import Trial
from podium.controller import ledger as ledger_module
from podium.controller import step_record
from podium.controller.ledger import EpisodeRecord, Ledger
from podium.data.trajectories import TrajectoryId
from podium.engine.checkpoint_files import SaveFailure, SaveState
from podium.errors import CheckpointError, RunFolderError
from podium.runs.step_files import StepFile, recorded_steps, verify_steps, write_step


def full(step: int) -> SaveFailure:
    return SaveFailure(step=step, folder=Path("checkpoints"), reason="No space left on device", needed_bytes=1 << 30,
                       free_bytes=1 << 20)  # fmt: skip


def fails_at(*steps: int) -> Callable[[int], SaveState]:
    return lambda step: full(step) if step in steps else "writing"


def saves(trial: Trial) -> list[int]:
    """Steps at which the policy was asked to save."""
    return [entry[2] for entry in trial.bandit.calls("save") if entry[1] == "policy"]


def test_a_save_that_fails_is_tried_again_with_pauses_and_the_run_goes_on(tmp_path: Path) -> None:
    bandit = Bandit(save_states=fails_at(2, 3, 5))
    trial = Trial(tmp_path, "steps=12", "checkpoint.every=2", bandit=bandit)
    trial.run()

    assert saves(trial) == [2, 3, 5, 9, 10, 12]  # again after 1, 2 and 4 steps, then as the recipe says
    assert list(bandit.saves["policy"]) == [9, 10, 12]
    failures = [text for text in trial.console.warnings if "cannot be written" in text]
    assert len(failures) == 3
    for part in ("step 2", "No space left on device", "1 GiB", "1 MiB is free", "step 3 tries again", "Make room"):
        assert part in failures[0]
    assert trial.folder.status == "finished"


def test_a_failure_in_the_background_is_noticed_with_the_next_step(tmp_path: Path) -> None:
    states = iter([full(4)])  # of the first save, after it was begun
    trial = Trial(tmp_path, "steps=8", "checkpoint.every=4")
    policy: Any = trial.roles.policy

    async def save_state() -> SaveState:
        return next(states, "written")

    policy.save_state = save_state
    trial.run()

    assert saves(trial) == [4, 6, 8]  # known after step 5
    assert len([text for text in trial.console.warnings if "cannot be written" in text]) == 1
    assert trial.folder.status == "finished"


def test_a_last_step_that_is_not_saved_is_an_error(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=5", "checkpoint.every=3", bandit=Bandit(save_states=fails_at(4, 5)))

    with pytest.raises(CheckpointError, match=r"step 5 cannot be written: No space.*step 3\b.*Make room"):
        trial.run()

    assert saves(trial) == [3, 5, 5]  # the last one in two attempts
    assert trial.folder.status == "running"


def test_a_policy_is_not_saved_without_its_critic(tmp_path: Path) -> None:
    bandit = Bandit(critic_states=lambda step: full(step) if step == 2 else "written")
    trial = Trial(tmp_path, "program=ppo", "steps=4", "checkpoint.every=2", bandit=bandit)
    trial.run()

    assert saves(trial) == [3, 4]
    assert [entry[2] for entry in bandit.calls("save") if entry[1] == "critic"] == [2, 3, 4]


def sqlite_full() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


def test_rows_wait_for_the_disk_and_no_checkpoint_is_saved_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    whole = Trial(tmp_path / "whole", "steps=8", "checkpoint.every=2")
    whole.run()
    real = Ledger._write
    trial = Trial(tmp_path, "steps=8", "checkpoint.every=2")

    def write(self: Ledger, step: Any) -> None:
        if 3 <= trial.state.step <= 5:
            raise sqlite_full()
        real(self, step)

    monkeypatch.setattr(Ledger, "_write", write)
    trial.run()

    assert saves(trial)[0] == 2
    assert not {3, 4, 5} & set(saves(trial))
    assert saves(trial)[-1] == 8
    assert trial.episodes(rest="ORDER BY 1, 2") == whole.episodes(rest="ORDER BY 1, 2")
    assert trial.episodes(table="groups", rest="ORDER BY 1") == whole.episodes(table="groups", rest="ORDER BY 1")
    assert trial.bandit.saves["policy"][8]["episodes"] == len(trial.episodes())
    warnings = [text for text in trial.console.warnings if "episodes.sqlite cannot be written" in text]
    assert any("The run goes on" in text for text in warnings)
    assert sum("The run goes on" in text for text in warnings) == 1


def test_records_of_steps_wait_for_the_disk_and_stay_a_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = step_record.write_step  # type: ignore[attr-defined]
    trial = Trial(tmp_path, "steps=8", "checkpoint.every=2", "rollout.record=true")

    def write_step(*args: Any) -> str:
        if 3 <= trial.state.step <= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return str(real(*args))

    monkeypatch.setattr(step_record, "write_step", write_step)
    trial.run()

    assert not {4, 5} & set(saves(trial))
    assert recorded_steps(trial.folder.steps) == list(range(1, 9))
    verify_steps(trial.folder.steps, 8, trial.bandit.saves["policy"][8]["record"])


def test_a_slow_disk_under_the_records_does_not_keep_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a step is not written before the update of the next one has begun."""
    begun = {step: threading.Event() for step in range(1, 5)}
    original = FakeLearner.update

    async def update(self: FakeLearner, batch: Any, plan: Any, *, seed: int) -> Any:
        begun[plan.step].set()
        return await original(self, batch, plan, seed=seed)

    def write(folder: Path, file: StepFile, previous: str) -> str:
        assert file.step == 3 or begun[file.step + 1].wait(timeout=20), f"the learner waits for the file of {file.step}"
        return write_step(folder, file, previous)

    monkeypatch.setattr(FakeLearner, "update", update)
    monkeypatch.setattr("podium.controller.step_record.write_step", write)
    trial = Trial(tmp_path, "steps=3", "rollout.record=true")
    trial.run()
    assert recorded_steps(trial.folder.steps) == [1, 2, 3]


def test_records_have_a_bound_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_step(*_: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(step_record, "write_step", write_step)
    monkeypatch.setattr(step_record, "_MOST_WAITING_BYTES", 100)
    with pytest.raises(RunFolderError, match=r"steps cannot be written: No space.*newest checkpoint"):
        Trial(tmp_path, "steps=8", "rollout.record=true").run()


def row(prompt: int, step: int) -> EpisodeRecord:
    return EpisodeRecord(
        id=TrajectoryId(prompt, 0, 0, 0), step=step, source="sums", state="consumed", finish="stop", version=0,
        tokens=1, reward=1.0,
    )  # fmt: skip


def test_a_transaction_that_failed_after_it_was_written_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, real = Ledger(tmp_path / "episodes.sqlite"), Ledger._write

    def write(self: Ledger, step: Any) -> None:
        real(self, step)
        raise sqlite_full()

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "_write", write)
        ledger.close_step([row(0, 1)])
    assert ledger.fault == "No space left on device"
    ledger.close_step([row(1, 2)])
    assert ledger.fault is None
    assert ledger.count() == 2
    with pytest.raises(RunFolderError, match=r"step 3\b"):  # a real repetition is still one
        ledger.close_step([row(1, 3)])
    ledger.close()


def test_rows_that_wait_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: Ledger, step: Any) -> None:
        raise sqlite_full()

    ledger = Ledger(tmp_path / "episodes.sqlite")
    monkeypatch.setattr(Ledger, "_write", write)
    monkeypatch.setattr(ledger_module, "_MOST_WAITING", 1)
    ledger.close_step([row(0, 1)])
    with pytest.raises(RunFolderError, match=r"episodes\.sqlite cannot be written: No space"):
        ledger.close_step([row(1, 2)])
    ledger.close()


def test_a_removed_ledger_is_written_again_with_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "run" / "episodes.sqlite"
    path.parent.mkdir()
    ledger = Ledger(path)
    ledger.close_step([row(0, 1)])
    shutil.rmtree(path.parent)
    ledger.close_step([row(1, 2)])
    assert ledger.fault == "the folder is gone"
    path.parent.mkdir()
    ledger.close_step([row(2, 3)])
    assert ledger.fault is None
    ledger.close()

    file = sqlite3.connect(path)
    assert file.execute("SELECT prompt_index, step FROM episodes ORDER BY 1").fetchall() == [(0, 1), (1, 2), (2, 3)]
    file.close()


def test_a_really_full_disk_under_the_ledger(small_disk: Path) -> None:
    ledger = Ledger(small_disk / "episodes.sqlite")
    step, filler = 0, small_disk / "filler"
    filler.write_bytes(bytes(600_000))
    while ledger.fault is None:
        step += 1
        assert step < 100
        ledger.close_step([row(step * 1000 + number, step) for number in range(500)])
    assert ledger.fault == "No space left on device"
    filler.unlink()
    ledger.close_step([row(1, step + 1)])
    assert ledger.fault is None
    assert ledger.count() == 500 * step + 1
    ledger.close()
