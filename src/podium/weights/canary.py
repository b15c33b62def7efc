# SPDX-License-Identifier: Apache-2.0
"""The canary: compares log-probs reported by an engine with the learner's for the same tokens; pure."""

# N trajectories · T tokens of all of them

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock
from podium.errors import DataError


def choose_canaries(block: TrajectoryBlock, version: int, count: int) -> Ints:
    """Rows of at most `count` trajectories whose sampled tokens are all of `version`. They are evenly spaced in
    ascending order of id, so that the same block always gives the same canaries."""
    offsets = block.offsets
    sampled_T, current_T = block.versions_T >= 0, block.versions_T == version
    num_sampled_N = _sums(sampled_T, offsets)
    fit_N = (num_sampled_N > 0) & (_sums(current_T, offsets) == num_sampled_N)
    rows: Ints = block.ids.order[fit_N[block.ids.order]]
    spaced = np.linspace(0, len(rows) - 1, max(0, min(count, len(rows)))).round().astype(np.int64)
    chosen: Ints = rows[spaced]
    return chosen


def _sums(mask_T: np.ndarray, offsets: Ints) -> Ints:
    total = np.concatenate([[0], np.cumsum(mask_T)])
    sums: Ints = (total[offsets[1:]] - total[offsets[:-1]]).astype(np.int64)
    return sums


