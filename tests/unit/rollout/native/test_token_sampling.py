# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens: what narrows a draw by hand-computed shares, log-probs, broken logits, and the distribution."""

# B rows · V vocabulary

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from podium.rollout.native.sampling import LogitsProcessing, SampledTokens, sample
from podium.rollout.randomness import uniforms
from podium.rollout.requests import Sampling

HALVES = (0.5, 0.25, 0.125, 0.125)


def logits_of(probabilities: Any) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def sampled(
    logits_V: Tensor, marks: Any, *, seen: tuple[int, ...] = (), num_new: int = 0, temperature: float = 1.0, **how: Any
) -> SampledTokens:
    """One row for every uniform number, all alike."""
    marks_B = torch.as_tensor(marks, dtype=torch.float64)
    sampling = Sampling(max_new_tokens=9, temperature=temperature, **how)
    processings = [
        LogitsProcessing(row=row, sampling=sampling, tokens=np.array(seen, np.int32), num_new=num_new)
        for row in range(len(marks_B))
        if sampling.changes_the_policy
    ]
    logits_BV = logits_V.expand(len(marks_B), -1).clone()
    return sample(logits_BV, torch.full((len(marks_B),), temperature), marks_B, processings)


def shares(logits_V: Tensor, **how: Any) -> list[float]:
    """Of each token when the uniform numbers are the middles of 840 equal parts: exact where shares are 840ths."""
    marks = (np.arange(840) + 0.5) / 840
    counts = torch.bincount(sampled(logits_V, marks, **how).tokens_B, minlength=len(logits_V))
    return (counts / 840).tolist()


def test_tokens_are_sampled_in_their_shares() -> None:
    assert shares(logits_of(HALVES)) == pytest.approx(HALVES)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"top_k": 1}, (1, 0, 0, 0)),
        ({"top_k": 2}, (2 / 3, 1 / 3, 0, 0)),
        ({"top_k": 99}, HALVES),
        # The token that passes the share is still in.
        ({"top_p": 0.45}, (1, 0, 0, 0)),
        ({"top_p": 0.6}, (2 / 3, 1 / 3, 0, 0)),
        ({"top_p": 0.8}, (4 / 7, 2 / 7, 1 / 7, 0)),
        ({"top_p": 1e-9}, (1, 0, 0, 0)),
        # A share of the most likely token's 0.5.
        ({"min_p": 0.3}, (2 / 3, 1 / 3, 0, 0)),
        ({"min_p": 0.2}, HALVES),
        ({"min_p": 1.0}, (1, 0, 0, 0)),
        # Each of what the one before has left: of (4, 2, 1)/7 two are enough for 0.8.
        ({"top_k": 3, "top_p": 0.8}, (2 / 3, 1 / 3, 0, 0)),
        ({"top_k": 3, "min_p": 0.3}, (2 / 3, 1 / 3, 0, 0)),
        # 0.25 · 2 and 0.125 · 4 against 0.5 and 0.125, of 13/8.
        ({"logit_bias": {1: math.log(2), 2: math.log(4)}}, (4 / 13, 4 / 13, 4 / 13, 1 / 13)),
        ({"logit_bias": {0: -math.inf}}, (0, 1 / 2, 1 / 4, 1 / 4)),
        ({"allowed_tokens": frozenset([1, 3])}, (0, 2 / 3, 0, 1 / 3)),
        # The bias counts before the cut: token 3 becomes the most likely.
        ({"logit_bias": {3: math.log(16)}, "top_k": 2}, (1 / 5, 0, 0, 4 / 5)),
        ({"allowed_tokens": frozenset([2, 3]), "top_k": 1}, (0, 0, 1, 0)),
    ],
)
def test_truncated_sampling_leaves_these_shares(how: dict[str, Any], expected: tuple[float, ...]) -> None:
    """By frequency, and by the log-probs that are reported with the tokens."""
    assert shares(logits_of(HALVES), **how) == pytest.approx(expected, abs=1.5 / 840)
    found = sampled(logits_of(HALVES), [0.01, 0.4, 0.7, 0.95], **how)
    assert found.logprobs_B.exp().tolist() == pytest.approx([expected[token] for token in found.tokens_B.tolist()])


def test_a_penalty_divides_what_is_positive_and_multiplies_what_is_negative() -> None:
    logits_V = torch.tensor([2.0, -1.0, 1.0, 0.0])
    expected = torch.tensor([1.0, -2.0, 1.0, 0.0]).softmax(0)
    found = shares(logits_V, seen=(0, 1, 1, 0), repetition_penalty=2.0)
    assert found == pytest.approx(expected.tolist(), abs=1.5 / 840)


def test_stops_cannot_be_sampled_before_the_fewest_tokens() -> None:
    how: dict[str, Any] = {"stop_tokens": frozenset([0, 2]), "min_new_tokens": 2}
    assert shares(logits_of(HALVES), num_new=1, **how) == pytest.approx((0, 2 / 3, 0, 1 / 3))
    assert shares(logits_of(HALVES), num_new=2, **how) == pytest.approx(HALVES)


