# SPDX-License-Identifier: Apache-2.0
"""From the losses of tokens to the loss of a step."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from podium.algorithms.reduction import Reduction, normalizer, token_weights

every_reduction = pytest.mark.parametrize("reduction", get_args(Reduction))


def reduced(reduction: Reduction, trajectories: list[list[float]], shards: list[list[int]] | None = None) -> float:
    """The loss of the step; each shard holds some of the trajectories and knows of the rest by the counts alone."""
    total = torch.zeros(())
    for shard in shards or [list(range(len(trajectories)))]:
        losses_S = torch.tensor([loss for n in shard for loss in trajectories[n]])
        lengths_S = torch.tensor([len(trajectories[n]) for n in shard for _ in trajectories[n]])
        total = total + (losses_S * token_weights(reduction, lengths_S)).sum()
    divisor = normalizer(
        reduction,
        num_tokens=sum(map(len, trajectories)),
        num_sequences=len([row for row in trajectories if row]),
        constant=4.0,
    )
    return float(total / divisor)


# Sums 6 and 4, means 2 and 4; four tokens in two trajectories.
STEP = [[1.0, 2.0, 3.0], [4.0]]


@pytest.mark.parametrize(
    ("reduction", "loss"),
    [("token_mean", 2.5), ("sequence_sum_mean", 5.0), ("sequence_mean_mean", 3.0), ("constant", 1.25)],
)
def test_each_reduction_by_hand(reduction: Reduction, loss: float) -> None:
    assert reduced(reduction, STEP) == pytest.approx(loss)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_sum_mean", "sequence_mean_mean", "constant"])
def test_a_trajectory_without_trained_tokens_leaves_the_counts_too(reduction: Reduction) -> None:
    assert reduced(reduction, [*STEP, []]) == pytest.approx(reduced(reduction, STEP))


def test_the_constant_does_not_depend_on_the_longest_answer_of_the_batch() -> None:
    # The first trajectory's part of the loss is the same beside a short and beside a long one.
    assert normalizer("constant", num_tokens=4, num_sequences=2, constant=1024) == 2048.0
    assert normalizer("constant", num_tokens=900, num_sequences=2, constant=1024) == 2048.0


def test_the_constant_must_be_given() -> None:
    with pytest.raises(AssertionError, match="constant"):
        normalizer("constant", num_tokens=4, num_sequences=2, constant=None)


@every_reduction
def test_a_step_without_tokens_divides_by_something(reduction: Reduction) -> None:
    assert normalizer(reduction, num_tokens=0, num_sequences=0, constant=8.0) > 0
    assert token_weights(reduction, torch.zeros(0, dtype=torch.int64)).shape == (0,)


@every_reduction
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    owners=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    seed=st.integers(0, 2**31),
)
def test_shards_add_up_to_the_whole_however_the_trajectories_are_dealt(
    reduction: Reduction, lengths: list[int], owners: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    trajectories = [torch.randn(length, generator=generator).tolist() for length in lengths]
    shards = [[n for n in range(len(lengths)) if owners[n] == owner] for owner in range(4)]
    assert reduced(reduction, trajectories, shards) == pytest.approx(reduced(reduction, trajectories), abs=1e-5)


def test_weights_are_float32_for_counts_of_any_type() -> None:
    lengths_S: Tensor = torch.tensor([2, 2, 1], dtype=torch.int32)
    weights_S = token_weights("sequence_mean_mean", lengths_S)
    assert weights_S.dtype == torch.float32
    assert weights_S.tolist() == [0.5, 0.5, 1.0]
