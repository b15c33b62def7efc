# SPDX-License-Identifier: Apache-2.0
"""Losses with a signal at every token."""

from __future__ import annotations

import math

import torch

from podium.algorithms.dense import token_cross_entropy


def test_cross_entropy_is_minus_the_logprob_of_each_token() -> None:
    logprobs_T = torch.tensor([math.log(0.5), math.log(0.25), 0.0], requires_grad=True)
    loss_T = token_cross_entropy(logprobs_T)
    torch.testing.assert_close(loss_T, torch.tensor([0.693147, 1.386294, 0.0]))
    loss_T.sum().backward()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == [-1.0, -1.0, -1.0]
