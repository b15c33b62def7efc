# SPDX-License-Identifier: Apache-2.0
"""The policy's loss: selects the loss that the recipe names and applies it to each token."""

# S trained tokens of one micro-batch · C tokens of one chunk of them

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from podium.algorithms import policy
from podium.algorithms.custom import call_loss, require_losses
from podium.algorithms.kl import KlEstimator, kl_estimate
from podium.algorithms.policy import PolicyTokens
from podium.recipe import AlgorithmSection, plugins

Loss = Callable[[PolicyTokens], Tensor]
"""Trained tokens of a micro-batch -> the loss of each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyObjective:
    """The loss of one micro-batch's trained tokens. All inputs except the log-probs are constants."""

    temperature: float
    entropy: float
    ties_tokens: bool
    watches_entropy: bool = True
    loss: Loss
    old_S: Tensor
    advantages_S: Tensor
    sequence_S: Tensor
    num_sequences: int
    correction_S: Tensor | None
    reference_S: Tensor | None
    kl_estimator: KlEstimator
    kl_coefficient: float

    def tokens(self, logprobs_C: Tensor, part: slice) -> PolicyTokens:
        """Inputs of the loss for one part of the trained tokens."""
        return PolicyTokens(
            logprobs_S=logprobs_C,
            old_logprobs_S=self.old_S[part],
            advantages_S=self.advantages_S[part],
            sequence_S=self.sequence_S[part],
            num_sequences=self.num_sequences,
        )

    def __call__(self, logprobs_C: Tensor, tokens: slice) -> Tensor:
        """The loss of each token: correction · policy loss + β · KL. The head (models/head.py) subtracts the entropy
        bonus, multiplies by the token's weight and sums; the train step divides by the count of the reduction."""
        loss_C = self.loss(self.tokens(logprobs_C, tokens))
        if self.correction_S is not None:
            loss_C = loss_C * self.correction_S[tokens]
        if self.reference_S is not None:
            distance_C = kl_estimate(logprobs_C, self.reference_S[tokens], self.kl_estimator)
            loss_C = loss_C + self.kl_coefficient * distance_C
        return loss_C


def loss_of(algorithm: AlgorithmSection) -> Loss:
    """The loss that the recipe names, with its constants."""
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "clipped":
            return functools.partial(policy.clipped, clip_low=low, clip_high=high, dual_clip=algorithm.dual_clip)
        case "sequence_clipped":
            return functools.partial(policy.sequence_clipped, clip_low=low, clip_high=high)
        case "clipped_weights":
            return functools.partial(policy.clipped_weights, clip_low=low, clip_high=high)
        case "policy_gradient":
            return policy.policy_gradient
        case path:
            return _custom_loss(plugins.load(path, "algorithm.loss"), path)


def _custom_loss(function: Callable[..., Any], path: str) -> Loss:
    """A custom loss. It must return one value per token: a single number would count as the loss of each token."""

    where = f"algorithm.loss: {path}"

    def loss(tokens: PolicyTokens) -> Tensor:
        return require_losses(where, call_loss(where, function, tokens), tokens.logprobs_S, "token")

    return loss


def imitation(tokens: PolicyTokens) -> Tensor:
    """Cross-entropy, as in supervised fine-tuning."""
    return -tokens.logprobs_S