def test_temperature_comes_before_the_cuts_and_after_the_bias() -> None:
    """At temperature 1/2 probabilities are squared: (16, 4, 1, 1)/22; a bias of log 2 quadruples then."""
    assert shares(logits_of(HALVES), temperature=0.5) == pytest.approx((8 / 11, 2 / 11, 1 / 22, 1 / 22), abs=1.5 / 840)
    biased = shares(logits_of(HALVES), temperature=0.5, logit_bias={1: math.log(2)})
    assert biased == pytest.approx((16 / 34, 16 / 34, 1 / 34, 1 / 34), abs=1.5 / 840)
    assert shares(logits_of(HALVES), temperature=0.5, top_p=0.7) == [1, 0, 0, 0]
    assert shares(logits_of(HALVES), temperature=1.0, top_p=0.7)[1] > 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_are_of_the_whole_distribution_at_the_temperature(temperature: float) -> None:
    logits_V = torch.tensor([1.5, -0.5, 0.25, 3.0])
    found = sampled(logits_V, [0.1, 0.5, 0.9], temperature=temperature)
    expected = torch.log_softmax(logits_V / temperature, 0)[found.tokens_B]
    torch.testing.assert_close(found.logprobs_B, expected, atol=1e-6, rtol=0)


def test_a_truncated_token_is_as_likely_as_its_share_of_the_kept_mass() -> None:
    """At temperature 1/2 the shares are (16, 4, 1, 1)/22. Of top_p 0.8 the first two are left, 20/22 in all."""
    found = sampled(logits_of(HALVES), [0.5, 0.9], temperature=0.5, top_p=0.8)
    assert found.tokens_B.tolist() == [0, 1]
    assert found.logprobs_B.exp().tolist() == pytest.approx([16 / 20, 4 / 20])


def test_a_penalised_token_is_as_likely_as_the_penalty_leaves_it() -> None:
    found = sampled(torch.tensor([2.0, -1.0, 1.0, 0.0]), [0.001, 0.999], seen=(0, 1), repetition_penalty=2.0)
    expected = torch.tensor([1.0, -2.0, 1.0, 0.0]).log_softmax(0)
    assert found.tokens_B.tolist() == [0, 3]
    assert found.logprobs_B.tolist() == pytest.approx(expected[[0, 3]].tolist())


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.6]),
)
def test_truncated_log_probs_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits_BV = 2 * torch.randn(6, 200, generator=torch.Generator().manual_seed(seed))
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    warpers = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    if top_k:
        warpers.insert(1, TopKLogitsWarper(top_k))
    expected_BV = LogitsProcessorList(warpers)(None, logits_BV.clone()).log_softmax(-1)
    for row in range(6):
        found = sampled(logits_BV[row], np.linspace(0.01, 0.99, 9), **how)
        torch.testing.assert_close(found.logprobs_B, expected_BV[row][found.tokens_B], atol=1e-5, rtol=0)


def test_temperature_zero_takes_the_most_likely_and_reports_temperature_one() -> None:
    logits_V = logits_of((0.2, 0.5, 0.3))
    found = sampled(logits_V, [0.0, 0.5, 0.999], temperature=0.0)
    assert found.tokens_B.tolist() == [1, 1, 1]
    assert found.logprobs_B.exp().tolist() == pytest.approx([0.5] * 3)
    processed = sampled(logits_V, [0.999], temperature=0.0, logit_bias={1: -math.inf})
    assert (processed.tokens_B.item(), processed.logprobs_B.exp().item()) == (2, pytest.approx(0.3 / 0.5))


def test_truncation_changes_nothing_at_temperature_zero() -> None:
    found = sampled(logits_of((0.2, 0.5, 0.3)), [0.9], temperature=0.0, top_k=2, top_p=0.1, logit_bias={2: 0.0})
    assert (found.tokens_B.item(), found.logprobs_B.exp().item()) == (1, pytest.approx(0.5))


def test_rows_of_one_batch_are_sampled_independently() -> None:
    """Greedy, warm, narrowed and broken rows together give what each gives alone."""
    logits_BV = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    logits_BV[3, 7] = torch.nan
    temperatures_B = torch.tensor([0.0, 0.7, 1.3, 1.0])
    marks_B = torch.tensor([0.3, 0.6, 0.8, 0.5], dtype=torch.float64)
    sampling = Sampling(max_new_tokens=9, temperature=1.3, top_k=5)

    def narrowing(row: int) -> LogitsProcessing:
        return LogitsProcessing(row=row, sampling=sampling, tokens=np.empty(0, np.int32), num_new=0)

    together = sample(logits_BV.clone(), temperatures_B, marks_B, [narrowing(2)])
    for row in range(4):
        one = slice(row, row + 1)
        processings = [narrowing(0)] if row == 2 else []
        alone = sample(logits_BV[one].clone(), temperatures_B[one], marks_B[one], processings)
        assert torch.equal(together.logprobs_B[one], alone.logprobs_B) or row == 3
        assert together.tokens_B[row] == alone.tokens_B[0] or row == 3
    assert together.logprobs_B.isnan().tolist() == [False, False, False, True]


