# SPDX-License-Identifier: Apache-2.0
"""Which reward of a recipe says whether an episode is solved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podium.recipe.on_policy import (
    EnvironmentSection,
    GradingSection,
    JudgeReward,
    ModelReward,
    RewardSection,
    VerifierReward,
)

TOTAL = "total"
# Verifiers that compare an answer with the reference: 1 is right, 0 is wrong.
_CORRECTNESS = ("exact_match", "numeric", "math_verify", "code")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solving:
    """An episode is solved if the reward at this position (None: the total) is at least `at`."""

    reward: int | None
    at: float
    is_clear: bool = True  # whether that reward means success; a sum of several rewards need not


def solving_of(
    rewards: Sequence[RewardSection], grading: GradingSection, environment: EnvironmentSection | None
) -> Solving:
    """What `grading.solved_by` names. Otherwise the only reward with a weight, or the only one that compares with the
    reference, or the total."""
    at = grading.solved_at
    if grading.solved_by is not None:
        names = [reward.metric_name for reward in rewards]
        named = names.index(grading.solved_by) if grading.solved_by != TOTAL else None
        return Solving(reward=named, at=at)
    if environment is not None and environment.is_self_contained:  # it rewards episodes itself
        return Solving(reward=None, at=at, is_clear=not rewards)
    counted = [index for index, reward in enumerate(rewards) if reward.weight != 0]
    correct = [index for index in counted if _is_correctness(rewards[index])]
    for only in (counted, correct):
        if len(only) == 1:
            return Solving(reward=only[0], at=at, is_clear=not isinstance(rewards[only[0]], ModelReward | JudgeReward))
    return Solving(reward=None, at=at, is_clear=False)


def _is_correctness(reward: RewardSection) -> bool:
    return isinstance(reward, VerifierReward) and reward.verifier in _CORRECTNESS
