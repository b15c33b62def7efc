# SPDX-License-Identifier: Apache-2.0
"""Batches that share a reward process which is lost: whose calls fail, whose are called alone, whose just continue."""

from __future__ import annotations

from collections.abc import Mapping

from podium.data.trajectories import TrajectoryId
from podium.environments.grading import MOST_HANGING
from podium.environments.hosted_grading import OpenBatch, settle_loss
from podium.environments.reward_service import Calls, RewardSpec, Settled
from podium.environments.rewards import RewardResult, Sample
from podium.environments.user_process import ProcessLostError
from podium.recipe import VerifierReward

SAMPLE = Sample(
    id=TrajectoryId(0, 0), group=0, prompt_text="", messages=None, answer="", reference=None, row={}, source="test",
    num_tokens=1,
)  # fmt: skip


def batch(first_number: int, num_samples: int, *, num_rewards: int = 2, first_slot: int = 0) -> OpenBatch:
    """A batch whose calls have numbers from `first_number` on."""
    made = OpenBatch("train", [SAMPLE] * num_samples, first_slot)
    made.numbers = range(first_number, first_number + num_samples)
    made.hear(Calls((num_samples,) * num_rewards))
    return made


def lost(marks: Mapping[int, int]) -> ProcessLostError:
    """By reward: the number of the call that was running."""
    return ProcessLostError("ended its process", {slot: number + 1 for slot, number in marks.items()})


def test_the_only_call_that_was_running_fails_and_other_batches_continue() -> None:
    first, second = batch(0, 3), batch(3, 2)

    settle_loss([first, second], lost({1: 4}))

    assert (first.known, first.alone) == ({}, [])
    assert (second.known, second.alone) == ({(1, 1): "ended its process"}, [])


def test_of_several_that_were_running_none_fails_and_each_is_called_alone() -> None:
    first, second, third = batch(0, 3), batch(3, 2), batch(5, 1)

    settle_loss([first, second, third], lost({0: 2, 1: 3}))

    assert [each.known for each in (first, second, third)] == [{}, {}, {}]
    assert [each.alone for each in (first, second, third)] == [[(0, 2)], [(1, 0)], []]


def test_if_none_was_running_all_open_calls_are_suspects() -> None:
    first, second = batch(0, 2, num_rewards=1), batch(2, 1, num_rewards=1)
    first.hear(Settled((((0, 0), [RewardResult(1.0)]),)))

    settle_loss([first, second], ProcessLostError("ended its process", {0: 0}))

    assert (first.alone, second.alone) == ([(0, 1)], [(0, 0)])


def test_a_call_that_was_given_up_and_still_ran_leaves_no_other_suspect() -> None:
    first, second = batch(4, 2), batch(6, 2)
    first.hear(Settled((((0, 1), [RewardResult(None, "did not return")]),)))

    settle_loss([first, second], lost({0: 5}))
    settle_loss([first, second], lost({0: 1}))  # of a batch that is over

    assert (first.alone, second.alone) == ([], [])
    assert [len(each.known) for each in (first, second)] == [1, 0]


def test_a_call_that_ends_the_process_while_it_waits_is_found_when_it_is_alone() -> None:
    first = batch(0, 3, num_rewards=1)
    settle_loss([first], ProcessLostError("ended its process", {0: 0}))
    first.hear(Settled((((0, 0), [RewardResult(1.0)]),)))

    settle_loss([first], ProcessLostError("ended its process again", {0: 0}))

    assert first.known[0, 1] == "ended its process again"
    assert first.alone == [(0, 2)]


def test_what_was_called_alone_and_has_its_result_is_not_called_again() -> None:
    first = batch(0, 2)
    settle_loss([first], lost({0: 0, 1: 1}))
    first.hear(Settled((((0, 0), [RewardResult(None, "did not return")]),)))

    settle_loss([first], lost({0: 0}))  # by the call that was given up

    assert first.alone == [(1, 1)]


def test_only_losses_of_which_a_batch_is_suspected_count_towards_giving_it_up() -> None:
    first, second = batch(0, MOST_HANGING + 2, num_rewards=1), batch(MOST_HANGING + 2, 1, num_rewards=1)

    for number in range(MOST_HANGING):
        settle_loss([first, second], lost({0: number}))

    assert len(first.known) == MOST_HANGING + 2
    assert second.known == {}


def test_rewards_of_each_purpose_have_slots_of_their_own() -> None:
    rewards = (VerifierReward(verifier="exact_match"), VerifierReward(verifier="length"))
    spec = RewardSpec(
        sections={"train": (rewards, "reward"), "evaluation": (rewards[:1], "evaluation.generation.score")},
        timeout_s=1.0, also_scored=False,
    )  # fmt: skip
    scored = batch(7, 2, num_rewards=1, first_slot=spec.first_slot("evaluation"))

    settle_loss([batch(0, 7), scored], lost({2: 8}))

    assert (spec.num_slots, spec.first_slot("train")) == (3, 0)
    assert list(scored.known) == [(0, 1)]
