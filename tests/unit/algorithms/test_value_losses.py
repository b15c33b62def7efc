# SPDX-License-Identifier: Apache-2.0
"""The loss of a value function, and how much of the returns it explains."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.algorithms.statistics import ValueStatistics
from podium.algorithms.values import value_loss, value_statistics


def test_the_plain_loss_is_half_the_squared_error() -> None:
    values_S = torch.tensor([1.0, 0.0], requires_grad=True)
    loss_S = value_loss(values_S, torch.zeros(2), torch.tensor([3.0, 0.5]), clip=None)
    assert loss_S.tolist() == [2.0, 0.125]
    loss_S.sum().backward()
    assert values_S.grad is not None
    assert values_S.grad.tolist() == [-2.0, -0.5]


def test_a_value_that_ran_ahead_of_its_old_one_gets_no_gradient() -> None:
    # All old values are 0 and kept within 0.2. To the return 1: 0.5 is clipped to 0.2, error 0.8. To the return -1
    # the value itself is further off, and pulled back. 0.1 is inside.
    values_S = torch.tensor([0.5, 0.5, 0.1], requires_grad=True)
    loss_S = value_loss(values_S, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), clip=0.2)
    assert loss_S.tolist() == pytest.approx([0.32, 1.125, 0.405])
    loss_S.sum().backward()
    assert values_S.grad is not None
    assert values_S.grad.tolist() == pytest.approx([0.0, 1.5, -0.9])


def test_the_clipped_tokens_are_counted() -> None:
    statistics = value_statistics(
        torch.tensor([0.5, 0.5, 0.1]), torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), clip=0.2
    )
    assert statistics.clip_fraction == pytest.approx(1 / 3)
    assert statistics.mean_value == pytest.approx(1.1 / 3)
    assert statistics.mean_return == pytest.approx(1 / 3)


def test_explained_variance_by_hand() -> None:
    # Returns 0, 1, 2: variance 1. Errors -0.5, 0, 0.5: variance 0.25.
    returns_S = torch.tensor([0.0, 1.0, 2.0])
    statistics = value_statistics(torch.tensor([0.5, 1.0, 1.5]), torch.zeros(3), returns_S, clip=None)
    assert statistics.explained_variance == pytest.approx(0.75)
    assert value_statistics(returns_S, returns_S, returns_S, clip=None).explained_variance == 1.0
    assert value_statistics(torch.ones(3), returns_S, returns_S, clip=None).explained_variance == pytest.approx(0.0)


@pytest.mark.parametrize("returns", [[], [1.0], [1.0, 1.0]])
def test_returns_that_do_not_vary_are_not_explained_and_not_nan(returns: list[float]) -> None:
    returns_S = torch.tensor(returns)
    assert value_statistics(returns_S * 0.5, returns_S, returns_S, clip=None).explained_variance == 0.0


def test_only_the_values_get_a_gradient_in_float32() -> None:
    leaves = [torch.full((2,), value, dtype=torch.bfloat16, requires_grad=True) for value in (0.5, 0.25, 1.0)]
    loss_S = value_loss(*leaves, clip=0.1)
    assert loss_S.dtype == torch.float32
    loss_S.sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert leaves[2].grad is None


@given(rows=st.lists(st.tuples(*[st.floats(-5, 5, width=32)] * 3), min_size=2, max_size=30), cut=st.integers(0, 30))
def test_two_micro_batches_add_up_to_the_whole(rows: list[tuple[float, float, float]], cut: int) -> None:
    columns_S = torch.tensor(rows).T

    def run(start: int, end: int) -> ValueStatistics:
        return value_statistics(*(column_S[start:end] for column_S in columns_S), clip=0.5)

    whole, merged = run(0, len(rows)), run(0, cut) + run(cut, len(rows))
    assert merged.clip_fraction == whole.clip_fraction
    assert merged.mean_return == pytest.approx(whole.mean_return, rel=1e-9, abs=1e-12)
    if columns_S[2].var() > 1e-3:
        assert merged.explained_variance == pytest.approx(whole.explained_variance, rel=1e-9, abs=1e-9)
