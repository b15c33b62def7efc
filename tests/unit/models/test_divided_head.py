# SPDX-License-Identifier: Apache-2.0
"""The fused head over ranks that each have a part of the vocabulary, against one rank that has all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.thread_axis import on_threads
from podium.models.head import (
    EntropyObjective,
    TokenObjective,
    fused_logits_objective,
    fused_objective,
    next_token_scores,
    target_logprobs,
)
from podium.models.head_kernels import HeadSpec

# S trained tokens · V vocabulary rows (padded) · E hidden width
S, VOCAB, V, E = 10, 20, 24, 6


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(S, E, generator=draw), torch.randn(V, E, generator=draw)
    return hidden, weight, torch.randint(0, VOCAB, (S,), generator=draw), torch.rand(S, generator=draw)


def plain_loss(logprobs: Tensor) -> Tensor:
    return -(2 * logprobs).exp() - logprobs


def with_entropy(logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
    return plain_loss(logprobs) * (1 + entropy)


OBJECTIVES: dict[str, Any] = {
    "loss": TokenObjective(plain_loss),
    "temperature": TokenObjective(plain_loss, temperature=0.7),
    "bonus": TokenObjective(plain_loss, entropy=0.1, watches_entropy=True),
    "tied": EntropyObjective(loss=with_entropy, watches_entropy=True, ties_tokens=True, entropy=0.2),
}


def stepped(axis: Any, objective: Any, **spec: Any) -> tuple[Tensor, ...]:
    """Loss, log-probs, entropies and gradients of one rank."""
    hidden, weight, targets, weights = inputs()
    part = weight if axis is None else weight[axis.part(V)]
    hidden, part = hidden.requires_grad_(), part.clone().requires_grad_()
    head = HeadSpec(vocab_size=VOCAB, tensor=axis, **spec)
    total, logprobs, entropies = fused_objective(hidden, part, targets, weights, objective, head)
    total.backward()
    assert hidden.grad is not None
    assert part.grad is not None
    return total.detach(), logprobs, entropies, hidden.grad, part.grad


@pytest.mark.parametrize("size", [2, 3, 8])  # the last rank of 8 has padding rows only
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("spec", [{}, {"softcap": 5.0, "scale": 0.25, "chunk_tokens": 3}], ids=["plain", "shaped"])
def test_loss_log_probs_entropies_and_gradients_are_those_of_one_rank(
    size: int, name: str, spec: dict[str, Any]
) -> None:
    wanted = stepped(None, OBJECTIVES[name], **spec)
    found = on_threads(size, lambda axis: stepped(axis, OBJECTIVES[name], **spec))
    for each in found:
        for mine, theirs in zip(each[:4], wanted[:4], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([each[4] for each in found]), wanted[4], rtol=1e-5, atol=1e-6)


def test_the_ranks_exchange_no_logits() -> None:
    def largest_exchange(axis: Any) -> int:
        stepped(axis, OBJECTIVES["bonus"])
        return int(axis.num_exchanged)

    assert on_threads(2, largest_exchange) == [S * E] * 2  # the gradient of the hidden states


def distribution_loss(logits: Tensor, tokens: slice) -> Tensor:
    assert logits.shape[1] == VOCAB
    return (torch.log_softmax(logits, -1) * torch.arange(VOCAB)).sum(-1)


def test_losses_of_whole_distributions_scores_and_log_probs_are_those_of_one_rank() -> None:
    hidden, weight, targets, weights = inputs()

    def work(axis: Any) -> tuple[Tensor, ...]:
        spec = HeadSpec(vocab_size=VOCAB, softcap=5.0, logits_chunk_tokens=4, tensor=axis)
        mine = hidden.clone().requires_grad_()
        part = (weight if axis is None else weight[axis.part(V)]).clone().requires_grad_()
        fused_logits_objective(mine, part, weights, distribution_loss, spec).backward()
        assert mine.grad is not None
        assert part.grad is not None
        scores = next_token_scores(hidden, part.detach(), spec)
        return mine.grad, scores, target_logprobs(hidden, part.detach(), targets, spec, 1.3), part.grad

    wanted, found = work(None), on_threads(2, work)
    for each in found:
        for mine, theirs in zip(each[:3], wanted[:3], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([each[3] for each in found]), wanted[3], rtol=1e-5, atol=1e-5)
