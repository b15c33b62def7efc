# SPDX-License-Identifier: Apache-2.0
"""Documents of one optimizer step over ranks and micro-steps: nothing lost, limits kept, work even."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.data.costs import SequenceCost
from podium.data.splitting import split_step
from podium.errors import DataError

LENGTHS = st.lists(st.integers(1, 100), max_size=60)


def cost(linear=1.0, quadratic=0.0):
    return SequenceCost.plain(linear=linear, quadratic=quadratic)


def held(plan):
    return [index for rank in plan.micro_batches for batch in rank for index in batch]


@settings(deadline=None)
@given(
    LENGTHS, st.integers(1, 9), st.integers(100, 400), st.floats(0.1, 10), st.floats(0, 1), st.booleans()
)  # fmt: skip
def test_every_document_is_computed_once_in_equally_many_micro_steps(
    lengths, num_ranks, max_tokens, linear, quadratic, hard
):
    plan = split_step(
        lengths, num_ranks=num_ranks, max_tokens=max_tokens, cost=cost(linear, quadratic), hard_cap=hard
    )  # fmt: skip
    assert sorted(held(plan)) == list(range(len(lengths)))
    assert len(plan.micro_batches) == num_ranks
    assert {len(rank) for rank in plan.micro_batches} == {plan.num_micro_steps}
    assert plan.imbalance >= plan.lower_bound - 1e-9
    assert plan.lower_bound >= 1


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(100, 400), st.floats(0, 1))
def test_a_hard_limit_is_never_overstepped(lengths, num_ranks, max_tokens, quadratic):
    plan = split_step(lengths, num_ranks=num_ranks, max_tokens=max_tokens, cost=cost(1.0, quadratic), hard_cap=True)
    assert all(sum(lengths[index] for index in batch) <= max_tokens for rank in plan.micro_batches for batch in rank)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 400))
def test_a_soft_limit_sets_the_number_of_micro_steps(lengths, num_ranks, max_tokens):
    plan = split_step(lengths, num_ranks=num_ranks, max_tokens=max_tokens, hard_cap=False)
    assert plan.num_micro_steps == max(1, -(-sum(lengths) // (num_ranks * max_tokens)))


def test_a_soft_limit_that_cannot_be_kept_is_overstepped_as_little_as_even_tokens_need():
    # 12 tokens are two micro-batches of 6, but documents of 4 make 4 and 8 of them.
    plan = split_step([4, 4, 4], num_ranks=2, max_tokens=6, hard_cap=False)
    assert sorted(len(batch) for rank in plan.micro_batches for batch in rank) == [1, 2]


def test_a_full_step_that_fits_tightly_takes_no_more_micro_steps_than_it_must():
    # Four micro-batches of 10, filled to the last token: 6+4, 6+4, 5+5, 7+3.
    plan = split_step([6, 6, 7, 5, 5, 4, 4, 3], num_ranks=2, max_tokens=10, hard_cap=True)
    assert plan.num_micro_steps == 2
    assert plan.imbalance == pytest.approx(1.0)


def test_micro_steps_pair_like_with_like():
    # Two long and two short documents on two ranks: the long ones run together, or both ranks wait twice.
    plan = split_step([10, 2, 10, 2], num_ranks=2, max_tokens=10, hard_cap=True)
    assert plan.micro_batches == (((0,), (1,)), ((2,), (3,)))
    assert plan.imbalance == pytest.approx(1.0)


def test_imbalance_is_the_sum_of_the_slowest_over_even_work():
    # 3 and 1 token on two ranks: the slowest takes 3 where 2 would be even.
    assert split_step([3, 1], num_ranks=2, max_tokens=10).imbalance == pytest.approx(1.5)
    # With cost L + L*L: 12 and 2, even would be 7.
    assert split_step([3, 1], num_ranks=2, max_tokens=10, cost=cost(1.0, 1.0)).imbalance == pytest.approx(12 / 7)


def test_attention_cost_moves_short_documents_away_from_the_long_one():
    plan = split_step([8, 4, 4, 4, 4], num_ranks=2, max_tokens=100, cost=cost(1.0, 1.0), hard_cap=True)
    # 72 for the long one, 20 for each short one: the long one has company of none or one, never of two.
    alone = next(rank[0] for rank in plan.micro_batches if 0 in rank[0])
    assert alone == (0,)


def test_many_skewed_documents_are_spread_within_half_a_percent_of_even():
    lengths = [(37 * number * number) % 1900 + 20 for number in range(200)]
    plan = split_step(lengths, num_ranks=8, max_tokens=8192, cost=cost(1.0, 1e-4), hard_cap=True)
    assert plan.imbalance < 1.005


def test_one_rank_has_its_dearest_micro_batch_first():
    plan = split_step([2, 9, 3, 8, 2], num_ranks=1, max_tokens=12)
    sizes = [sum([2, 9, 3, 8, 2][index] for index in batch) for batch in plan.micro_batches[0]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 2


def test_no_documents_still_give_every_rank_one_empty_micro_step():
    assert split_step([], num_ranks=2, max_tokens=10).micro_batches == (((),), ((),))


def test_a_document_longer_than_a_hard_limit_is_an_error_that_names_both_keys():
    with pytest.raises(DataError, match=r"11 tokens.* 10\b.*data\.max_length.*micro_batch_tokens"):
        split_step([11], num_ranks=2, max_tokens=10, hard_cap=True)
    assert held(split_step([11], num_ranks=2, max_tokens=10, hard_cap=False)) == [0]
