# SPDX-License-Identifier: Apache-2.0
"""What becomes of rewards in a run: refilled, equal, failed, shaped, of models and of environments."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_roles import Bandit
from helpers.made_batches import advantages_of
from helpers.trials import Trial
from podium.data.trajectories import TrajectoryId
from podium.errors import RewardError
from podium.roles.carriers import EpisodeNote, ScoreNote, TurnRewards

ONE_STEP = "steps=1"


def _mixed_where(*draws: int) -> Any:
    """Groups of these draws are half right, the others all right."""
    return lambda id, chance: id.prompt_index not in draws or id.sample % 2 == 0


def _failing(*ids: tuple[int, int]) -> Any:
    return lambda id: f"no luck with {id}" if id[:2] in ids else None


# --- dynamic sampling ---


def _generated(trial: Trial) -> list[int]:
    """Prompts in the order in which generators got them."""
    return [prompt_index for entry in trial.bandit.calls("generate") for prompt_index in entry[2]]


def test_groups_of_equal_rewards_are_replaced_by_other_prompts(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, ONE_STEP, "algorithm.dynamic_sampling=true", bandit=Bandit(is_right=_mixed_where(1, 3, 5, 7))
    )

    trial.run()

    # Two of four prompts say something. Each of the others is replaced, and so are those that replace them.
    assert _generated(trial) == list(range(8))
    ((_, train_batch),) = trial.bandit.updates
    assert np.unique(train_batch.rollouts.group_N).tolist() == [1, 3, 5, 7]
    assert Counter(trial.episodes("prompt_index, state")) == {
        (draw, "consumed" if draw % 2 else "uninformative"): 4 for draw in range(8)
    }
    (line,) = trial.lines
    wanted = {"episodes": 32, "episodes/learned_from": 16, "groups": 8, "groups/uniform": 0.5, "groups/solved_all": 0.5}
    assert {name: line.values[name] for name in wanted} == wanted
    assert line.values["rollout/generated_tokens"] == 8 * 7


def test_no_more_prompts_are_generated_than_are_needed(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path,
        "steps=2",
        "algorithm.dynamic_sampling=true",
        bandit=Bandit(is_right=_mixed_where(1, 2, 3, 4, *range(5, 9))),
    )

    trial.run()

    assert _generated(trial) == list(range(9))
    groups = [np.unique(train_batch.rollouts.group_N).tolist() for _, train_batch in trial.bandit.updates]
    assert groups == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_refills_stop_after_max_refills_and_the_step_continues_with_what_it_has(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, ONE_STEP, "algorithm={dynamic_sampling: true, max_refills: 2}",
        bandit=Bandit(is_right=_mixed_where(2)),
    )  # fmt: skip

    trial.run()

    # One of 4 says something. At most two steps' worth of prompts, 8, replace others.
    assert _generated(trial) == list(range(12))
    ((_, train_batch),) = trial.bandit.updates
    assert train_batch.rollouts.group_N.tolist() == [2] * 4


def test_a_full_step_is_not_refilled(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, ONE_STEP, "algorithm.dynamic_sampling=true", bandit=Bandit(is_right=_mixed_where(0, 1, 2, 3))
    )

    trial.run()

    assert len(trial.bandit.calls("generate")) == 1


def test_nothing_to_learn_from_makes_no_version_and_a_warning(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path,
        "steps=2",
        "algorithm={dynamic_sampling: true, max_refills: 1}",
        bandit=Bandit(is_right=_mixed_where()),
    )

    run = trial.run()

    assert run.num_committed == 2
    assert trial.bandit.updates == []
    assert [entry[2] for entry in trial.bandit.calls("share")] == [0]
    assert [warning.split(":")[0] for warning in trial.console.warnings] == ["step 1"]
    assert trial.metric("optimizer_steps") == {1: 0.0, 2: 0.0}
    assert [line.values["episodes/learned_from"] for line in trial.lines] == [0, 0]
    assert "loss" not in trial.lines[0].values
    assert Counter(trial.episodes("step, state, version")) == {
        (1, "uninformative", 0): 32, (2, "uninformative", 0): 32
    }  # fmt: skip
    assert list(trial.bandit.saves["policy"]) == [2]


@pytest.mark.slow
def test_steps_without_an_update_are_warned_of_at_the_1st_10th_and_100th(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, "steps=101", "program=expert_iteration", bandit=Bandit(is_right=lambda id, chance: False)
    )  # fmt: skip

    trial.run()

    about = [warning.split(":")[0] for warning in trial.console.warnings if "nothing to learn from" in warning]
    assert about == ["step 1", "step 10", "step 100"]


# --- groups of equal rewards without it ---


def test_a_group_of_equal_rewards_has_no_advantage_and_is_counted(tmp_path: Path) -> None:
    trial = Trial(tmp_path, ONE_STEP, bandit=Bandit(is_right=_mixed_where(2)))

    trial.run()

    ((_, train_batch),) = trial.bandit.updates
    by_group = advantages_of(train_batch).reshape(4, 4)
    assert (by_group[[0, 1, 3]] == 0).all()
    # Rewards 1 0 1 0: mean 1/2, unbiased standard deviation sqrt(1/3).
    assert by_group[2] == pytest.approx(np.array([1, -1, 1, -1]) * 0.5 / (3**-0.5 + 1e-6))
    assert trial.metric("groups/uniform") == {1: 0.75}


# --- rewards that are unavailable ---


def test_drop_group_leaves_the_whole_group_out_and_says_so(tmp_path: Path) -> None:
    trial = Trial(tmp_path, ONE_STEP, bandit=Bandit(fails=_failing((1, 2))))

    trial.run()

    ((_, train_batch),) = trial.bandit.updates
    assert np.unique(train_batch.rollouts.group_N).tolist() == [0, 2, 3]
    (line,) = trial.lines
    wanted = {
        "episodes": 16, "episodes/failed": 1, "episodes/dropped": 4, "episodes/learned_from": 12, "groups": 3
    }  # fmt: skip
    assert {name: line.values[name] for name in wanted} == wanted
    (warning,) = trial.console.warnings
    assert re.search(r"1 of 16 .*step 1\b.* 1\.2#0", warning)


def test_dropped_episodes_are_in_the_ledger_too(tmp_path: Path) -> None:
    trial = Trial(tmp_path, ONE_STEP, bandit=Bandit(fails=_failing((1, 2))))

    trial.run()

    assert Counter(trial.episodes("state")) == {("consumed",): 12, ("dropped",): 3, ("failed",): 1}


def test_zero_counts_a_failed_reward_as_nothing(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, ONE_STEP, "grading.on_error=zero", bandit=Bandit(fails=_failing((1, 2)), is_right=_mixed_where())
    )

    trial.run()

    ((_, train_batch),) = trial.bandit.updates
    rewards_N = train_batch.graded.rewards_N
    assert rewards_N.tolist() == [1.0] * 6 + [0.0] + [1.0] * 9
    assert trial.metric("episodes/failed") == {1: 1.0}
    assert trial.metric("episodes/dropped") == {1: 0.0}
    assert len(trial.console.warnings) == 1


def test_fail_stops_the_run_at_the_first_failure(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "grading.on_error=fail", bandit=Bandit(fails=_failing((5, 0), (6, 1))))

    with pytest.raises(RewardError, match=r"2 of 16 .*step 2\b.* 5\.0#0\b.*grading\.on_error"):
        trial.run()
    assert [line.step for line in trial.lines] == [1]


@pytest.mark.parametrize("on_error", ["drop_group", "zero"])
def test_more_failures_than_the_recipe_bears_stop_the_run(tmp_path: Path, on_error: str) -> None:
    trial = Trial(
        tmp_path, f"grading={{on_error: {on_error}, max_failed_share: 0.25}}",
        bandit=Bandit(fails=_failing(*((0, sample) for sample in range(4)), (1, 0))),
    )  # fmt: skip

    with pytest.raises(RewardError) as caught:
        trial.run()

    assert re.search(r"5 of 16 .*step 1\b.* 0\.0#0\b", str(caught.value))
    assert "grading.max_failed_share 0.25" in str(caught.value)


def test_as_many_failures_as_the_recipe_bears_are_borne(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, ONE_STEP, "grading.max_failed_share=0.25",
        bandit=Bandit(fails=_failing(*((0, sample) for sample in range(4)))),
    )  # fmt: skip

    trial.run()

    assert trial.metric("episodes/dropped") == {1: 4.0}


def test_an_episode_that_could_not_be_generated_has_no_reward(tmp_path: Path) -> None:
    trial = Trial(tmp_path, ONE_STEP, bandit=Bandit(spoils=_failing((3, 3))))

    trial.run()

    assert trial.metric("episodes/failed") == {1: 1.0}
    assert trial.metric("episodes/learned_from") == {1: 12.0}
    assert " 3.3#0" in trial.console.warnings[0]


def test_when_every_group_is_dropped_the_run_continues(tmp_path: Path) -> None:
    everywhere = [(draw, 0) for draw in range(4)]
    trial = Trial(tmp_path, "steps=2", bandit=Bandit(fails=_failing(*everywhere)))

    run = trial.run()

    assert run.num_committed == 2
    assert [plan.step for plan, _ in trial.bandit.updates] == [2]
    assert trial.metric("groups") == {1: 0.0, 2: 4.0}
    assert trial.metric("episodes") == {1: 16.0, 2: 16.0}


# --- what the total is made of ---


def test_the_total_is_the_weighted_sum_of_functions_and_models(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, ONE_STEP, "reward=[{verifier: exact_match, weight: 2}, {model: judges/long, weight: -0.5}]",
        bandit=Bandit(is_right=_mixed_where()),
    )  # fmt: skip

    trial.run()

    ((_, train_batch),) = trial.bandit.updates
    graded = train_batch.graded
    assert graded.names == ("exact_match", "long")
    assert graded.values_NR[:4].tolist() == [[1, 1], [1, 2], [1, 3], [1, 1]]  # right, and its length
    assert graded.rewards_N[:4].tolist() == [1.5, 1.0, 0.5, 1.5]
    assert trial.metric("reward/long/mean") == {1: 1.75}
    assert trial.metric("reward/extra/correct/certain") == {1: 1.0}


def test_a_reward_model_that_gives_no_number_is_a_failure(tmp_path: Path) -> None:
    trial = Trial(tmp_path, ONE_STEP, "reward=[{model: judges/long}]")

    async def score(rollouts: Any) -> ScoreNote:
        return ScoreNote(values_N=np.array([np.nan, *np.ones(15)]))

    trial.roles.reward_models[0][1].score = score  # type: ignore[method-assign]
    trial.run()

    assert trial.metric("episodes/failed") == {1: 1.0}
    (warning,) = trial.console.warnings
    assert re.search(r"1 of 16 .*step 1\b.* judges/long .*nan", warning)


def test_what_an_environment_gives_counts_once_on_its_turn(tmp_path: Path) -> None:
    def environment(note: EpisodeNote) -> EpisodeNote:
        rows = np.arange(len(note.finish_N))
        turns = TurnRewards(row_K=rows, token_K=np.full(len(rows), 2), reward_K=np.full(len(rows), 0.25))
        return replace(
            note, environment_N=np.full(len(rows), 0.75), turn_rewards=turns, counts={"calls": np.full(len(rows), 2.0)}
        )

    trial = Trial(
        tmp_path, ONE_STEP, "program=ppo", bandit=Bandit(environment=environment, is_right=_mixed_where())
    )  # fmt: skip
    trial.run()

    critic: Any = trial.roles.critic
    (estimate,) = critic.estimates
    ((_, train_batch),) = trial.bandit.updates
    assert train_batch.graded.rewards_N.tolist() == [1.75] * 16
    assert estimate["rewards_N"].tolist() == [1.5] * 16  # the rest of the total is on the turn
    assert estimate["turns"].reward_K.sum() == 16 * 0.25
    assert trial.metric("environment/calls") == {1: 2.0}


def test_overlong_answers_lose_what_the_recipe_says(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, ONE_STEP, "rollout.max_new_tokens=3", "algorithm.overlong={buffer_tokens: 2, penalty: 0.5}",
        bandit=Bandit(is_right=_mixed_where()),
    )  # fmt: skip

    trial.run()

    ((_, train_batch),) = trial.bandit.updates
    # Answers of 1, 2, 3 and 1 tokens: 0, 1 and 2 of the buffer's 2 are used.
    assert train_batch.graded.rewards_N[:4].tolist() == [1.0, 0.75, 0.5, 1.0]
    assert trial.metric("reward/shaping/mean") == {1: -0.1875}
    assert trial.metric("reward/exact_match/mean") == {1: 1.0}


def test_truncated_episodes_are_graded_and_compared_but_not_trained_on(tmp_path: Path) -> None:
    def cut(id: TrajectoryId) -> bool:
        return id.sample == 3

    trial = Trial(
        tmp_path, ONE_STEP, "algorithm.mask_truncated=true", bandit=Bandit(is_truncated=cut, is_right=_mixed_where(0))
    )
    trial.run()

    ((_, train_batch),) = trial.bandit.updates
    assert train_batch.rollouts.rows.ids.array_N4[:, 1].tolist() == [0, 1, 2] * 4
    # The group's mean is over all four: 1 0 1 0.
    assert advantages_of(train_batch)[:3] == pytest.approx(np.array([1, -1, 1]) * 0.5 / (3**-0.5 + 1e-6))
    assert trial.metric("episodes/truncated") == {1: 0.25}
    assert Counter(trial.episodes("finish")) == {("stop",): 12, ("length",): 4}


def test_episodes_that_are_masked_do_not_count_as_learned_from(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, ONE_STEP, "algorithm.mask_truncated=true", bandit=Bandit(is_truncated=lambda id: id.sample == 3)
    )

    trial.run()

    assert trial.metric("episodes/learned_from") == {1: 12.0}
    assert Counter(trial.episodes("state"))[("consumed",)] == 12


def test_when_all_are_truncated_and_masked_nothing_is_learned(tmp_path: Path) -> None:
    trial = Trial(tmp_path, ONE_STEP, "algorithm.mask_truncated=true", bandit=Bandit(is_truncated=lambda id: True))

    trial.run()

    assert trial.bandit.updates == []
    assert trial.metric("episodes/learned_from") == {1: 0.0}
    assert trial.console.warnings[0].startswith("step 1: ")


def test_held_out_answers_are_scored_by_a_reward_model_alone(tmp_path: Path) -> None:
    trial = Trial(tmp_path, ONE_STEP, "reward=[{model: judges/long}]", heldout=3)

    trial.run()

    assert trial.metric("heldout/score") == {1: 1.0}
