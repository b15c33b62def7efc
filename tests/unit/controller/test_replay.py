# SPDX-License-Identifier: Apache-2.0
"""A run that records its steps, and its updates run again from the record, over fake roles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_roles import Bandit, answer_slowly
from helpers.trials import Trial
from podium.controller.prompts import PromptSource
from podium.controller.run import OnPolicyRun
from podium.data.tasks import IndexedTask
from podium.data.trajectories import TrajectoryId
from podium.errors import DataError, ProgramError, StepRecordError
from podium.roles.carriers import EpisodeNote, TurnRewards
from podium.runs.step_files import recorded_steps, step_path, verify_steps

pytestmark = pytest.mark.timeout(60)

STALE = ("placement={layout: split, devices: 2}", "steps=6", "rollout.staleness=2")


@pytest.fixture(autouse=True)
def slow_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps mix versions and orders of prompts."""
    answer_slowly(monkeypatch)


def replayed(tmp_path: Path, trial: Trial, *settings: str) -> Trial:
    """Another run over the recorded steps of this one."""
    folder = tmp_path / "again"
    folder.mkdir()
    again = Trial(folder, *settings, bandit=replace(trial.bandit, log_odds=0.0, journal=[], updates=[], saves={}))
    again.run(recorded=trial.folder.steps)
    return again


def trained_on(trial: Trial) -> list[tuple[Any, ...]]:
    """Everything that the updates were given, as plain values."""
    updates = []
    for plan, batch in trial.bandit.updates:
        rollouts, note = batch.rollouts, batch.rollouts.note
        assert note.prefixes is not None
        arrays = [
            rollouts.rows.ids.array_N4, rollouts.rows.lengths_N, batch.graded.rewards_N, batch.graded.values_NR,
            note.finish_N, note.version_N, note.newest_version_N, note.turn_rewards.reward_K,
            note.prefixes.tokens_N, note.prefixes.key_N, *note.counts.values(),
        ]  # fmt: skip
        tasks = {index: Path(task.where).name for index, task in rollouts.tasks.items()}
        updates.append((plan, rollouts.version, tasks, [array.tobytes() for array in arrays], list(note.counts)))
    return updates


def without_times(trial: Trial) -> list[tuple[int, dict[str, float]]]:
    """Metrics of every step, without times and the position in the data, which is ahead in a run that overlaps."""
    ends = ("_s", "mfu", "epoch")
    return [
        (line.step, {name: value for name, value in line.values.items() if not name.endswith(ends)})
        for line in trial.lines
    ]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    (), ("algorithm.dynamic_sampling=true",), ("program=ppo",), ("algorithm.kl={coefficient: 0.1}",),
    ("rollout.staleness=0", "rollout.record=true"),
])  # fmt: skip
def test_a_replay_makes_the_same_updates(tmp_path: Path, settings: tuple[str, ...]) -> None:
    settings = (*STALE, *settings)
    trial = Trial(tmp_path, *settings)
    trial.run()
    again = replayed(tmp_path, trial, *settings)

    assert trial.bandit.log_odds != 0
    assert again.bandit.log_odds == trial.bandit.log_odds
    assert trained_on(again) == trained_on(trial)
    assert without_times(again) == without_times(trial)
    assert again.episodes(rest="ORDER BY 1, 2, 3, 4") == trial.episodes(rest="ORDER BY 1, 2, 3, 4")
    assert again.episodes(table="groups") == trial.episodes(table="groups")
    assert again.bandit.calls("generate", "grade", "store", "send") == []


