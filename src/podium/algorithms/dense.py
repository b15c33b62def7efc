# SPDX-License-Identifier: Apache-2.0
"""Losses with a signal at every token."""

from __future__ import annotations

from torch import Tensor


def token_cross_entropy(logprobs_T: Tensor) -> Tensor:
    """Negative log-likelihood of each trained token; the caller divides the sum by the step's global token count."""
    return -logprobs_T
