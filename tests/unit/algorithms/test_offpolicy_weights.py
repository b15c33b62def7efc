# SPDX-License-Identifier: Apache-2.0
"""Weights for tokens that another policy sampled."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from podium.algorithms.corrections import CorrectionKind, effective_sample_size, importance_weights
from podium.algorithms.policy import PolicyTokens, clipped
from podium.algorithms.statistics import EffectiveSampleSize

every_kind = pytest.mark.parametrize("kind", get_args(CorrectionKind))

# Trajectory 0: ratios 2 and 3, product 6. Trajectory 1: 0.5 and 0.5, product 0.25. Trajectory 2: 1.
RATIOS_S = torch.tensor([2.0, 0.5, 3.0, 0.5, 1.0])
SEQUENCE_S = torch.tensor([0, 1, 0, 1, 2])


def weights(kind: CorrectionKind, *, cap: float, low: float = 0.0) -> list[float]:
    return importance_weights(RATIOS_S.log(), torch.zeros(5), SEQUENCE_S, 3, kind=kind, cap=cap, low=low).tolist()


def test_token_weights_are_cut_at_the_cap() -> None:
    assert weights("token_truncate", cap=2.5) == pytest.approx([2.0, 0.5, 2.5, 0.5, 1.0])


def test_token_weights_outside_of_the_bounds_are_dropped() -> None:
    assert weights("token_mask", cap=2.5, low=0.6) == pytest.approx([2.0, 0.0, 0.0, 0.0, 1.0])


def test_sequence_weights_are_the_product_over_the_trajectory() -> None:
    assert weights("sequence_truncate", cap=100.0) == pytest.approx([6.0, 0.25, 6.0, 0.25, 1.0])
    assert weights("sequence_truncate", cap=5.0) == pytest.approx([5.0, 0.25, 5.0, 0.25, 1.0])


def test_sequences_outside_of_the_bounds_are_dropped_whole() -> None:
    assert weights("sequence_mask", cap=5.0) == pytest.approx([0.0, 0.25, 0.0, 0.25, 1.0])
    assert weights("sequence_mask", cap=6.5, low=0.3) == pytest.approx([6.0, 0.0, 6.0, 0.0, 1.0])


def test_the_geometric_mean_has_the_scale_of_a_token() -> None:
    mean = math.sqrt(6)
    assert weights("sequence_geometric_mask", cap=2.5) == pytest.approx([mean, 0.5, mean, 0.5, 1.0])
    assert weights("sequence_geometric_mask", cap=2.4, low=0.6) == pytest.approx([0.0, 0.0, 0.0, 0.0, 1.0])


@every_kind
def test_equal_policies_have_weight_one(kind: CorrectionKind) -> None:
    same_S = torch.tensor([-1.0, -2.0, -0.5])
    found_S = importance_weights(same_S, same_S, torch.tensor([0, 0, 1]), 2, kind=kind, cap=2.0, low=0.5)
    assert found_S.tolist() == [1.0, 1.0, 1.0]


@every_kind
def test_weights_carry_no_gradient(kind: CorrectionKind) -> None:
    proximal_S = torch.zeros(2, requires_grad=True)
    assert not importance_weights(proximal_S, torch.zeros(2), torch.tensor([0, 0]), 1, kind=kind, cap=2.0).requires_grad


@every_kind
def test_no_tokens_have_no_weights(kind: CorrectionKind) -> None:
    none_S = torch.zeros(0)
    assert importance_weights(none_S, none_S, torch.zeros(0, dtype=torch.int64), 0, kind=kind, cap=2.0).shape == (0,)


@every_kind
@given(
    rows=st.lists(st.tuples(st.floats(-1e4, 1e4, width=32), st.integers(0, 3)), min_size=1, max_size=20),
    order=st.randoms(use_true_random=False),
)
def test_weights_are_within_bounds_and_follow_their_token(kind: CorrectionKind, rows, order) -> None:
    differences_S, sequence_S = map(torch.tensor, zip(*rows, strict=True))

    def run(chosen: list[int]) -> Tensor:
        return importance_weights(
            differences_S[chosen], torch.zeros(len(chosen)), sequence_S[chosen], 4, kind=kind, cap=2.0
        )

    weights_S = run(list(range(len(rows))))
    assert ((weights_S >= 0) & (weights_S <= 2.0)).all()
    # What is dropped is told from what is kept by its zero.
    assert (weights_S > 0).all() or kind.endswith("mask")
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    # Sums of large differences may fall on either side of a bound: compare those that are kept in both.
    both = (run(shuffled) > 0) & (weights_S[shuffled] > 0)
    torch.testing.assert_close(run(shuffled)[both], weights_S[shuffled][both], rtol=2e-2, atol=1e-6)


# μ, π_old and π of each token: weights 2, 1 and 1/4, ratios 1.1, 1.5 and 0.5. All advantages are 1.
SAMPLED_FROM, OLD, NEW = (0.25, 0.2, 0.8), (0.5, 0.2, 0.2), (0.55, 0.3, 0.1)


@pytest.mark.parametrize(
    ("kind", "low", "cap", "expected"),
    [
        # Decoupled PPO with TIS: ratios against π_old, clipped at 1.2, times min(w, cap).
        ("token_truncate", 0.0, 1.5, (-1.1 * 1.5, -1.2 * 1.0, -0.5 * 0.25)),
        # The first two tokens are one episode with Πw = 2, the third one is another.
        ("sequence_truncate", 0.0, 1.5, (-1.1 * 1.5, -1.2 * 1.5, -0.5 * 0.25)),
        # IcePop: the third token is below the lower bound.
        ("token_mask", 0.5, 5.0, (-1.1 * 2.0, -1.2 * 1.0, 0.0)),
        ("sequence_mask", 0.5, 5.0, (-1.1 * 2.0, -1.2 * 2.0, 0.0)),
        ("sequence_geometric_mask", 0.5, 5.0, (-1.1 * math.sqrt(2), -1.2 * math.sqrt(2), 0.0)),
    ],
)
def test_the_corrected_loss_by_hand(kind: CorrectionKind, low: float, cap: float, expected: tuple[float, ...]) -> None:
    behavior_S, old_S, new_S = (torch.tensor(each).log() for each in (SAMPLED_FROM, OLD, NEW))
    tokens = PolicyTokens(
        logprobs_S=new_S, old_logprobs_S=old_S, advantages_S=torch.ones(3), sequence_S=torch.tensor([0, 0, 1]),
        num_sequences=2,
    )  # fmt: skip
    weights_S = importance_weights(old_S, behavior_S, tokens.sequence_S, 2, kind=kind, cap=cap, low=low)
    assert (clipped(tokens, clip_low=0.2, clip_high=0.2) * weights_S).tolist() == pytest.approx(expected)


def test_the_effective_sample_size_by_hand() -> None:
    # (1 + 2 + 0 + 1)² / (1 + 4 + 0 + 1) = 16 / 6 of 4.
    found = effective_sample_size(torch.tensor([1.0, 2.0, 0.0, 1.0]))
    assert found == EffectiveSampleSize(count=4.0, kept=3.0, sum=4.0, sum_squares=6.0)
    assert found.size == pytest.approx(8 / 3)
    assert found.share == pytest.approx(2 / 3)
    assert found.mean == 1.0
    assert found.dropped_fraction == 0.25


def test_equal_weights_are_worth_the_whole_sample() -> None:
    assert effective_sample_size(torch.full((10,), 0.3)).share == pytest.approx(1.0)


def test_nothing_and_nothing_kept_are_worth_nothing() -> None:
    assert effective_sample_size(torch.zeros(0)).share == 0.0
    assert effective_sample_size(torch.zeros(3)).share == 0.0
    assert effective_sample_size(torch.zeros(3)).dropped_fraction == 1.0


@given(first=st.lists(st.floats(0, 5, width=32), max_size=20), second=st.lists(st.floats(0, 5, width=32), max_size=20))
def test_shards_add_up_to_the_whole(first: list[float], second: list[float]) -> None:
    merged = effective_sample_size(torch.tensor(first)) + effective_sample_size(torch.tensor(second))
    whole = effective_sample_size(torch.tensor(first + second))
    assert merged.kept == whole.kept
    assert merged.share == pytest.approx(whole.share, rel=1e-9)