# A gap of so many times the noise floor, or of its usual size in this run, is no rounding.
_TIMES_THE_FLOOR, _TIMES_THE_USUAL = 3.0, 4.0
_STEPS_UNTIL_USUAL = 5
# In nats. Neither rounding nor other kernels nor a KV cache of earlier weights make a mean of this size. Of truncated
# sampling only one side is known, which has about half of it.
_NO_LOGPROBS_OF_THESE_TOKENS, _NO_TRUNCATED_ONES = 1.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GapLimits:
    """Limits above which a gap indicates an error."""

    mean: float
    largest: float  # of one token; infinite: not checked

    @classmethod
    def of(cls, dtype: Literal["float32", "bfloat16"], floor: float | None = None) -> GapLimits:
        """float32: engine and learner agree to 1e-4 on CPU by design; a mean of that size, or one token at ten times
        of it, is another computation and not another order of summing. bfloat16 keeps 8 bits, so a logit of 20 is
        known to 0.06 and single tokens are off by tenths; but the errors are of either sign over many tokens, and
        weights of one update earlier show as a mean well above 0.05. Deep models round more: `floor` is the mean gap
        of two equal forwards of this model (models/verify.py)."""
        if dtype == "float32":
            return cls(mean=1e-4, largest=1e-3)
        return cls(mean=max(0.05, _TIMES_THE_FLOOR * (floor or 0.0)), largest=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap:
    """Δ = learner − behaviour log-prob over sampled tokens, as sums: those of several ranks add up to one.

    An engine that truncates reports a token's share of what it keeps, which is at least its whole probability. Of such
    tokens Δ counts where it is positive, and as 0 elsewhere."""

    count: int
    sum_abs: float
    sum_ratio: float  # of exp(Δ): its mean is 1 where the engine samples from what the learner computes
    largest: float
    by_group: Mapping[int, tuple[float, int]] = field(default_factory=dict)  # prompt index -> sum of |Δ|, and count
    is_truncated: bool = False

    @classmethod
    def between(cls, block: TrajectoryBlock, learner: TokenColumn) -> LogprobGap:
        """The gap over all sampled tokens except the first of each sequence, which nothing predicts."""
        if not learner.ids.same_as(block.ids):
            raise DataError(
                "the learner's log-probs are of other trajectories than the block, or in another order. Score the "
                "block that is compared."
            )
        compared_T = block.versions_T >= 0
        compared_T[block.first_T] = False
        behavior = block.behavior_logprobs_T[compared_T].astype(np.float64)
        delta = learner.values_T[compared_T].astype(np.float64) - behavior
        return cls(
            count=len(delta),
            sum_abs=float(np.abs(delta).sum()),
            sum_ratio=float(np.exp(np.clip(delta, -20, 20)).sum()),
            largest=float(np.abs(delta).max(initial=0.0)),
        )

    @classmethod
    def of(cls, delta_S: NDArray[np.float64], group_S: NDArray[Any], *, is_truncated: bool = False) -> LogprobGap:
        """The gap over tokens with these Δ, of groups with these prompt indices."""
        size_S = delta_S.clip(min=0) if is_truncated else np.abs(delta_S)
        prompts_G, which_S = np.unique(group_S, return_inverse=True)
        sums_G, counts_G = np.bincount(which_S, size_S, len(prompts_G)), np.bincount(which_S, minlength=len(prompts_G))
        return cls(
            count=len(delta_S),
            sum_abs=float(size_S.sum()),
            sum_ratio=float(np.exp(delta_S.clip(-20, 20)).sum()),
            largest=float(size_S.max(initial=0.0)),
            by_group={
                prompt: (total, count)
                for prompt, total, count in zip(prompts_G.tolist(), sums_G.tolist(), counts_G.tolist(), strict=True)
            },
            is_truncated=is_truncated,
        )

    @classmethod
    def merge(cls, parts: Iterable[LogprobGap]) -> LogprobGap:
        """The gap over all parts together."""
        parts = list(parts)
        by_group: dict[int, tuple[float, int]] = {}
        for part in parts:
            for prompt, (total, count) in part.by_group.items():
                before = by_group.get(prompt, (0.0, 0))
                by_group[prompt] = before[0] + total, before[1] + count
        return cls(
            by_group=by_group,
            is_truncated=any(part.is_truncated for part in parts),
            count=sum(part.count for part in parts),
            sum_abs=sum(part.sum_abs for part in parts),
            sum_ratio=sum(part.sum_ratio for part in parts),
            largest=float(np.max([part.largest for part in parts], initial=0.0)),  # NaN stays NaN
        )

    @property
    def mean(self) -> float:
        """Mean |Δ|; 0 if nothing was compared."""
        return self.sum_abs / self.count if self.count else 0.0

    @property
    def mean_ratio(self) -> float:
        """Mean probability ratio; 1 without tokens."""
        return self.sum_ratio / self.count if self.count else 1.0

    def exceeds(self, limits: GapLimits) -> bool:
        """Whether the gap is above its limits, or NaN."""
        return not (self.mean <= limits.mean and self.largest <= limits.largest)

    @property
    def is_of_other_tokens(self) -> bool:
        """Whether it is so large that the behaviour log-probs cannot be those of the sampled tokens under the weights
        that the engine named."""
        return self.mean > (_NO_TRUNCATED_ONES if self.is_truncated else _NO_LOGPROBS_OF_THESE_TOKENS)

    @property
    def widest_group(self) -> tuple[int, float] | None:
        """Prompt index and mean |Δ| of the group with the largest; None: nothing was compared."""
        means = ((prompt, total / count) for prompt, (total, count) in self.by_group.items())
        return max(means, key=lambda each: each[1], default=None)

    def __str__(self) -> str:
        if self.is_truncated:
            return (
                f"{self.mean:.2g} in the mean and {self.largest:.2g} at most over {self.count} tokens of the current "
                "weights, counting those that the learner finds more likely than the truncated distribution"
            )
        return (
            f"{self.mean:.2g} in the mean and {self.largest:.2g} at most over {self.count} tokens of the current "
            f"weights, mean ratio {self.mean_ratio:.4g}"
        )


class GapWatch:
    """Watches the gap over a run. Warns at the first step at which it is no rounding, then only at the 10th, the 100th
    and so on."""

    def __init__(self, limits: GapLimits) -> None:
        self._limits = limits
        self._first: list[float] = []  # mean gaps of the first steps
        self.num_alarms = 0

    def look(self, gap: LogprobGap) -> str | None:
        """Takes the gap of a step; returns a warning if one is due."""
        reason = self._reason(gap)
        if len(self._first) < _STEPS_UNTIL_USUAL and gap.count and math.isfinite(gap.mean):
            self._first.append(gap.mean)
        if reason is None:
            return None
        self.num_alarms += 1
        if self.num_alarms == 1:
            return (
                f"rollout and learner log-probs differ by {gap}: {reason}. The engine does not sample from the policy "
                "that is trained. Likely causes, the commonest first: the engine has other weights than it says, "
                "another temperature or a cut of the distribution (top-k, top-p) that the learner does not know, a "
                "cache kept over a weight update, other kernels or another dtype in one of them. Compare in float32 "
                "with `podium verify`, or switch on an off-policy correction (algorithm.correction)."
            )
        if math.log10(self.num_alarms).is_integer():
            return f"rollout and learner log-probs differed too much in {self.num_alarms} steps, now by {gap}"
        return None

    def _reason(self, gap: LogprobGap) -> str | None:
        limits = self._limits
        if gap.exceeds(limits):
            return f"above the limit ({limits.mean:.2g} and {limits.largest:.2g})"
        usual = statistics.median(self._first) if len(self._first) == _STEPS_UNTIL_USUAL else math.inf
        # Below a fifth of the limit a gap may grow as it likes: it is rounding.
        if gap.mean > _TIMES_THE_USUAL * usual and gap.mean > 0.2 * limits.mean:
            times = f"{gap.mean / usual:.1f} times" if usual > 0 else "not"
            return f"{times} the {usual:.2g} of the first {_STEPS_UNTIL_USUAL} steps"
        return None
