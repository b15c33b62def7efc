# SPDX-License-Identifier: Apache-2.0
"""Losses that teach which of two completions is better, or whether one is good, per row.

A completion's log-prob is the sum over its trained tokens unless a name says mean; where a loss wants means, the
numbers of tokens come with the sums. The caller divides the sum of the losses by the step's global number of rows.
Log-probs of a reference are constants.
"""

# R rows: pairs of completions, or (KTO) single labelled ones

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from podium.algorithms.logarithms import log1mexp, widened


def sigmoid_dpo(
    chosen_R: Tensor,
    rejected_R: Tensor,
    reference_chosen_R: Tensor,
    reference_rejected_R: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """DPO: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), with h the lead of the chosen log-ratio.

    `label_smoothing` e is the share of pairs that are taken to be the wrong way round (conservative DPO).
    """
    _assert_alike(chosen_R, rejected_R)
    lead_R = _log_ratio(chosen_R, reference_chosen_R) - _log_ratio(rejected_R, reference_rejected_R)
    return _logistic(beta * lead_R, label_smoothing)


def ipo(
    chosen_R: Tensor,
    rejected_R: Tensor,
    reference_chosen_R: Tensor,
    reference_rejected_R: Tensor,
    chosen_tokens_R: Tensor,
    rejected_tokens_R: Tensor,
    *,
    beta: float,
) -> Tensor:
    """IPO: the squared distance of the lead from 1 / (2 beta).

    The lead is that of log-ratios averaged over each completion's tokens. The formula as published has sums, with which
    the one target would be asked of long and short completions alike; means are what is used in practice.
    """
    _assert_alike(chosen_R, rejected_R)
    lead_R = _mean(_log_ratio(chosen_R, reference_chosen_R), chosen_tokens_R) - _mean(
        _log_ratio(rejected_R, reference_rejected_R), rejected_tokens_R
    )
    return (lead_R - 1 / (2 * beta)).square()


def simpo(
    chosen_R: Tensor,
    rejected_R: Tensor,
    chosen_tokens_R: Tensor,
    rejected_tokens_R: Tensor,
    *,
    beta: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """SimPO: -log sigmoid(beta (mean log-prob of chosen - that of rejected) - gamma), without a reference.

    `gamma` is on the scale of beta times log-probs, not divided by beta: where a ratio gamma / beta of 0.5 is advised,
    beta 2 goes with gamma 1.
    """
    _assert_alike(chosen_R, rejected_R)
    lead_R = _mean(widened(chosen_R), chosen_tokens_R) - _mean(widened(rejected_R), rejected_tokens_R)
    return _logistic(beta * lead_R - gamma, label_smoothing)


def orpo(
    chosen_R: Tensor, rejected_R: Tensor, chosen_tokens_R: Tensor, rejected_tokens_R: Tensor, *, beta: float
) -> Tensor:
    """ORPO: the mean negative log-likelihood of the chosen completion - beta log sigmoid(log odds ratio).

    The likelihood is that of the completion, averaged over its tokens and then, by the caller, over the step's rows, so
    that the loss depends on neither micro-batches nor prompts. (The prompt's tokens may also be counted, and tokens be
    averaged over a batch; that would make long rows count for more.)
    """
    likelihood_R = _mean(widened(chosen_R), chosen_tokens_R)
    return -likelihood_R - beta * logsigmoid(log_odds_ratio(chosen_R, rejected_R, chosen_tokens_R, rejected_tokens_R))


def log_odds_ratio(chosen_R: Tensor, rejected_R: Tensor, chosen_tokens_R: Tensor, rejected_tokens_R: Tensor) -> Tensor:
    """log of odds(chosen) / odds(rejected), odds p / (1 - p) of the geometric mean p of the tokens' probabilities."""
    _assert_alike(chosen_R, rejected_R)
    means_R = _mean(widened(chosen_R), chosen_tokens_R), _mean(widened(rejected_R), rejected_tokens_R)
    chosen_odds_R, rejected_odds_R = (mean_R - log1mexp(mean_R) for mean_R in means_R)
    return chosen_odds_R - rejected_odds_R


def kto(
    logratio_R: Tensor,
    desirable_R: Tensor,
    baseline: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """KTO: 1 - sigmoid(beta (log-ratio - baseline)) of desirable rows, the mirror image of undesirable ones, weighted.

    `logratio_R` is the completion's log-prob minus the reference's, `baseline` a scalar of `kto_baseline`, a constant.
    """
    _assert_alike(logratio_R, desirable_R)
    desirable_R = desirable_R.bool()
    ahead_R = beta * (widened(logratio_R) - baseline.detach())
    # 1 - sigmoid(x) = sigmoid(-x), without the cancellation.
    loss_R = torch.sigmoid(torch.where(desirable_R, -ahead_R, ahead_R))
    return torch.where(desirable_R, desirable_weight * loss_R, undesirable_weight * loss_R)


def kto_baseline(mismatched_logratio_sum: Tensor, count: Tensor | float) -> Tensor:
    """The estimated KL of the policy from the reference: the mean log-ratio of mismatched rows, at least 0.

    Sum and count are those of the whole step, of completions behind prompts that they do not belong to; of none, 0.
    """
    total = widened(mismatched_logratio_sum.detach())
    return (total / torch.as_tensor(count, dtype=total.dtype, device=total.device).clamp(min=1)).clamp(min=0)


def implicit_rewards(logprobs_R: Tensor, reference_R: Tensor, *, beta: float) -> Tensor:
    """beta times the log-ratio: what the policy says the completion is worth, up to a number per prompt. A constant."""
    return beta * _log_ratio(logprobs_R.detach(), reference_R)


def mean_rewards(logprobs_R: Tensor, tokens_R: Tensor, *, beta: float) -> Tensor:
    """beta times the mean log-prob: the reward of the losses without a reference, SimPO and ORPO. A constant."""
    return beta * _mean(widened(logprobs_R.detach()), tokens_R)


def preferred(chosen_R: Tensor, rejected_R: Tensor) -> Tensor:
    """1 where the chosen side is worth more, 0 where the other is; a tie is half right, so that a policy which is still
    its own reference scores as a coin does."""
    _assert_alike(chosen_R, rejected_R)
    return (chosen_R > rejected_R).float() + 0.5 * (chosen_R == rejected_R).float()


def _logistic(lead_R: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * logsigmoid(lead_R) - label_smoothing * logsigmoid(-lead_R)


def _log_ratio(logprobs_R: Tensor, reference_R: Tensor) -> Tensor:
    _assert_alike(logprobs_R, reference_R)
    return widened(logprobs_R) - widened(reference_R.detach())


def _mean(sums_R: Tensor, tokens_R: Tensor) -> Tensor:
    _assert_alike(sums_R, tokens_R)
    # A completion without tokens has log-prob 0, and mean 0.
    return sums_R / tokens_R.clamp(min=1)


def _assert_alike(*parts: Tensor) -> None:
    # [R, 1] beside [R] would broadcast to [R, R] without a word.
    shapes = {tuple(part.shape) for part in parts}
    assert len(shapes) == 1, f"tensors of one row each differ in shape: {shapes}"
