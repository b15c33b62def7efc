# SPDX-License-Identifier: Apache-2.0
"""Weights that correct for tokens sampled by another policy than the one that is updated.

`behavior` are the log-probs under the weights that sampled, `proximal` those that the learner recomputed before the
batch's first update. Stale weights, another precision and another sampling distribution all show in their difference.
"""

# S trained tokens of a micro-batch · N trajectories

from __future__ import annotations

from typing import Final, Literal, assert_never

import torch
from torch import Tensor

from podium.algorithms.statistics import EffectiveSampleSize

CorrectionKind = Literal[
    "token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "sequence_geometric_mask"
]

# exp of it is finite in float32; a weight that far out is capped or dropped anyhow.
LOG_WEIGHT_LIMIT: Final = 20.0


def importance_weights(
    proximal_S: Tensor,
    behavior_S: Tensor,
    sequence_S: Tensor,
    num_sequences: int,
    *,
    kind: CorrectionKind,
    cap: float,
    low: float = 0.0,
) -> Tensor:
    """The factor of each token's loss, without gradient.

    | kind | weight |
    |---|---|
    | token_truncate | the token's ratio, at most `cap` |
    | sequence_truncate | the product of its trajectory's ratios, at most `cap`, at each token |
    | token_mask | the token's ratio, 0 outside of `low` .. `cap` |
    | sequence_mask | the product of its trajectory's ratios, 0 outside of `low` .. `cap` |
    | sequence_geometric_mask | the same of the geometric mean, whose bounds do not depend on the length |

    A weight is 0 only where a token or trajectory was dropped: such tokens, and trajectories of which none is left,
    leave the count that the loss is divided by too.
    """
    log_ratios_S = proximal_S.detach().float() - behavior_S.detach().float()
    match kind:
        case "token_truncate":
            return _weights(log_ratios_S).clamp(max=cap)
        case "token_mask":
            return _inside(_weights(log_ratios_S), low, cap)
        case "sequence_truncate":
            return _weights(_sums(log_ratios_S, sequence_S, num_sequences)).clamp(max=cap)[sequence_S]
        case "sequence_mask":
            return _inside(_weights(_sums(log_ratios_S, sequence_S, num_sequences)), low, cap)[sequence_S]
        case "sequence_geometric_mask":
            lengths_N = torch.bincount(sequence_S, minlength=num_sequences).clamp(min=1)
            means_N = _sums(log_ratios_S, sequence_S, num_sequences) / lengths_N
            return _inside(_weights(means_N), low, cap)[sequence_S]
        case other:
            assert_never(other)


def effective_sample_size(weights_S: Tensor) -> EffectiveSampleSize:
    """The sums from which the effective sample size of a whole step follows."""
    weights_S = weights_S.detach().double()
    # One transfer from the device for all of them.
    kept, total, squares = torch.stack([(weights_S > 0).sum(), weights_S.sum(), weights_S.square().sum()]).tolist()
    return EffectiveSampleSize(count=float(weights_S.numel()), kept=kept, sum=total, sum_squares=squares)


def _sums(log_ratios_S: Tensor, sequence_S: Tensor, num_sequences: int) -> Tensor:
    return log_ratios_S.new_zeros(num_sequences).index_add(0, sequence_S, log_ratios_S)


def _weights(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()


def _inside(weights: Tensor, low: float, cap: float) -> Tensor:
    return weights.masked_fill((weights < low) | (weights > cap), 0.0)
