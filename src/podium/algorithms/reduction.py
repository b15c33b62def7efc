# SPDX-License-Identifier: Apache-2.0
"""From the losses of tokens to the loss of a step: a weight for each token, and one number to divide the sum by.

The divisor counts the whole optimizer step, over all micro-batches and ranks; a mean over a micro-batch or a rank
would weigh tokens by the company they happen to be in. Tokens and trajectories that are masked or rejected are in
neither the sum nor the counts.

| reduction | weight of a token | divisor |
|---|---|---|
| token_mean | 1 | trained tokens |
| sequence_sum_mean | 1 | trajectories |
| sequence_mean_mean | 1 / trained tokens of its trajectory | trajectories |
| constant | 1 | trajectories x a constant number of tokens, such as the longest answer allowed (Dr.GRPO) |

The constant is the recipe's. verl's `seq-mean-token-sum-norm` takes the batch's padded width where it is not given a
number, with which the size of a step depends on its longest answer; given the same number, the two agree.
"""

# S trained tokens of a micro-batch

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

Reduction = Literal["token_mean", "sequence_sum_mean", "sequence_mean_mean", "constant"]


def token_weights(reduction: Reduction, lengths_of_sequence_S: Tensor) -> Tensor:
    """The factor of each token's loss; `lengths_of_sequence_S` holds how many trained tokens its trajectory has."""
    lengths_S = lengths_of_sequence_S.float()
    match reduction:
        case "token_mean" | "sequence_sum_mean" | "constant":
            return torch.ones_like(lengths_S)
        case "sequence_mean_mean":
            return lengths_S.reciprocal()
        case other:
            assert_never(other)


def normalizer(reduction: Reduction, *, num_tokens: int, num_sequences: int, constant: float | None = None) -> float:
    """What to divide the weighted sum by; the counts are of the whole step, and at least 1 where there is nothing."""
    num_tokens, num_sequences = max(num_tokens, 1), max(num_sequences, 1)
    match reduction:
        case "token_mean":
            return float(num_tokens)
        case "sequence_sum_mean" | "sequence_mean_mean":
            return float(num_sequences)
        case "constant":
            assert constant is not None, "the reduction `constant` divides by a number of tokens, and none was given"
            return num_sequences * constant
        case other:
            assert_never(other)
