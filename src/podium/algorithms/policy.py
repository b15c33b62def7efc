# SPDX-License-Identifier: Apache-2.0
"""Policy losses per trained token, before any reduction, and what a run should know of its ratios.

ρ is the probability of a token under the policy being trained over that under the old policy: the one that the
log-probs were recomputed with before the batch's first update, or, where none were, the one that sampled.
"""

# S trained tokens of a micro-batch · N trajectories

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from podium.algorithms.statistics import PolicyStatistics

# exp of it is finite in float32, and far from 1; beyond it a ratio has no gradient.
LOG_RATIO_LIMIT: Final = 20.0
LOG_SEQUENCE_RATIO_LIMIT: Final = 10.0

RatioLevel = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTokens:
    """The trained tokens of one micro-batch, which holds its trajectories whole. Only `logprobs_S` has a gradient."""

    logprobs_S: Tensor
    old_logprobs_S: Tensor
    advantages_S: Tensor
    sequence_S: Tensor  # int64, 0..num_sequences-1: the trajectory of each token
    num_sequences: int

    def __post_init__(self) -> None:
        shapes = {
            tuple(part.shape) for part in (self.logprobs_S, self.old_logprobs_S, self.advantages_S, self.sequence_S)
        }
        # [S, 1] beside [S] would broadcast to [S, S] without a word.
        assert len(shapes) == 1, f"the parts of PolicyTokens differ in shape: {shapes}"


def clipped(tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> Tensor:
    """PPO's pessimistic bound; with `dual_clip`, a negative advantage costs at most that many times itself."""
    loss_S = _pessimistic(_token_ratios(tokens), tokens, clip_low, clip_high)
    if dual_clip is None:
        return loss_S
    advantages_S = _advantages(tokens)
    return torch.where(advantages_S < 0, torch.minimum(loss_S, -dual_clip * advantages_S), loss_S)


def sequence_clipped(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> Tensor:
    """GSPO: the trajectory's geometric mean ratio is clipped; the gradient of each token goes through itself only."""
    return _pessimistic(_sequence_ratios(tokens), tokens, clip_low, clip_high)


def clipped_weights(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> Tensor:
    """CISPO: the ratio is a clipped, constant weight on the policy gradient, so that every token keeps a gradient."""
    weights_S = _token_ratios(tokens).detach().clamp(1 - clip_low, 1 + clip_high)
    return -weights_S * _advantages(tokens) * tokens.logprobs_S.float()


def policy_gradient(tokens: PolicyTokens) -> Tensor:
    """The plain policy gradient: -A log p."""
    return -_advantages(tokens) * tokens.logprobs_S.float()


def _pessimistic(ratios_S: Tensor, tokens: PolicyTokens, clip_low: float, clip_high: float) -> Tensor:
    advantages_S = _advantages(tokens)
    return torch.maximum(-advantages_S * ratios_S, -advantages_S * ratios_S.clamp(1 - clip_low, 1 + clip_high))


def _advantages(tokens: PolicyTokens) -> Tensor:
    return tokens.advantages_S.detach().float()


def _log_ratios(tokens: PolicyTokens) -> Tensor:
    return tokens.logprobs_S.float() - tokens.old_logprobs_S.detach().float()


def _token_ratios(tokens: PolicyTokens) -> Tensor:
    return _log_ratios(tokens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _sequence_ratios(tokens: PolicyTokens) -> Tensor:
    """Each token's copy of its trajectory's ratio: the value of the mean, the gradient of the token alone."""
    logprobs_S = tokens.logprobs_S.float()
    sums_N = logprobs_S.new_zeros(tokens.num_sequences)
    sums_N = sums_N.index_add(0, tokens.sequence_S, _log_ratios(tokens).detach())
    lengths_N = torch.bincount(tokens.sequence_S, minlength=tokens.num_sequences)
    means_S = (sums_N / lengths_N.clamp(min=1))[tokens.sequence_S]
    return (means_S + (logprobs_S - logprobs_S.detach())).clamp(max=LOG_SEQUENCE_RATIO_LIMIT).exp()


def policy_statistics(
    tokens: PolicyTokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    level: RatioLevel = "token",
) -> PolicyStatistics:
    """What the ratios of a micro-batch look like; `level` is "sequence" where the trajectory's ratio is clipped."""
    with torch.no_grad():
        ratios_S = _sequence_ratios(tokens) if level == "sequence" else _token_ratios(tokens)
        log_ratios_S = _log_ratios(tokens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).double()
        advantages_S = _advantages(tokens)
        above_S, below_S = ratios_S > 1 + clip_high, ratios_S < 1 - clip_low
        dual_S = (advantages_S < 0) & (ratios_S > dual_clip) if dual_clip is not None else torch.zeros_like(above_S)
        ratios_S = ratios_S.double()
        parts = [
            above_S & (advantages_S > 0),
            below_S & (advantages_S < 0),
            dual_S,
            above_S,
            below_S,
            ratios_S,
            ratios_S.square(),
            -log_ratios_S,
            torch.expm1(log_ratios_S) - log_ratios_S,
        ]
        largest = ratios_S.max() if len(ratios_S) else ratios_S.new_zeros(())
        # One transfer from the device for all of them.
        *sums, max_ratio = torch.stack([*(part.double().sum() for part in parts), largest]).tolist()
    high, low, dual, above, below, sum_ratio, sum_ratio_squared, k1, k3 = sums
    return PolicyStatistics(
        count=float(len(ratios_S)),
        clipped_high=high,
        clipped_low=low,
        clipped_dual=dual,
        above=above,
        below=below,
        sum_ratio=sum_ratio,
        sum_ratio_squared=sum_ratio_squared,
        max_ratio=max_ratio,
        sum_kl_k1=k1,
        sum_kl_k3=k3,
    )
