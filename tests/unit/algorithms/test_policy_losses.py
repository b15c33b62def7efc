# SPDX-License-Identifier: Apache-2.0
"""Policy losses per token, value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from podium.algorithms.policy import PolicyTokens, clipped, clipped_weights, policy_gradient, sequence_clipped

Loss = Callable[[PolicyTokens], Tensor]
LOSSES: list[Loss] = [
    lambda tokens: clipped(tokens, clip_low=0.2, clip_high=0.28),
    lambda tokens: clipped(tokens, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    lambda tokens: sequence_clipped(tokens, clip_low=0.2, clip_high=0.28),
    lambda tokens: clipped_weights(tokens, clip_low=0.2, clip_high=0.28),
    policy_gradient,
]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=["clip", "dual_clip", "gspo", "cispo", "gradient"])


def tokens_of(ratios: list[float], advantages: list[float], sequence: list[int] | None = None) -> PolicyTokens:
    """Tokens whose probability was 1 and is now `ratios`."""
    sequence = sequence if sequence is not None else [0] * len(ratios)
    return PolicyTokens(
        logprobs_S=torch.tensor([math.log(ratio) for ratio in ratios], requires_grad=True),
        old_logprobs_S=torch.zeros(len(ratios)),
        advantages_S=torch.tensor(advantages),
        sequence_S=torch.tensor(sequence, dtype=torch.int64),
        num_sequences=max(sequence, default=-1) + 1,
    )


def gradient(loss_S: Tensor, tokens: PolicyTokens) -> list[float]:
    (gradient_S,) = torch.autograd.grad(loss_S.sum(), tokens.logprobs_S)
    return gradient_S.tolist()


def test_inside_the_bounds_the_loss_is_minus_the_weighted_advantage() -> None:
    tokens = tokens_of([1.1, 0.9], [2.0, -1.0])
    loss_S = clipped(tokens, clip_low=0.2, clip_high=0.2)
    assert loss_S.tolist() == pytest.approx([-2.2, 0.9])
    assert gradient(loss_S, tokens) == pytest.approx([-2.2, 0.9])


def test_a_ratio_above_the_upper_clip_gets_no_gradient_where_it_should_not_rise() -> None:
    tokens = tokens_of([1.5, 1.5], [1.0, -1.0])
    loss_S = clipped(tokens, clip_low=0.2, clip_high=0.28)
    # The second should fall, and is pushed with its full weight.
    assert loss_S.tolist() == pytest.approx([-1.28, 1.5])
    assert gradient(loss_S, tokens) == pytest.approx([0.0, 1.5])


def test_a_ratio_below_the_lower_clip_gets_no_gradient_where_it_should_not_fall() -> None:
    tokens = tokens_of([0.5, 0.5], [1.0, -1.0])
    loss_S = clipped(tokens, clip_low=0.2, clip_high=0.28)
    assert loss_S.tolist() == pytest.approx([-0.5, 0.8])
    assert gradient(loss_S, tokens) == pytest.approx([-0.5, 0.0])


def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage_only() -> None:
    tokens = tokens_of([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0])
    loss_S = clipped(tokens, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert loss_S.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert gradient(loss_S, tokens) == pytest.approx([0.0, 0.0, 2.0])


def test_gspo_clips_the_geometric_mean_of_a_trajectory() -> None:
    # Trajectory 0: ratios 4 and 1, geometric mean 2, clipped at 1.5. Trajectory 1: 1.2, inside.
    tokens = tokens_of([4.0, 1.0, 1.2], [1.0, -1.0, 1.0], [0, 0, 1])
    loss_S = sequence_clipped(tokens, clip_low=0.5, clip_high=0.5)
    assert loss_S.tolist() == pytest.approx([-1.5, 2.0, -1.2])
    assert gradient(loss_S, tokens) == pytest.approx([0.0, 2.0, -1.2])


def test_gspo_sends_the_gradient_of_a_token_through_that_token_alone() -> None:
    tokens = tokens_of([1.1, 1.0], [1.0, 0.0])
    loss_S = sequence_clipped(tokens, clip_low=0.2, clip_high=0.2)
    assert gradient(loss_S, tokens) == pytest.approx([-math.sqrt(1.1), 0.0])


def test_gspo_bounds_the_ratio_of_a_trajectory_at_e_to_the_tenth() -> None:
    tokens = tokens_of([math.exp(15), math.exp(15)], [-1.0, -1.0])
    loss_S = sequence_clipped(tokens, clip_low=0.2, clip_high=0.2)
    assert loss_S.tolist() == pytest.approx([math.exp(10)] * 2)
    assert gradient(loss_S, tokens) == [0.0, 0.0]


def test_cispo_weighs_the_policy_gradient_and_keeps_it_outside_of_the_bounds() -> None:
    tokens = tokens_of([2.0, 0.5, 1.1], [1.0, -1.0, 3.0])
    loss_S = clipped_weights(tokens, clip_low=0.2, clip_high=0.28)
    assert loss_S.tolist() == pytest.approx([-1.28 * math.log(2.0), 0.8 * math.log(0.5), -3.3 * math.log(1.1)])
    # Inside of the bounds too the weight is a constant: 3 * 1.1, and not 3 * 1.1 * (1 + ln 1.1).
    assert gradient(loss_S, tokens) == pytest.approx([-1.28, 0.8, -3.3])


def test_the_policy_gradient_ignores_the_old_policy() -> None:
    tokens = tokens_of([0.5, 2.0], [1.0, -2.0])
    loss_S = policy_gradient(tokens)
    assert loss_S.tolist() == pytest.approx([math.log(2.0), 2 * math.log(2.0)])
    assert gradient(loss_S, tokens) == [-1.0, 2.0]


def test_the_ratio_of_a_token_is_bounded_at_e_to_the_twentieth() -> None:
    tokens = tokens_of([math.exp(19), math.exp(25)], [-1.0, -1.0])
    loss_S = clipped(tokens, clip_low=0.2, clip_high=0.2)
    assert loss_S.tolist() == pytest.approx([math.exp(19), math.exp(20)], rel=1e-5)
    assert gradient(loss_S, tokens) == pytest.approx([math.exp(19), 0.0], rel=1e-5)


@every_loss
def test_at_the_old_policy_every_gradient_is_minus_the_advantage(loss: Loss) -> None:
    tokens = tokens_of([1.0, 1.0, 1.0], [0.5, -2.0, 0.0], [0, 0, 1])
    assert gradient(loss(tokens), tokens) == pytest.approx([-0.5, 2.0, 0.0])


@every_loss
def test_an_absurd_ratio_gives_numbers(loss: Loss) -> None:
    tokens = PolicyTokens(
        logprobs_S=torch.tensor([-1e4, -1.0, -1e-3], requires_grad=True),
        old_logprobs_S=torch.tensor([-1.0, -1e4, -900.0]),
        advantages_S=torch.tensor([-1.0, -1.0, 1.0]),
        sequence_S=torch.tensor([0, 1, 2]),
        num_sequences=3,
    )
    loss_S = loss(tokens)
    assert loss_S.isfinite().all()
    assert all(map(math.isfinite, gradient(loss_S, tokens)))


@every_loss
def test_half_precision_inputs_are_computed_in_float32(loss: Loss) -> None:
    tokens = PolicyTokens(
        logprobs_S=torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True),
        old_logprobs_S=torch.tensor([-1.5, -2.5], dtype=torch.bfloat16),
        advantages_S=torch.tensor([1.0, -1.0], dtype=torch.bfloat16),
        sequence_S=torch.tensor([0, 0]),
        num_sequences=1,
    )
    assert loss(tokens).dtype == torch.float32


@every_loss
def test_no_tokens_have_no_loss(loss: Loss) -> None:
    tokens = tokens_of([], [])
    loss_S = loss(tokens)
    assert loss_S.shape == (0,)
    assert gradient(loss_S, tokens) == []


@every_loss
def test_only_the_logprobs_get_a_gradient(loss: Loss) -> None:
    leaves = [torch.full((2,), value, requires_grad=True) for value in (-1.0, -1.1, 1.0)]
    tokens = PolicyTokens(
        logprobs_S=leaves[0],
        old_logprobs_S=leaves[1],
        advantages_S=leaves[2],
        sequence_S=torch.tensor([0, 0]),
        num_sequences=1,
    )
    loss(tokens).sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert leaves[2].grad is None


def test_parts_of_unequal_shape_are_refused() -> None:
    with pytest.raises(AssertionError, match="shape"):
        PolicyTokens(
            logprobs_S=torch.zeros(2),
            old_logprobs_S=torch.zeros(2),
            advantages_S=torch.zeros(2, 1),
            sequence_S=torch.zeros(2, dtype=torch.int64),
            num_sequences=1,
        )


@every_loss
@given(
    rows=st.lists(
        st.tuples(st.floats(-3, 3, width=32), st.floats(-2, 2, width=32), st.integers(0, 3)), min_size=1, max_size=30
    ),
    order=st.randoms(use_true_random=False),
)
def test_neither_order_nor_micro_batches_change_a_token(loss: Loss, rows, order) -> None:
    """Any order of tokens, and each trajectory alone, give each token the same loss and gradient."""
    differences, advantages, sequence = map(torch.tensor, zip(*rows, strict=True))

    def run(chosen: Tensor) -> tuple[Tensor, Tensor]:
        labels, index_S = torch.unique(sequence[chosen], return_inverse=True)
        tokens = PolicyTokens(
            logprobs_S=(differences[chosen] - 4).requires_grad_(),
            old_logprobs_S=torch.full((len(chosen),), -4.0),
            advantages_S=advantages[chosen],
            sequence_S=index_S,
            num_sequences=len(labels),
        )
        loss_S = loss(tokens)
        return loss_S.detach(), torch.tensor(gradient(loss_S, tokens))

    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    whole = run(torch.arange(len(rows)))
    parts = [torch.tensor(shuffled), *(torch.nonzero(sequence == label).flatten() for label in sequence.unique())]
    for chosen in parts:
        for actual, wanted in zip(run(chosen), whole, strict=True):
            torch.testing.assert_close(actual, wanted[chosen], rtol=1e-4, atol=1e-5)
