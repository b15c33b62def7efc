# SPDX-License-Identifier: Apache-2.0
"""Rewards that fail while generation goes on: the step that has them is the one that stops, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_roles import Bandit, answer_slowly
from helpers.trials import Trial
from podium.data.trajectories import TrajectoryId
from podium.errors import RewardError, RolloutError

pytestmark = pytest.mark.timeout(60)

SETTINGS = ("placement={layout: split, devices: 2}", "steps=6", "checkpoint.every=1")
SLOW = 9  # a prompt of the third step or, generated early, of the second


@pytest.fixture(autouse=True)
def slow_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps mix versions and orders of prompts."""
    answer_slowly(monkeypatch)


def _unanswered(id: TrajectoryId) -> str | None:
    return "the server is gone" if id == TrajectoryId(SLOW, 2) else None


def _too_slow(id: TrajectoryId) -> str | None:
    return "digits did not return in 0.2 s" if id.prompt_index == SLOW else None


def _trained(trial: Trial) -> list[tuple[Any, ...]]:
    return trial.episodes("prompt_index, step", "ORDER BY prompt_index", table="groups")


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize(("grading", "key"), [
    ("grading.on_error=fail", "grading.on_error"), ("grading.max_failed_share=0.1", "grading.max_failed_share 0.1"),
])  # fmt: skip
def test_a_slow_reward_stops_the_run_which_then_resumes_with_every_group_once(
    tmp_path: Path, staleness: int, grading: str, key: str
) -> None:
    settings = (*SETTINGS, f"rollout.staleness={staleness}")
    trial = Trial(tmp_path, *settings, grading, bandit=Bandit(fails=_too_slow))
    with pytest.raises(RewardError) as raised:
        trial.run()
    assert all(fact in str(raised.value) for fact in ("4 of 16", "digits", "0.2 s", key))
    step = trial.state.step
    assert {row[1] for row in _trained(trial)} == set(range(1, step + 1))
    assert SLOW not in [row[0] for row in _trained(trial)]

    saved = trial.bandit.saves["policy"][step]
    resumed = Trial(tmp_path, *settings, step=step, saved=saved, cursor=saved["cursor"])
    resumed.run()
    rows = _trained(resumed)
    assert [row[0] for row in rows] == list(range(24))
    assert Counter(row[1] for row in rows) == dict.fromkeys(range(1, 7), 4)


@pytest.mark.parametrize(("on_error", "num_trained"), [("zero", 24 * 4), ("drop_group", 23 * 4)])
def test_a_slow_reward_costs_its_group_or_counts_as_zero(tmp_path: Path, on_error: str, num_trained: int) -> None:
    trial = Trial(
        tmp_path, *SETTINGS, "rollout.staleness=1", f"grading.on_error={on_error}", bandit=Bandit(fails=_too_slow)
    )
    trial.run()

    assert [row[0] for row in _trained(trial)] == list(range(24))
    assert sum(trial.metric("episodes/failed").values()) == 4
    assert sum(trial.metric("episodes/learned_from").values()) == num_trained
    voided = trial.episodes("prompt_index, trained_version, void", "WHERE void IS NOT NULL", table="groups")
    assert voided == ([] if on_error == "zero" else [(SLOW, None, "failed")])
    assert sum(trial.metric("groups/void/failed").values()) == len(voided)
    episodes = trial.episodes("state, reward", f"WHERE prompt_index = {SLOW}")
    assert len(episodes) == 4
    assert {state == "consumed" for state, _ in episodes} == {on_error == "zero"}
    assert on_error == "drop_group" or {reward for _, reward in episodes} == {0.0}
    assert any("digits did not return" in warning for warning in trial.console.warnings)


@pytest.mark.parametrize("on_error", ["zero", "drop_group"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_nemo_rl_3470_an_episode_that_the_engine_did_not_answer_is_none_of_reward_zero(
    tmp_path: Path, staleness: int, on_error: str
) -> None:
    """There, every exception of generation became an empty episode of reward 0, which shifted the baseline of its group
    and was reported nowhere. Here the group is left out, also where failed rewards count as 0."""
    trial = Trial(
        tmp_path, *SETTINGS, f"rollout.staleness={staleness}", f"grading.on_error={on_error}",
        bandit=Bandit(spoils=_unanswered),
    )  # fmt: skip
    trial.run()

    trained_on = {id.prompt_index for _, batch in trial.bandit.updates for id in batch.graded.rollouts.rows.ids}
    assert trained_on == set(range(24)) - {SLOW}
    assert sum(trial.metric("episodes/failed").values()) == 1
    assert sum(trial.metric("episodes/learned_from").values()) == 23 * 4
    episodes = trial.episodes("sample, state, finish, reward", f"WHERE prompt_index = {SLOW} ORDER BY sample")
    assert episodes == [
        (sample, *(("failed", "unanswered") if sample == 2 else ("dropped", "stop")), None) for sample in range(4)
    ]
    assert [warning for warning in trial.console.warnings if "the server is gone" in warning]


def test_nemo_rl_3470_generation_that_mostly_fails_stops_the_run(tmp_path: Path) -> None:
    """There, the run went on, and learned from what had failed."""
    trial = Trial(tmp_path, *SETTINGS, "grading.on_error=zero", bandit=Bandit(spoils=lambda id: "the server is gone"))
    with pytest.raises(RolloutError, match=r"16 of 16 episodes of step 1 could not be generated: .*the server is gone"):
        trial.run()
    assert not trial.bandit.updates
