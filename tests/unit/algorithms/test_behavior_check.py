# SPDX-License-Identifier: Apache-2.0
"""Evidence against reported log-probs: by hand, for honest engines under any drift, and for broken ones."""

# N sequences · L tokens of each · V vocabulary

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from podium.algorithms.behavior_check import BehaviorCheck, evidence_limit, has_run_away
from podium.algorithms.staleness import AgeStatistics, statistics_by_age

N, L, V = 32, 100, 30


@dataclass(frozen=True, eq=False)
class Sampled:
    """Tokens of an engine, and what a learner whose policy is another finds."""

    behavior_NL: np.ndarray
    learner_NL: np.ndarray

    @property
    def statistics(self) -> AgeStatistics:
        learner, behavior = self.learner_NL.ravel(), self.behavior_NL.ravel()
        return statistics_by_age(learner, behavior, np.full(len(behavior), 2))[2]

    @property
    def is_caught(self) -> bool:
        statistics = self.statistics
        return statistics.evidence > evidence_limit(statistics.count, len(self.behavior_NL))


def sampled(seed: int, *, drift: float, sharpness: float = 3.0, kept: float = 1.0, length: int = L) -> Sampled:
    """Each token from a distribution of its own. `drift`: standard deviation of what the learner's logits moved since.
    `kept`: mass of the most likely tokens that truncated sampling keeps."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, sharpness, (N, length, V))
    before, after = _log_softmax(logits), _log_softmax(logits + random.normal(0, drift, logits.shape))
    order = np.argsort(-before, -1)
    mass_before = np.cumsum(np.take_along_axis(np.exp(before), order, -1), -1) - np.take_along_axis(
        np.exp(before), order, -1
    )
    keeps = np.empty_like(before, bool)
    np.put_along_axis(keeps, order, mass_before < kept, -1)
    engine = _log_softmax(np.where(keeps, before, -np.inf))
    tokens = (engine + random.gumbel(size=engine.shape)).argmax(-1)[..., None]
    return Sampled(
        *(np.take_along_axis(each, tokens, -1)[..., 0] for each in (engine, after)),
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def test_evidence_by_hand() -> None:
    """Ratios 3 and 1 at age 2: log((1 + 3) / 2) and 0. A ratio of 1/3 at age 1: log(2/3)."""
    behavior = np.log(np.array([0.2, 0.5, 0.6]))
    by_age = statistics_by_age(np.log(np.array([0.6, 0.5, 0.2])), behavior, np.array([2, 2, 1]))

    assert by_age[2].evidence == pytest.approx(math.log(2))
    assert by_age[1].evidence == pytest.approx(math.log(2 / 3))
    assert (by_age[1].distance, by_age[2].distance) == (pytest.approx(math.log(3)), pytest.approx(-math.log(3) / 2))


def test_the_limit_by_hand() -> None:
    assert evidence_limit(0, 0) == 30.0
    assert evidence_limit(1000, 0) == pytest.approx(30 + 20)
    assert evidence_limit(1000, 10) == pytest.approx(50 + 10 * math.log(100))


def test_evidence_is_summed_over_groups_and_shards() -> None:
    learner, behavior = np.log(np.array([0.6, 0.6, 0.2])), np.log(np.array([0.2, 0.2, 0.2]))
    parts = [
        BehaviorCheck.of_policy(learner[:1], behavior[:1], np.array([7])),
        BehaviorCheck.of_policy(learner[1:], behavior[1:], np.array([7, 3])),
    ]
    merged = BehaviorCheck.merge(parts)
    assert merged.evidence == {7: pytest.approx(2 * math.log(2)), 3: pytest.approx(0.0)}
    assert merged.impossible == {}


def test_log_probs_that_no_distribution_has_are_counted_by_group() -> None:
    behavior = np.array([-1.0, 0.0, 1e-3, 0.02, np.nan, -np.inf, np.inf, -1e4], np.float32)
    check = BehaviorCheck.of_logprobs(behavior, np.array([1, 1, 1, 1, 2, 2, 3, 3]))
    assert check.impossible == {1: 1, 2: 2, 3: 1}
    assert BehaviorCheck.merge([check, check]).impossible == {1: 2, 2: 4, 3: 2}
    assert BehaviorCheck.of_logprobs(behavior[:3], np.ones(3, int)) == BehaviorCheck()


@pytest.mark.parametrize("drift", [0.0, 0.1, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("kept", [1.0, 0.9])
def test_honest_tokens_are_not_caught_however_far_the_policy_has_moved(drift: float, kept: float) -> None:
    """Their evidence is never above 0 by more than chance: less than the 30 nats of one update, let alone the limit."""
    for seed in range(3):
        honest = sampled(seed, drift=drift, kept=kept)
        assert honest.statistics.evidence < 10.0
        assert not honest.is_caught


@pytest.mark.parametrize("drift", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("kept", [1.0, 0.9])
def test_log_probs_of_the_next_token_are_caught(drift: float, kept: float) -> None:
    for seed in range(3):
        honest = sampled(seed, drift=drift, kept=kept)
        assert replace(honest, behavior_NL=np.roll(honest.behavior_NL, 1, axis=1)).is_caught
        assert replace(honest, behavior_NL=honest.behavior_NL[::-1]).is_caught  # or of another sequence


@pytest.mark.parametrize("drift", [0.0, 0.1, 0.3])
def test_log_probs_that_are_too_low_or_too_high_are_caught(drift: float) -> None:
    """Too low: the policy finds tokens likelier than any update could make them. Too high: those of tokens that were
    almost certain are above 0."""
    honest = sampled(0, drift=drift)
    assert replace(honest, behavior_NL=honest.behavior_NL - 0.5).is_caught
    above = BehaviorCheck.of_logprobs((honest.behavior_NL + 0.5).ravel(), np.zeros(N * L, int))
    assert above.impossible[0] > 0


def test_a_tenth_of_the_sequences_with_wrong_log_probs_is_enough() -> None:
    honest = sampled(0, drift=0.1)
    behavior = honest.behavior_NL.copy()
    behavior[:3] -= 3.0
    assert replace(honest, behavior_NL=behavior).is_caught


def test_the_best_of_many_may_be_all_that_a_program_trains_on() -> None:
    """Answers of one token, of which only right ones are kept. They had a chance of 2%, and have one of 98% now: that
    is log((1 + 49) / 2) = 3.2 nats each, and less than log 100."""
    right = Sampled(np.full((1000, 1), math.log(0.02)), np.full((1000, 1), math.log(0.98)))
    assert right.statistics.evidence == pytest.approx(1000 * math.log(25))
    assert not right.is_caught


def test_only_a_policy_of_which_nothing_is_left_has_run_away() -> None:
    def moved(nats: float) -> AgeStatistics:
        return AgeStatistics(count=10.0, kl_k3=0.0, ratio=1.0, ratio_squares=1.0, kl_k1=10 * nats)

    assert [has_run_away(moved(nats)) for nats in (-9.0, 0.0, 4.9, 5.1)] == [False, False, False, True]
    assert not has_run_away(AgeStatistics.merge([]))
