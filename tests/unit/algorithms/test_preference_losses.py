# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs and of labelled rows: values by hand, gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from podium.algorithms.preferences import (
    implicit_rewards,
    ipo,
    kto,
    kto_baseline,
    log_odds_ratio,
    mean_rewards,
    orpo,
    preferred,
    sigmoid_dpo,
    simpo,
)

# Two pairs. Log-ratios: chosen -10 + 12 = 2 and -6 + 5 = -1, rejected -9 + 8 = -1 and -8 + 10 = 2.
# So the chosen side is 3 ahead in the first pair and 3 behind in the second.
CHOSEN, REJECTED = [-10.0, -6.0], [-9.0, -8.0]
REFERENCE_CHOSEN, REFERENCE_REJECTED = [-12.0, -5.0], [-8.0, -10.0]
CHOSEN_TOKENS, REJECTED_TOKENS = [4, 2], [2, 4]


def double(*columns: list[float]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    reference = double(REFERENCE_CHOSEN, REFERENCE_REJECTED)
    tokens = torch.tensor(CHOSEN_TOKENS), torch.tensor(REJECTED_TOKENS)
    return {
        "sigmoid": lambda chosen, rejected: sigmoid_dpo(chosen, rejected, *reference, beta=0.3, label_smoothing=0.1),
        "ipo": lambda chosen, rejected: ipo(chosen, rejected, *reference, *tokens, beta=0.3),
        "simpo": lambda chosen, rejected: simpo(chosen, rejected, *tokens, beta=2.0, gamma=0.5, label_smoothing=0.1),
        "orpo": lambda chosen, rejected: orpo(chosen, rejected, *tokens, beta=0.3),
        "kto": lambda chosen, rejected: kto(
            torch.cat([chosen - reference[0], rejected - reference[1]]),
            torch.tensor([True, True, False, False]),
            torch.tensor(0.5, dtype=torch.float64),
            beta=0.3,
            desirable_weight=1.5,
            undesirable_weight=0.5,
        ),
    }


def test_dpo_is_the_logistic_loss_of_the_chosen_log_ratios_lead() -> None:
    loss_R = sigmoid_dpo(*double(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED), beta=0.1)
    # -log sigmoid(0.3) and -log sigmoid(-0.3)
    assert loss_R.tolist() == pytest.approx([0.5543552, 0.8543552], abs=1e-7)


def test_smoothed_labels_charge_a_share_of_the_other_order() -> None:
    columns = double(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED)
    loss_R = sigmoid_dpo(*columns, beta=0.1, label_smoothing=0.25)
    # 0.75 of 0.5543552 and 0.25 of 0.8543552, and the reverse
    assert loss_R.tolist() == pytest.approx([0.6293552, 0.7793552], abs=1e-7)


def test_a_policy_that_is_its_reference_pays_log_two() -> None:
    columns = double(CHOSEN, REJECTED)
    assert sigmoid_dpo(*columns, *columns, beta=0.7).tolist() == pytest.approx([math.log(2)] * 2)


def test_the_gradient_of_dpo_is_beta_times_the_doubt_and_opposite_on_the_two_sides() -> None:
    chosen_R, rejected_R, *reference = double(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED)
    chosen_R.requires_grad_()
    rejected_R.requires_grad_()
    sigmoid_dpo(chosen_R, rejected_R, *reference, beta=0.1).sum().backward()
    # -0.1 sigmoid(-0.3) and -0.1 sigmoid(0.3)
    assert chosen_R.grad is not None
    assert rejected_R.grad is not None
    assert chosen_R.grad.tolist() == pytest.approx([-0.0425557, -0.0574443], abs=1e-7)
    assert rejected_R.grad.tolist() == pytest.approx([0.0425557, 0.0574443], abs=1e-7)


def test_ipo_moves_the_lead_of_mean_log_ratios_to_half_over_beta() -> None:
    columns = double(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED)
    loss_R = ipo(*columns, torch.tensor(CHOSEN_TOKENS), torch.tensor(REJECTED_TOKENS), beta=0.5)
    # Leads 2/4 + 1/2 = 1 and -1/2 - 2/4 = -1; the target is 1: no loss, and 2².
    assert loss_R.tolist() == [0.0, 4.0]


def test_simpo_wants_the_mean_log_prob_ahead_by_gamma() -> None:
    columns = double(CHOSEN, REJECTED)
    loss_R = simpo(*columns, torch.tensor(CHOSEN_TOKENS), torch.tensor(REJECTED_TOKENS), beta=2.0, gamma=0.5)
    # Means -2.5 and -4.5, -3 and -2: 2 * 2 - 0.5 = 3.5 and 2 * -1 - 0.5 = -2.5.
    assert loss_R.tolist() == pytest.approx([softplus(-3.5), softplus(2.5)])
    assert loss_R.tolist() == pytest.approx([0.0297504, 2.5788897], abs=1e-7)


def test_simpo_with_smoothed_labels_charges_the_other_order_beyond_gamma() -> None:
    columns = double(CHOSEN, REJECTED)
    tokens = torch.tensor(CHOSEN_TOKENS), torch.tensor(REJECTED_TOKENS)
    loss_R = simpo(*columns, *tokens, beta=2.0, gamma=0.5, label_smoothing=0.2)
    wanted = [0.8 * softplus(-3.5) + 0.2 * softplus(3.5), 0.8 * softplus(2.5) + 0.2 * softplus(-2.5)]
    assert loss_R.tolist() == pytest.approx(wanted)


def test_orpo_is_likelihood_and_odds() -> None:
    # Geometric means: 1/2 of two tokens against 1/4 of one. Odds 1 and 1/3: the ratio is 3, its sigmoid 3/4.
    chosen_R, rejected_R = double([2 * math.log(1 / 2)], [math.log(1 / 4)])
    tokens = torch.tensor([2]), torch.tensor([1])
    assert log_odds_ratio(chosen_R, rejected_R, *tokens).item() == pytest.approx(math.log(3))
    loss_R = orpo(chosen_R, rejected_R, *tokens, beta=0.5)
    assert loss_R.item() == pytest.approx(math.log(2) + 0.5 * math.log(4 / 3))


def test_the_gradient_of_orpo_by_hand() -> None:
    # Of one token each, p = 1/2 and q = 1/4: d/d log p = -1 - beta (1 - 3/4) / (1 - p), d/d log q = the same of q.
    chosen_R, rejected_R = (column.requires_grad_() for column in double([math.log(1 / 2)], [math.log(1 / 4)]))
    orpo(chosen_R, rejected_R, torch.tensor([1]), torch.tensor([1]), beta=0.5).sum().backward()
    assert chosen_R.grad is not None
    assert rejected_R.grad is not None
    assert chosen_R.grad.item() == pytest.approx(-1 - 0.5 * 0.25 / 0.5)
    assert rejected_R.grad.item() == pytest.approx(0.5 * 0.25 / 0.75)


@pytest.mark.parametrize("chosen", [0.0, -1e-9, -1e-4, -1e4])
@pytest.mark.parametrize("rejected", [0.0, -1e-9, -1e4])
def test_odds_of_certain_and_of_impossible_completions_are_finite(chosen: float, rejected: float) -> None:
    chosen_R, rejected_R = torch.tensor([chosen], requires_grad=True), torch.tensor([rejected], requires_grad=True)
    loss_R = orpo(chosen_R, rejected_R, torch.tensor([1]), torch.tensor([1]), beta=0.1)
    loss_R.sum().backward()
    for part in (loss_R, chosen_R.grad, rejected_R.grad):
        assert part is not None
        assert part.isfinite().all()


def test_kto_compares_each_row_with_the_baseline() -> None:
    logratio_R, desirable_R = torch.tensor([3.0, -1.0, 3.0, -1.0]), torch.tensor([True, True, False, False])
    loss_R = kto(logratio_R, desirable_R, torch.tensor(1.0), beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    # beta (log-ratio - 1) is 1 and -1; sigmoid(1) = 0.7310586. Desirable: 2 (1 - it). Undesirable: 3 (1 - the mirror).
    wanted = [2 * 0.2689414, 2 * 0.7310586, 3 * 0.7310586, 3 * 0.2689414]
    assert loss_R.tolist() == pytest.approx(wanted, abs=1e-6)


def test_kto_pulls_desirable_rows_up_and_undesirable_rows_down() -> None:
    logratio_R, baseline = torch.zeros(2, requires_grad=True), torch.zeros((), requires_grad=True)
    desirable_R = torch.tensor([True, False])
    kto(logratio_R, desirable_R, baseline, beta=0.4, desirable_weight=1.0, undesirable_weight=2.0).sum().backward()
    assert logratio_R.grad is not None
    # sigmoid'(0) = 1/4
    assert logratio_R.grad.tolist() == pytest.approx([-0.1, 0.2])
    assert baseline.grad is None


def test_kto_far_on_the_right_side_keeps_its_digits() -> None:
    # In float32 1 - sigmoid(30) would be 0; exp(-30) is 9.3576e-14.
    loss_R = kto(
        torch.tensor([30.0]),
        torch.tensor([True]),
        torch.tensor(0.0),
        beta=1.0,
        desirable_weight=1.0,
        undesirable_weight=1.0,
    )
    assert loss_R.item() == pytest.approx(9.3576e-14, rel=1e-4)


def test_the_baseline_is_the_mean_but_never_negative() -> None:
    assert kto_baseline(torch.tensor(6.0), 4).item() == 1.5
    assert kto_baseline(torch.tensor(6.0), torch.tensor(4)).item() == 1.5
    assert kto_baseline(torch.tensor(-6.0), 4).item() == 0.0
    assert kto_baseline(torch.tensor(0.0), 0).item() == 0.0
    assert not kto_baseline(torch.tensor(6.0, requires_grad=True), 4).requires_grad


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "simpo", "orpo", "kto"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    chosen_R, rejected_R = (column.requires_grad_() for column in double(CHOSEN, REJECTED))
    assert torch.autograd.gradcheck(losses()[name], (chosen_R, rejected_R))


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "simpo", "orpo", "kto"])
@pytest.mark.parametrize("chosen", [-1e4, 0.0])
@pytest.mark.parametrize("rejected", [-1e4, 0.0])
def test_extreme_log_probs_give_finite_losses_and_gradients(name: str, chosen: float, rejected: float) -> None:
    chosen_R, rejected_R = (torch.full((2,), value, requires_grad=True) for value in (chosen, rejected))
    loss = losses()[name](chosen_R, rejected_R)
    loss.sum().backward()
    for part in (loss, chosen_R.grad, rejected_R.grad):
        assert part is not None
        assert part.isfinite().all()