def test_notes_failures_and_dropped_groups_are_recorded(tmp_path: Path) -> None:
    def environment(note: EpisodeNote) -> EpisodeNote:
        turns = TurnRewards(row_K=np.array([1]), token_K=np.array([0]), reward_K=np.array([0.25]))
        counts = {"tool calls: ü": np.arange(len(note.finish_N), dtype=np.float64)}
        return replace(note, turn_rewards=turns, counts=counts, warnings=("slow",))

    def fails(id: TrajectoryId) -> str | None:
        return "no reward" if id.prompt_index % 5 == 4 and id.sample == 0 else None

    settings = (*STALE, "grading.max_failed_share=1.0")
    trial = Trial(tmp_path, *settings, bandit=Bandit(environment=environment, fails=fails))
    trial.run()
    again = replayed(tmp_path, trial, *settings)

    assert sum(trial.metric("episodes/failed").values()) > 0
    assert trained_on(again) == trained_on(trial)
    assert without_times(again) == without_times(trial)
    assert again.episodes(rest="ORDER BY 1, 2, 3, 4") == trial.episodes(rest="ORDER BY 1, 2, 3, 4")


def test_a_step_without_episodes_is_recorded(tmp_path: Path) -> None:
    settings = (*STALE, "grading.max_failed_share=1.0")
    trial = Trial(tmp_path, *settings, bandit=Bandit(fails=lambda id: "no reward" if id.prompt_index < 12 else None))
    trial.run()
    again = replayed(tmp_path, trial, *settings)

    assert trial.metric("optimizer_steps")[1] == 0
    assert again.bandit.log_odds == trial.bandit.log_odds != 0
    assert again.state.version == trial.state.version


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_a_program_samples_beside_its_groups_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    original = OnPolicyRun._begin

    async def begin(self: OnPolicyRun, number: int, objects: Any) -> Any:
        step = await original(self, number, objects)
        more = await self.sample(step, 1 + number % 2)
        return step.add(more, np.ones(len(more), bool))

    monkeypatch.setattr(OnPolicyRun, "_begin", begin)
    settings = (*STALE, f"rollout.staleness={staleness}", "rollout.record=true")
    trial = Trial(tmp_path, *settings)
    trial.run()
    again = replayed(tmp_path, trial, *settings)

    assert [len(batch) for _, batch in trial.bandit.updates] == [24, 20, 24, 20, 24, 20]
    assert trained_on(again) == trained_on(trial)

    async def ask_again(self: OnPolicyRun, number: int, objects: Any) -> Any:
        step = await begin(self, number, objects)
        await self.sample(step, 1)
        return step

    monkeypatch.setattr(OnPolicyRun, "_begin", ask_again)
    (tmp_path / "other").mkdir()
    with pytest.raises(ProgramError, match=r"run\.sample"):
        replayed(tmp_path / "other", trial, *settings)


def change_byte(steps: Path) -> Path:
    path = step_path(steps, 3)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    return path


def remove(steps: Path) -> Path:
    path = step_path(steps, 3)
    path.unlink()
    return path


def swap(steps: Path) -> Path:
    third, fourth = step_path(steps, 3), step_path(steps, 4)
    content = third.read_bytes()
    third.write_bytes(fourth.read_bytes())
    fourth.write_bytes(content)
    return third


def close_the_gap(steps: Path) -> Path:
    """Removes a step and renames all later ones."""
    for step in range(4, 7):
        step_path(steps, step).replace(step_path(steps, step - 1))
    return step_path(steps, 3)


def cut_short(steps: Path) -> Path:
    path = step_path(steps, 3)
    path.write_bytes(path.read_bytes()[:40])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("tamper", [change_byte, remove, swap, close_the_gap, cut_short])
def test_a_record_that_was_tampered_with_is_refused(tmp_path: Path, tamper: Any) -> None:
    trial = Trial(tmp_path, *STALE)
    trial.run()
    verify_steps(trial.folder.steps, 6, trial.bandit.saves["policy"][6]["record"])
    path = tamper(trial.folder.steps)

    with pytest.raises(StepRecordError) as raised:
        verify_steps(trial.folder.steps, 6, None)
    assert str(path) in str(raised.value)
    with pytest.raises(StepRecordError) as raised:
        replayed(tmp_path, trial, *STALE)
    assert str(path) in str(raised.value)


