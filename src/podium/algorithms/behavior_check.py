# SPDX-License-Identifier: Apache-2.0
"""Whether reported log-probs can be those of the sampled tokens, however far the policy has moved since then.
Torch-free.

A token a is sampled from a distribution μ, and its engine reports log μ(a). Under any policy π the expectation of
e(a) = (1 + π(a) / μ(a)) / 2 is then 1, or less where μ leaves tokens out. So the product of e over tokens exceeds
exp(t) with a probability of at most exp(-t) (an e-value, by Markov's inequality), and the mean of log e is not above 0:
a policy that moves away lowers it. Log-probs of other tokens raise it, and so do log-probs that are too low."""

# S trained tokens

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.algorithms.staleness import AgeStatistics, evidence, log_ratios

# A log-prob is a logit minus a log-sum of exponentials: rounding may leave it just above 0.
_ABOVE_ZERO = 0.01
# In nats, of an update. Right log-probs exceed it with a probability of exp(-30).
_CHANCE = 30.0
# A program may train on the best sequences only, which a better policy finds likelier. A choice that takes a sequence
# with a probability of p adds at most log(1 / p): this allows for 1%.
_CHOICE_OF_A_SEQUENCE = math.log(100)
# For log-probs of logits that were rounded after sampling.
_ROUNDING_OF_A_TOKEN = 0.02
# In nats a token, in the mean: nothing is left of the policy that sampled.
_FARTHEST = 5.0


def evidence_limit(num_tokens: float, num_sequences: int) -> float:
    """The largest evidence that right log-probs of so many tokens may have, in an update of so many sequences."""
    return _CHANCE + _CHOICE_OF_A_SEQUENCE * num_sequences + _ROUNDING_OF_A_TOKEN * num_tokens


def has_run_away(statistics: AgeStatistics) -> bool:
    """Whether the policy is so far from the weights that sampled these tokens that nothing can correct for it."""
    return statistics.distance > _FARTHEST


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviorCheck:
    """What speaks against the reported log-probs of one update, by prompt index."""

    impossible: Mapping[int, int] = field(default_factory=dict)  # tokens whose log-prob is not finite, or above 0
    evidence: Mapping[int, float] = field(default_factory=dict)  # sum of log e; empty if no token is stale

    @classmethod
    def of_logprobs(cls, behavior_S: NDArray[np.floating[Any]], group_S: NDArray[Any]) -> BehaviorCheck:
        """Checks each log-prob by itself. `group_S`: prompt indices."""
        wrong_S = ~((behavior_S <= _ABOVE_ZERO) & (behavior_S > -np.inf))
        if not wrong_S.any():
            return cls()
        prompts, counts = np.unique(group_S[wrong_S], return_counts=True)
        return cls(impossible=dict(zip(prompts.tolist(), counts.tolist(), strict=True)))

    @classmethod
    def of_policy(
        cls,
        learner_S: NDArray[np.floating[Any]],
        behavior_S: NDArray[np.floating[Any]],
        group_S: NDArray[Any],
    ) -> BehaviorCheck:
        """Compares with the log-probs of a policy that was not trained on these tokens."""
        prompts, which_S = np.unique(group_S, return_inverse=True)
        sums = np.bincount(which_S, evidence(log_ratios(learner_S, behavior_S)), len(prompts))
        return cls(evidence=dict(zip(prompts.tolist(), sums.tolist(), strict=True)))

    @classmethod
    def merge(cls, parts: Iterable[BehaviorCheck]) -> BehaviorCheck:
        """Several shards as one."""
        impossible: dict[int, int] = {}
        against: dict[int, float] = {}
        for part in parts:
            for prompt, count in part.impossible.items():
                impossible[prompt] = impossible.get(prompt, 0) + count
            for prompt, value in part.evidence.items():
                against[prompt] = against.get(prompt, 0.0) + value
        return cls(impossible=impossible, evidence=against)
