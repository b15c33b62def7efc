# SPDX-License-Identifier: Apache-2.0
"""algorithm.credit: turn, from the rewards of an environment and of graders to the advantage of each token."""

from __future__ import annotations

from dataclasses import replace
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


AGENT = ("environment={agent: 'agents.py:solve'}", "algorithm.advantage=group_centered")


def of_a_tree(*overrides: str) -> TurnRewards:
    """Two episodes of a group. The first is a fork: turn 0 with reward 1, and turns 1 and 2 behind it with 0 and 2;
    the second has one turn. Graders and agents give the episodes 4 and 3 beside."""
    graded = make_graded([7.0, 3.0], [0, 0], lengths=[9, 4], turns=[(0, 1, 1.0), (0, 4, 0.0), (0, 8, 2.0), (1, 3, 0.0)])
    note = graded.rollouts.note
    turns = replace(note.turn_rewards, parent_K=np.array([-1, 0, 0, -1]))
    graded = replace(graded, rollouts=replace(graded.rollouts, note=replace(note, turn_rewards=turns)))
    advantages = advantage_estimator(on_policy_recipe(*AGENT, *overrides))(graded.rewards_N, graded)
    assert advantages.turns is not None
    assert advantages.turns.token_K.tolist() == [1, 4, 8, 3]
    return advantages.turns


def test_the_turns_of_a_tree_have_what_follows_them() -> None:
    """Behind the fork the returns are 4 and 2 + 4 = 6, at the root 1 + 0.5 * 5 = 3.5. Each branch has two turns:
    the episode's mean is ((3.5 + 4) / 2 + (3.5 + 6) / 2) / 2 = 4.25, the other's 3, and the group's 3.625."""
    found = of_a_tree("algorithm.credit=turn", "algorithm.turn_discount=0.5")
    assert found.reward_K.tolist() == [-0.125, 0.375, 2.375, -0.625]


def test_the_branches_of_a_tree_have_what_is_on_their_path() -> None:
    """The branches have 1 + 0 + 4 = 5 and 1 + 2 + 4 = 7, half of the episode each: its mean is 6, the group's 4.5. The
    shared turn has the mean of both."""
    found = of_a_tree("algorithm.credit=branch")
    assert found.reward_K.tolist() == [1.5, 0.5, 2.5, -1.5]


def test_without_credit_to_turns_a_tree_has_its_reward_at_its_last_token() -> None:
    graded = make_graded([7.0, 3.0], [0, 0], lengths=[9, 4], turns=[(0, 1, 1.0), (1, 3, 2.0)])
    assert graded.last_token_rewards_N.tolist() == [6.0, 1.0]
    note = graded.rollouts.note
    tree = replace(note, turn_rewards=replace(note.turn_rewards, parent_K=np.array([-1, -1])))
    graded = replace(graded, rollouts=replace(graded.rollouts, note=tree))
    assert graded.last_token_rewards_N.tolist() == [7.0, 3.0]
    assert len(graded.token_turn_rewards.row_K) == 0


def test_parents_stay_with_their_turns_when_rows_are_cut_and_joined() -> None:
    tree = TurnRewards(
        row_K=np.array([1, 0, 1, 1]), token_K=np.array([2, 5, 4, 9]), reward_K=np.array([1.0, 2.0, 3.0, 4.0]),
        parent_K=np.array([-1, -1, 0, 0]),
    )  # fmt: skip
    chain = TurnRewards(row_K=np.array([0, 0]), token_K=np.array([3, 7]), reward_K=np.zeros(2))
    assert chain.parents_K.tolist() == [-1, 0]

    joined = TurnRewards.concatenate([(tree, 2), (chain, 1)]).by_row()

    assert joined.row_K.tolist() == [0, 1, 1, 1, 2, 2]
    assert joined.parents_K.tolist() == [-1, -1, 0, 0, -1, 0]
    assert joined.parent_turns_K.tolist() == [-1, -1, 1, 1, -1, 4]
    assert joined.take(np.array([2, 1])).by_row().parent_turns_K.tolist() == [-1, 0, -1, 2, 2]
    assert TurnRewards.concatenate([(chain, 1), (chain, 1)]).parent_K is None


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
        (("algorithm.credit=branch",), "branch needs an agent"),
        ((*AGENT, "algorithm.credit=branch", "algorithm.turn_discount=0.5"), "no meaning with credit branch"),
        ((*AGENT, "algorithm.credit=branch", "algorithm.loss=sequence_clipped"), "sequence_clipped uses one"),
        (("program=ppo",), "algorithm.credit"),
    ],
)
def test_what_has_no_meaning_is_refused(overrides: tuple[str, ...], error: str) -> None:
    with pytest.raises(RecipeError, match=error):
        recipe(*overrides)
