# SPDX-License-Identifier: Apache-2.0
"""Which episodes a run keeps, what their files say, and that no file that cannot be written ends a run."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_roles import Bandit
from helpers.trials import Trial
from podium.controller import rollout_record
from podium.data.trajectories import TrajectoryId
from podium.runs.rollout_files import KeptEpisode, read_rollouts, rollout_facts, rollout_path, rollout_steps

ALL = "run.rollouts.keep=all"


def kept(trial: Trial, step: int | None = None) -> list[KeptEpisode]:
    return list(read_rollouts(trial.folder.path, step))


def groups(trial: Trial) -> dict[int, list[int]]:
    """Step -> the groups that are kept."""
    steps = rollout_steps(trial.folder.rollouts)
    return {step: sorted({each.group for each in kept(trial, step)}) for step in steps}


def trial_in(folder: Path, *overrides: str, **more: Any) -> Trial:
    folder.mkdir(exist_ok=True)
    return Trial(folder, *overrides, **more)


def test_all_episodes_of_all_steps_with_what_the_ledger_says_of_them(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=3", ALL)
    trial.run()

    assert rollout_steps(trial.folder.rollouts) == [1, 2, 3]
    rows = [(each.group, each.sample, each.step, each.state, each.ending, each.reward) for each in kept(trial)]
    assert rows == trial.episodes("prompt_index, sample, step, state, finish, reward", "ORDER BY 1, 2")
    facts = rollout_facts(trial.folder.path, 2)
    assert (facts["version"], facts["episodes"], facts["kept"]) == (1, 16, 16)
    assert facts["lr"] == trial.metric("lr")[2]
    for each in kept(trial):
        assert each.prompt_tokens == 2
        assert each.loss_mask == (False, False) + (True,) * (len(each.tokens) - 2)
        assert each.versions == (None, None) + (each.step - 1,) * (len(each.tokens) - 2)
        assert each.log_probs[:2] == (None, None)
        assert None not in each.log_probs[2:]
        assert each.reference == str(each.row)  # train.jsonl numbers its answers
        assert each.rewards == {"exact_match": each.reward}


def test_advantages_are_those_of_the_batch_on_trained_tokens_only(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=2", ALL)
    trial.run()

    for step, (_, batch) in enumerate(trial.bandit.updates, 1):
        given = dict(zip(batch.rollouts.rows.ids, batch.advantages.values_N.tolist(), strict=True))
        assert any(given.values())
        for each in kept(trial, step):
            value = np.float32(given[TrajectoryId(each.group, each.sample)])
            assert each.advantages == (None, None) + (value,) * (len(each.tokens) - 2)


def test_whole_groups_are_sampled_up_to_the_number_of_episodes(tmp_path: Path) -> None:
    # 4 groups of 4 episodes in every step.
    found = {}
    for most in (1, 4, 7, 8, 100):
        trial = trial_in(tmp_path / str(most), "steps=6", f"run.rollouts.per_step={most}")
        trial.run()
        found[most] = groups(trial)
        sizes = Counter((each.step, each.group) for each in kept(trial))
        assert set(sizes.values()) == {4}

    assert {len(each) for each in found[8].values()} == {2}
    assert found[1] == found[4] == found[7]
    assert {len(each) for each in found[1].values()} == {1}
    assert found[100] == {step: list(range(4 * step - 4, 4 * step)) for step in range(1, 7)}
    assert len({each[0] % 4 for each in found[1].values()}) > 1  # not always the same place of the step


def test_the_sample_follows_from_seed_and_step(tmp_path: Path) -> None:
    one, again, other = (
        trial_in(tmp_path / name, "steps=8", "run.rollouts.per_step=4", *more)
        for name, more in (("one", ()), ("again", ()), ("other", ("run.seed=1",)))
    )
    for trial in (one, again, other):
        trial.run()

    assert groups(one) == groups(again) != groups(other)


@pytest.mark.parametrize("program", ["grpo", "ppo"])
def test_keeping_changes_no_number(tmp_path: Path, program: str) -> None:
    numbers = []
    for keep in ("none", "sample", "all"):
        trial = trial_in(tmp_path / keep, "steps=5", f"program={program}", f"run.rollouts.keep={keep}")
        trial.run()
        lines = [
            {name: value for name, value in line.values.items() if not name.endswith(("_s", "mfu"))}
            for line in trial.lines
        ]
        numbers.append((lines, trial.episodes(), trial.bandit.log_odds))

    assert numbers[0] == numbers[1] == numbers[2]


def test_without_keeping_there_is_no_folder(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=2", "run.rollouts.keep=none")
    trial.run()

    assert not trial.folder.rollouts.exists()


def test_episodes_without_a_reward_are_kept_with_the_reason_and_their_group(tmp_path: Path) -> None:
    def fails(id: TrajectoryId) -> str | None:
        return "no such answer" if id == TrajectoryId(1, 2) else None

    trial = Trial(tmp_path, "steps=1", ALL, "grading.max_failed_share=0.5", bandit=Bandit(fails=fails))
    trial.run()

    states = {(each.group, each.sample): each.state for each in kept(trial)}
    assert [states[1, sample] for sample in range(4)] == ["dropped", "dropped", "failed", "dropped"]
    assert Counter(states.values()) == {"consumed": 12, "dropped": 3, "failed": 1}
    lost = [each for each in kept(trial) if each.group == 1]
    assert all(each.reward is None and not each.trained and not any(each.advantages) for each in lost)


def test_a_step_that_trains_on_fewer_says_which(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=3", ALL, "algorithm.dynamic_sampling=true")
    trial.run()

    seen = Counter((each.state, each.trained) for each in kept(trial))
    assert set(seen) == {("consumed", True), ("uninformative", False)}
    for each in kept(trial):
        assert any(value is not None for value in each.advantages) == each.trained


def test_ppo_has_values_returns_and_whitened_advantages(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "program=ppo", "steps=3", "critic.warmup_steps=1", ALL)
    trial.run()

    assert not any(each.trained or any(each.advantages) for each in kept(trial, 1))  # only the critic learned
    whitenings = {batch.step: batch.advantages.whitening for _, batch in trial.bandit.updates}
    for step in (2, 3):
        shift, scale = whitenings[step]
        for each in kept(trial, step):
            # The fake critic's values are 0, and its returns and advantages the reward of the episode.
            assert each.trained
            assert each.reward is not None
            expected = {"values": 0.0, "returns": each.reward, "advantages": (each.reward - shift) * scale}
            for name, value in expected.items():
                for found, is_trained in zip(getattr(each, name), each.loss_mask, strict=True):
                    assert found == (pytest.approx(value, rel=1e-5) if is_trained else None)


def test_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    unbroken = trial_in(whole, "steps=6", ALL)
    unbroken.run()
    first = trial_in(broken, "steps=5", ALL, "checkpoint.every=3")
    first.run()
    written = rollout_path(first.folder.rollouts, 2).stat().st_mtime_ns
    (first.folder.rollouts / ".tmp-step-00000009").write_bytes(b"half")
    rollout_path(first.folder.rollouts, 4).write_bytes(b"of another life")
    save = first.bandit.saves["policy"][3]
    second = trial_in(
        broken, "steps=6", ALL, step=3, cursor=save["cursor"], saved=save, bandit=Bandit(log_odds=0.0)
    )  # fmt: skip

    assert rollout_steps(second.folder.rollouts) == [1, 2, 3]
    second.run()
    assert sorted(path.name for path in second.folder.rollouts.iterdir()) == [
        f"step-{step:08d}.parquet" for step in range(1, 7)
    ]
    assert rollout_path(second.folder.rollouts, 2).stat().st_mtime_ns == written
    assert groups(second) == groups(unbroken)


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_no_run_and_files_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, trial = rollout_record.write_rollouts, Trial(tmp_path, "steps=8", "checkpoint.every=2")  # type: ignore[attr-defined]

    def write(*args: Any) -> None:
        full() if 3 <= trial.state.step <= 5 else real(*args)

    monkeypatch.setattr(rollout_record, "write_rollouts", write)
    trial.run()

    assert trial.folder.status == "finished"
    assert rollout_steps(trial.folder.rollouts) == list(range(1, 9))
    warnings = [text for text in trial.console.warnings if "rollouts cannot be written" in text]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert 4 in trial.bandit.saves["policy"]  # checkpoints do not wait for them


def test_what_waits_for_a_disk_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, trial = rollout_record.write_rollouts, Trial(tmp_path, "steps=9", "checkpoint.every=1", ALL)  # type: ignore[attr-defined]

    def write(*args: Any) -> None:
        full() if trial.state.step < 8 else real(*args)

    monkeypatch.setattr(rollout_record, "write_rollouts", write)
    monkeypatch.setattr(rollout_record, "_MOST_WAITING_BYTES", 6000)
    trial.run()

    steps = rollout_steps(trial.folder.rollouts)
    assert steps == list(range(steps[0], 10))
    assert 1 < steps[0] < 9
    assert any(f"lacks {steps[0] - 1} steps" in text for text in trial.console.warnings)


def test_a_really_full_disk(small_disk: Path) -> None:
    trial = Trial(small_disk, "steps=1", ALL)
    trial.run()
    columns: list[Any] = []
    real = rollout_record.write_rollouts  # type: ignore[attr-defined]
    folder = small_disk / "more" / "rollouts"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rollout_record, "write_rollouts", lambda folder, each: columns.append(each))
        trial_in(small_disk / "second", "steps=1", ALL).run()
    folder.parent.mkdir()
    real(folder, columns[0])
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    before = rollout_path(folder, 1).read_bytes()
    with pytest.raises(OSError, match="No space left"):
        real(folder, columns[0])
    assert [path.name for path in folder.iterdir()] == ["step-00000001.parquet"]
    assert rollout_path(folder, 1).read_bytes() == before


def test_a_folder_that_somebody_removes_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, trial = rollout_record.write_rollouts, Trial(tmp_path, "steps=6", "checkpoint.every=1")  # type: ignore[attr-defined]
    removed: list[int] = []

    def write(folder: Path, columns: Any) -> None:
        if columns.step == 3 and not removed:
            removed.append(3)
            shutil.rmtree(trial.folder.path)
        real(folder, columns)

    monkeypatch.setattr(rollout_record, "write_rollouts", write)
    trial.run()

    assert trial.folder.status == "finished"
    assert rollout_steps(trial.folder.rollouts) == [3, 4, 5, 6]


def test_what_cannot_be_made_into_a_file_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no such token")

    monkeypatch.setattr(rollout_record, "write_rollouts", broken)
    trial = Trial(tmp_path, "steps=4")
    trial.run()

    assert trial.folder.status == "finished"
    assert [text for text in trial.console.warnings if "no such token" in text] == trial.console.warnings
    assert len(trial.console.warnings) == 1


def test_rows_that_cannot_be_read_cost_the_file_of_their_step_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, real = Trial(tmp_path, "steps=3"), rollout_record._read

    def read(graded: Any, groups: Any) -> Any:
        if trial.state.step == 1:
            raise RuntimeError("the node is gone")
        return real(graded, groups)

    monkeypatch.setattr(rollout_record, "_read", read)
    trial.run()

    assert rollout_steps(trial.folder.rollouts) == [1, 3]
    assert any("the node is gone" in text for text in trial.console.warnings)