def test_losses_of_bfloat16_are_float32_and_references_get_no_gradient() -> None:
    columns = [torch.full((2,), value, dtype=torch.bfloat16, requires_grad=True) for value in (-3.0, -4.0, -3.5, -3.5)]
    tokens = torch.tensor([2, 3])
    for loss_R in (sigmoid_dpo(*columns, beta=0.1), ipo(*columns, tokens, tokens, beta=0.1)):
        assert loss_R.dtype == torch.float32
        loss_R.sum().backward()
        assert columns[0].grad is not None
        assert columns[2].grad is None
        assert columns[3].grad is None
    assert simpo(*columns[:2], tokens, tokens, beta=2.0, gamma=0.5).dtype == torch.float32
    assert orpo(*columns[:2], tokens, tokens, beta=0.1).dtype == torch.float32


def test_a_column_beside_a_row_is_refused_rather_than_broadcast() -> None:
    row, column = torch.zeros(3), torch.zeros(3, 1)
    with pytest.raises(AssertionError, match="shape"):
        sigmoid_dpo(row, column, row, column, beta=0.1)
    with pytest.raises(AssertionError, match="shape"):
        simpo(row, column, row, column, beta=0.1, gamma=0.0)
    with pytest.raises(AssertionError, match="shape"):
        orpo(row, column, row, column, beta=0.1)
    with pytest.raises(AssertionError, match="shape"):
        ipo(row, column, row, column, row, column, beta=0.1)
    with pytest.raises(AssertionError, match="shape"):
        kto(row, column, torch.zeros(()), beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)


def test_implicit_rewards_are_beta_times_the_log_ratio() -> None:
    chosen_R, reference_R = double(CHOSEN, REFERENCE_CHOSEN)
    assert implicit_rewards(chosen_R.requires_grad_(), reference_R, beta=0.5).tolist() == [1.0, -0.5]
    assert not implicit_rewards(chosen_R, reference_R, beta=0.5).requires_grad
    assert mean_rewards(chosen_R, torch.tensor(CHOSEN_TOKENS), beta=2.0).tolist() == [-5.0, -6.0]


def test_a_tie_is_half_right() -> None:
    assert preferred(torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0.0, 1.0, 0.0])).tolist() == [1.0, 0.0, 0.5]
