# SPDX-License-Identifier: Apache-2.0
"""A step as a value: what it keeps, what it adds, and the batch that is made of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.made_batches import advantages_of, make_graded
from podium.cluster.objects import ObjectScope
from podium.controller.step import Step
from podium.errors import ProgramError
from podium.roles.carriers import DistanceNote
from podium.roles.stages import Advantages, GradedRollouts, ReferenceLogprobs


def _step(graded: GradedRollouts) -> Step:
    return Step(number=3, lr=0.5, kl_coefficient=0.1, sampled=graded, episodes=graded, objects=ObjectScope("step 3"))


STEP = _step(make_graded([1.0, 0.0, 2.0, 2.0], [4, 4, 7, 7]))


def test_a_mask_and_positions_keep_the_same_episodes() -> None:
    by_mask, by_position = STEP.keep(np.array([True, False, False, True])), STEP.keep(np.array([0, 3]))

    assert by_mask.rewards_N.tolist() == by_position.rewards_N.tolist() == [1.0, 2.0]
    assert by_mask.group_N.tolist() == [4, 7]


@pytest.mark.parametrize(
    "which",
    [[1, 0, 0, 1], [1.0, 0.0, 1.0, 0.0], [True, False], [0, 0], [4], [-1], [[True] * 4]],
    ids=["0/1", "floats", "short", "repeated", "beyond", "negative", "nested"],
)
def test_a_choice_that_is_no_mask_and_no_positions_is_refused(which: list[Any]) -> None:
    with pytest.raises(ProgramError, match="4 episodes"):
        STEP.keep(np.array(which))


def test_nothing_can_be_kept() -> None:
    assert len(STEP.keep(np.zeros(4, bool))) == len(STEP.keep(np.array([], int))) == 0


def test_what_is_not_kept_stays_among_the_sampled() -> None:
    kept = STEP.keep(~STEP.episodes.uniform_N)

    assert (len(kept), len(kept.sampled)) == (2, 4)
    assert len(STEP) == 4  # a step does not change


def test_further_episodes_are_sampled_ones_and_in_the_order_of_their_ids() -> None:
    more = make_graded([3.0, 3.0, 0.0, 5.0], [2, 2, 9, 9])

    step = STEP.keep(~STEP.episodes.uniform_N).add(more, ~more.uniform_N)

    assert step.group_N.tolist() == [4, 4, 9, 9]
    assert sorted(set(step.sampled.group_N.tolist())) == [2, 4, 7, 9]


def test_a_batch_carries_what_its_step_computes_with() -> None:
    batch = STEP.batch([0.5, -0.5, 0.0, 0.0])

    assert (batch.step, batch.lr, batch.kl_coefficient) == (3, 0.5, 0.1)
    assert advantages_of(batch).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert advantages_of(batch).dtype == np.float64


@pytest.mark.parametrize("advantages", [[1.0], [[1.0], [1.0], [1.0], [1.0]], [1.0, float("nan"), 0.0, 0.0]])
def test_advantages_that_do_not_fit_the_episodes_are_refused(advantages: list[float]) -> None:
    with pytest.raises(ProgramError, match="4 episodes"):
        STEP.batch(advantages)


def test_an_estimate_of_more_episodes_than_are_kept_is_refused() -> None:
    estimate = Advantages(values_N=np.array([0.5, -0.5, 0.0, 0.0]))
    assert advantages_of(STEP.batch(estimate)).tolist() == [0.5, -0.5, 0.0, 0.0]
    with pytest.raises(ProgramError, match="2 episodes"):
        STEP.keep(STEP.group_N == 4).batch(estimate)


def test_log_probs_of_more_episodes_than_are_kept_are_refused() -> None:
    nothing_N = np.zeros(4)
    reference = ReferenceLogprobs(
        logprobs=STEP.rollouts.rows,  # type: ignore[arg-type]  # not read here
        distance=DistanceNote(k1_N=nothing_N, k2_N=nothing_N, k3_N=nothing_N, tokens_N=nothing_N),
        penalty_N=nothing_N,
    )
    assert STEP.batch(nothing_N, reference=reference).reference is reference
    with pytest.raises(ProgramError, match=r"4 episodes.* 2 episodes.*step\.keep"):
        STEP.keep(STEP.group_N == 4).batch(np.zeros(2), reference=reference)


def test_the_kl_in_the_reward_comes_off_the_rewards() -> None:
    nothing_N = np.zeros(4)
    reference = ReferenceLogprobs(
        logprobs=STEP.rollouts.rows,  # type: ignore[arg-type]  # not read here
        distance=DistanceNote(k1_N=nothing_N, k2_N=nothing_N, k3_N=nothing_N, tokens_N=nothing_N),
        penalty_N=np.array([0.25, 0.0, 1.0, 0.0]),
    )

    assert STEP.rewards_less_kl(reference).tolist() == [0.75, 0.0, 1.0, 2.0]
    assert STEP.rewards_less_kl(None).tolist() == [1.0, 0.0, 2.0, 2.0]
    with pytest.raises(ProgramError, match="scored 4 episodes"):
        STEP.keep(STEP.group_N == 4).rewards_less_kl(reference)