def test_a_step_of_another_run_is_refused(tmp_path: Path) -> None:
    """Its content is whole, and it does not follow the step before it."""
    trial = Trial(tmp_path, *STALE)
    trial.run()
    (tmp_path / "other").mkdir()
    other = Trial(tmp_path / "other", *STALE, bandit=Bandit(log_odds=1.0))
    other.run()
    step_path(other.folder.steps, 3).replace(step_path(trial.folder.steps, 3))

    with pytest.raises(StepRecordError) as raised:
        verify_steps(trial.folder.steps, 6, None)
    assert str(step_path(trial.folder.steps, 3)) in str(raised.value)


def test_the_checkpoint_names_the_last_recorded_step(tmp_path: Path) -> None:
    """So that a whole record of another run is noticed too."""
    trial = Trial(tmp_path, *STALE)
    trial.run()
    digest = trial.bandit.saves["policy"][6]["record"]

    verify_steps(trial.folder.steps, 6, digest)
    with pytest.raises(StepRecordError):
        verify_steps(trial.folder.steps, 5, digest)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_resumed_run_continues_its_record(tmp_path: Path, step: int) -> None:
    settings = (*STALE, "checkpoint.every=1")
    first = Trial(tmp_path, *settings)
    first.run()
    saved = first.bandit.saves["policy"][step]
    (first.folder.steps / "step-000006.safetensors.tmp").touch()  # of a process that was killed
    log_odds = _log_odds_after(first, step)
    resumed = Trial(
        tmp_path, *settings, step=step, saved=saved, cursor=saved["cursor"], bandit=Bandit(log_odds=log_odds)
    )
    assert recorded_steps(first.folder.steps) == list(range(1, step + 1))
    assert not list(first.folder.steps.glob("*.tmp"))
    resumed.run()

    verify_steps(first.folder.steps, 6, resumed.bandit.saves["policy"][6]["record"])
    again = replayed(tmp_path, resumed, *settings)
    assert again.bandit.log_odds == resumed.bandit.log_odds
    assert again.episodes(table="groups") == resumed.episodes(table="groups")


def _log_odds_after(trial: Trial, step: int) -> float:
    """Of a run's policy, from its record."""
    bandit = replace(trial.bandit, log_odds=0.0, journal=[], updates=[], saves={})
    folder = trial.folder.path.parent / f"until-{step}"
    folder.mkdir()
    until = Trial(folder, *STALE, bandit=bandit)
    until.parts = replace(until.parts, stop_requested=lambda: until.state.step >= step)
    until.run(recorded=trial.folder.steps)
    return bandit.log_odds


@pytest.mark.parametrize(("settings", "num_recorded"), [
    (("rollout.record=false",), 0), (("rollout.staleness=0",), 0), ((), 6),
])  # fmt: skip
def test_only_stale_runs_record_by_default(tmp_path: Path, settings: tuple[str, ...], num_recorded: int) -> None:
    trial = Trial(tmp_path, *STALE, *settings)
    trial.run()

    assert len(recorded_steps(trial.folder.steps)) == num_recorded
    assert (trial.bandit.saves["policy"][6]["record"] is None) == (num_recorded == 0)


def test_the_step_that_fails_is_not_recorded(tmp_path: Path) -> None:
    def reports(step: int) -> dict[str, Any]:
        if step == 3:
            raise DataError("broken")
        return {}

    trial = Trial(tmp_path, *STALE, bandit=Bandit(reports=reports))
    with pytest.raises(DataError, match="broken"):
        trial.run()

    assert recorded_steps(trial.folder.steps)[:1] == [1]
    assert 3 not in recorded_steps(trial.folder.steps)


def test_data_that_lost_prompts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tmp_path, *STALE)
    trial.run()
    original = PromptSource.take

    def take(self: PromptSource, count: int) -> list[IndexedTask]:
        return [replace(prompt, prompt_index=2 * prompt.prompt_index) for prompt in original(self, count)]

    monkeypatch.setattr(PromptSource, "take", take)
    with pytest.raises(DataError, match="prompt with index"):
        replayed(tmp_path, trial, *STALE)
