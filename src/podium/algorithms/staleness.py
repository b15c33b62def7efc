# SPDX-License-Identifier: Apache-2.0
"""How far the policy has moved from the weights that sampled its tokens, by the age of the tokens. Torch-free."""

# S trained tokens

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.algorithms.sums import Sums

# exp of it is finite, and its square too.
_LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeStatistics(Sums):
    """Sums over the tokens of one age. With δ = learner's log-prob before the update − behaviour log-prob, a token's
    ratio is exp(δ), its terms of the KL of the sampling weights from the learner's are exp(δ) − 1 − δ (k3) and −δ (k1),
    and its evidence against the behaviour log-prob is log((1 + exp(δ)) / 2), see behavior_check.py."""

    count: float
    kl_k3: float
    ratio: float
    ratio_squares: float
    kl_k1: float = 0.0
    evidence: float = 0.0

    @property
    def kl(self) -> float:
        """Mean k3; 0 without tokens."""
        return self.kl_k3 / self.count if self.count else 0.0

    @property
    def distance(self) -> float:
        """Mean k1, which single tokens cannot dominate; 0 without tokens."""
        return self.kl_k1 / self.count if self.count else 0.0

    @property
    def effective_share(self) -> float:
        """The effective sample size of the ratios, (Σr)² / Σr², over the number of tokens; 1 without tokens."""
        return self.ratio**2 / self.ratio_squares / self.count if self.ratio_squares else 1.0


ByAge = Mapping[int, AgeStatistics]
"""Updates between the weights that sampled a token and those that the update begins with -> its tokens."""


def updates_between(
    oldest_N: NDArray[np.integer[Any]], newest_N: NDArray[np.integer[Any]] | int, versions: Sequence[int]
) -> NDArray[np.int64]:
    """Number of updates from each version to another. `versions`: those that there are, ascending. A version has the
    number of the step that made it, and steps without an update make none."""
    versions_V = np.asarray(versions, np.int64)
    return np.searchsorted(versions_V, newest_N, side="right") - np.searchsorted(versions_V, oldest_N, side="right")


def log_ratios(learner_S: NDArray[np.floating[Any]], behavior_S: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Learner's log-probs less behaviour log-probs, cut where their exponential would not be finite."""
    delta_S: NDArray[np.float64] = (learner_S.astype(np.float64) - behavior_S).clip(
        -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO
    )
    return delta_S


def evidence(delta_S: NDArray[np.float64]) -> NDArray[np.float64]:
    """log((1 + exp(δ)) / 2) of each token."""
    terms_S: NDArray[np.float64] = np.log1p(np.exp(delta_S)) - np.log(2)
    return terms_S


def statistics_by_age(
    learner_S: NDArray[np.floating[Any]], behavior_S: NDArray[np.floating[Any]], age_S: NDArray[np.integer[Any]]
) -> dict[int, AgeStatistics]:
    """The statistics of each age that occurs."""
    delta_S = log_ratios(learner_S, behavior_S)
    by_age: dict[int, AgeStatistics] = {}
    for age in np.unique(age_S).tolist():
        delta = delta_S[age_S == age]
        ratio = np.exp(delta)
        by_age[age] = AgeStatistics(
            count=float(len(delta)),
            kl_k3=float((ratio - 1 - delta).sum()),
            ratio=float(ratio.sum()),
            ratio_squares=float(np.square(ratio).sum()),
            kl_k1=float(-delta.sum()),
            evidence=float(evidence(delta).sum()),
        )
    return by_age


def merge_ages(parts: Iterable[ByAge]) -> dict[int, AgeStatistics]:
    """Several shards as one."""
    parts = list(parts)
    ages = sorted({age for part in parts for age in part})
    return {age: AgeStatistics.merge([part[age] for part in parts if age in part]) for age in ages}
