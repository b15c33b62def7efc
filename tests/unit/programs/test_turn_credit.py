# SPDX-License-Identifier: Apache-2.0
"""algorithm.credit: turn, from the rewards of an environment and of graders to the advantage of each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.made_batches import make_graded, on_policy_recipe
from podium.data.trajectories import TrajectoryBlock, TrajectoryIds
from podium.errors import RecipeError
from podium.programs.estimators import advantage_estimator
from podium.roles.carriers import TurnRewards
from podium.roles.token_rows import spread_over_turns


def recipe(*overrides: str) -> Any:
    tools = "environment={tools: ['tools.py:calculate']}"
    return on_policy_recipe(tools, "algorithm.credit=turn", *overrides)


def turns_of(name: str, discount: float = 0.5) -> TurnRewards:
    """Two episodes of a group. The first has turns that end at tokens 2 and 4, the second one turn; the environment
    gives the first turn 1; graders give 4 and 2 in the end."""
    turns = [(0, 2, 1.0), (0, 4, 0.0), (1, 3, 0.0)]
    graded = make_graded([5.0, 2.0], [0, 0], lengths=[5, 4], turns=turns)
    advantages = advantage_estimator(recipe(f"algorithm.advantage={name}", f"algorithm.turn_discount={discount}"))(
        graded.rewards_N, graded
    )
    assert advantages.values_N is None
    assert advantages.whiten == (name == "reinforce_pp_baseline")
    assert advantages.turns is not None
    return advantages.turns


# The returns are 1 + 0.5 * 4 = 3 and 4, and 2: the episodes' means are 3.5 and 2, and the group's is 2.75.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_centered", [0.25, 1.25, -0.75]),
        ("reinforce_pp_baseline", [0.25, 1.25, -0.75]),
        ("leave_one_out", [1.0, 2.0, -1.5]),
        ("group_relative", list(np.array([0.25, 1.25, -0.75]) / np.sqrt(2 * ((0.0625 + 1.5625) / 2 + 0.5625) / 2))),
    ],
)
def test_a_graded_reward_belongs_to_the_last_turn(name: str, expected: list[float]) -> None:
    turns = turns_of(name)
    assert (turns.row_K.tolist(), turns.token_K.tolist()) == ([0, 0, 1], [2, 4, 3])
    np.testing.assert_allclose(turns.reward_K, expected, rtol=1e-5)


def test_every_token_has_the_advantage_of_its_turn() -> None:
    block = TrajectoryBlock(
        ids=TrajectoryIds(np.zeros((3, 4), np.int64)), offsets=np.array([0, 6, 6, 8]),
        tokens_T=np.zeros(8, np.int32), loss_mask_T=np.ones(8, np.bool_),
        behavior_logprobs_T=np.zeros(8, np.float32), versions_T=np.zeros(8, np.int32),
    )  # fmt: skip
    turns = TurnRewards(
        row_K=np.array([2, 0, 0, 1]), token_K=np.array([1, 2, 4, -1]), reward_K=np.array([9.0, 1.0, 2.0, 5.0])
    )

    assert spread_over_turns(turns, block).tolist() == [1, 1, 1, 2, 2, 2, 9, 9]


def test_an_episode_without_an_answer_counts_in_the_mean() -> None:
    graded = make_graded([4.0, 0.0], [0, 0], turns=[(0, 0, 1.0)])
    turns = advantage_estimator(recipe("algorithm.advantage=group_centered"))(graded.rewards_N, graded).turns

    assert turns is not None
    assert (turns.row_K.tolist(), turns.token_K.tolist(), turns.reward_K.tolist()) == ([0, 1], [0, -1], [2.0, -2.0])


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (("algorithm.advantage=reinforce_pp",), "turn has no form of reinforce_pp"),
        (("algorithm.advantage=length_weighted",), "turn has no form of length_weighted"),
        (("algorithm.advantage='a.py:f'",), "turn has no form of a.py:f"),
        (("algorithm.loss=sequence_clipped",), "sequence_clipped uses one"),
        (("algorithm.dynamic_sampling=true",), "leaves out groups"),
        (("algorithm.credit=episode", "algorithm.turn_discount=0.5"), "no meaning with credit episode"),
        (("environment=null",), "there is no environment"),
        (("program=ppo",), "algorithm.credit"),
    ],
)
def test_what_has_no_meaning_is_refused(overrides: tuple[str, ...], error: str) -> None:
    with pytest.raises(RecipeError, match=error):
        recipe(*overrides)
