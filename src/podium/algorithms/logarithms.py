# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on log-probs that stays exact near probabilities of 0 and 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def widened(values: Tensor) -> Tensor:
    """The values in float32, or in float64 where they are already: losses never round to the model's dtype."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log1mexp(logprobs: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0: the log-prob of everything else.

    x above minus the rounding step of 1 (1.2e-7 in float32) counts as that: its own rounding is no smaller, and value
    and gradient stay finite.
    """
    logprobs = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    # Each form is exact where the other cancels; both are finite everywhere, so that neither's gradient spoils where.
    return torch.where(logprobs < -math.log(2), torch.log1p(-logprobs.exp()), torch.log(-torch.expm1(logprobs)))