SIZES = [(0.0, 4), (0.0, 1500), (1.0, 4), (1.0, 1024), (1.0, 1500), (1.0, 4096)]


@pytest.mark.parametrize(("temperature", "size"), SIZES)
def test_logits_that_are_no_numbers_give_a_log_prob_that_is_none(temperature: float, size: int) -> None:
    for broken in (torch.full((size,), torch.nan), torch.zeros(size).index_fill_(0, torch.tensor([2]), torch.nan)):
        found = sampled(broken, [0.0, 0.5, 0.999], temperature=temperature)
        assert found.logprobs_B.isnan().all()
        assert (found.tokens_B < size).all()


@pytest.mark.parametrize(("temperature", "size"), SIZES)
def test_a_row_without_any_allowed_token_gives_no_log_prob(temperature: float, size: int) -> None:
    how: dict[str, Any] = {"allowed_tokens": frozenset([3]), "logit_bias": {3: -math.inf}}
    found = sampled(torch.zeros(size), [0.0, 0.5], temperature=temperature, **how)
    assert found.logprobs_B.isnan().all()
    assert (found.tokens_B < size).all()


def spread(probabilities_V: np.ndarray, count: int, *, bins: int) -> tuple[float, float]:
    """Chi-square of `count` draws of one stream each, in bins of neighbouring tokens; and how much is unlikely."""
    keys_B = torch.arange(count, dtype=torch.int64) * 7919
    marks_B = uniforms(keys_B, torch.full((count,), 5, dtype=torch.int64))
    tokens = sampled(logits_of(probabilities_V), marks_B).tokens_B.numpy()
    which = np.arange(len(probabilities_V)) * bins // len(probabilities_V)
    seen = np.bincount(which[tokens], minlength=bins)
    wanted = np.bincount(which, weights=probabilities_V, minlength=bins) * count
    return float(((seen - wanted) ** 2 / wanted).sum()), (bins - 1) + 4 * math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize(("size", "bins"), [(7, 7), (1024, 32), (1500, 50)])
def test_twenty_thousand_samples_have_the_distribution(size: int, bins: int) -> None:
    weights = np.random.default_rng(size).gamma(0.5, size=size) + 1e-3
    statistic, unlikely = spread(weights / weights.sum(), 20_000, bins=bins)
    assert statistic < unlikely


@settings(max_examples=60)
@given(
    size=st.sampled_from([5, 1023, 1024, 1025, 2500]),
    seed=st.integers(0, 10_000),
    density=st.sampled_from([0.002, 0.3, 1.0]),
    coarse=st.booleans(),
)
def test_a_token_of_probability_zero_is_never_sampled(size: int, seed: int, density: float, coarse: bool) -> None:
    """At the ends of the range, and on the very borders between tokens, where rounding decides."""
    rng = np.random.default_rng(seed)
    weights = np.where(rng.random(size) < density, rng.integers(1, 5, size) if coarse else rng.random(size), 0.0)
    weights[rng.integers(size)] = 1.0
    logits_V = logits_of(weights / weights.sum())
    exact = (logits_V - torch.logsumexp(logits_V, 0)).exp().double()
    borders = exact.cumsum(0).clamp(max=math.nextafter(1, 0))
    some = borders[torch.from_numpy(rng.integers(0, size, 40))]
    ends = torch.tensor([0.0, 5e-324, 2.0**-33, 1 - 2.0**-33, math.nextafter(1, 0)], dtype=torch.float64)
    found = sampled(logits_V, torch.cat([ends, some, torch.from_numpy(rng.random(20))]))
    assert (exact[found.tokens_B] > 0).all()
    assert found.logprobs_B.isfinite().all()


def test_a_token_of_probability_zero_is_not_sampled_at_the_border_of_two_stretches() -> None:
    """A vocabulary beyond 1024 tokens is summed in two levels. The first token of every stretch has no weight here."""
    logits_BV = torch.rand(600, 3072, generator=torch.Generator().manual_seed(0)).log()
    logits_BV[:, ::1024] = -math.inf
    exact_BV = (logits_BV - torch.logsumexp(logits_BV, dim=-1, keepdim=True)).exp()
    borders = exact_BV.view(600, 3, 1024).sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    for border in (0, 1):
        found = sample(logits_BV.clone(), torch.ones(600), borders[:, border])
        assert (exact_BV.gather(1, found.tokens_B[:, None]) > 0).all()
