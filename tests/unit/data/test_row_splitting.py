# SPDX-License-Identifier: Apache-2.0
"""Rows over ranks, mini-batches and micro-steps: nothing lost, groups together, and a plan that says how even it is."""

import re
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.data.costs import SequenceCost
from podium.data.splitting import split_rows
from podium.errors import DataError

ROOMY = 1 << 40


@dataclass(frozen=True)
class SplitCase:
    lengths: np.ndarray
    costs: np.ndarray
    mini_batch: np.ndarray
    group: np.ndarray | None
    num_ranks: int
    max_tokens: int

    def plan(self):
        return split_rows(
            self.lengths, self.costs, num_ranks=self.num_ranks, max_tokens=self.max_tokens,
            mini_batch_N=self.mini_batch, group_N=self.group,
        )  # fmt: skip


@st.composite
def tasks(draw, grouped=None):
    num = draw(st.integers(0, 80))
    lengths = np.array(draw(st.lists(st.integers(1, 100), min_size=num, max_size=num)), np.int64)
    if draw(st.booleans()):
        costs = SequenceCost.plain(linear=1.0, quadratic=draw(st.floats(0, 1))).of(lengths)
    else:  # costs that have nothing to do with lengths
        costs = np.array(draw(st.lists(st.floats(0, 50), min_size=num, max_size=num)))
    mini_batch = np.array(draw(st.lists(st.integers(0, 3), min_size=num, max_size=num)), np.int64)
    group = None
    if draw(st.booleans()) if grouped is None else grouped:
        group = np.array(draw(st.lists(st.integers(-2, 12), min_size=num, max_size=num)), np.int64)
    # Now and then more ranks than the bins from which on many rows are placed at a time.
    num_ranks = draw(st.integers(1, 9) | st.integers(60, 80))
    return SplitCase(lengths, costs, mini_batch, group, num_ranks, draw(st.integers(100, 300)))


def slowest(costs, plan):
    """The sum over micro-steps of the slowest rank, from what `rows` hands out."""
    ranks = [[costs[part].sum() for mini in plan.rows(rank) for part in mini] for rank in range(plan.num_ranks)]
    return np.array(ranks).max(axis=0).sum()


@settings(max_examples=50, deadline=None)
@given(tasks())
def test_nothing_is_lost_duplicated_or_reordered(task):
    plan = task.plan()
    parts = [part for rank in range(task.num_ranks) for mini in plan.rows(rank) for part in mini]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(task.lengths)))
    assert all((np.diff(part) > 0).all() for part in parts)


@settings(max_examples=50, deadline=None)
@given(tasks())
def test_all_ranks_have_equally_many_micro_steps_and_none_is_over_the_limit(task):
    plan = task.plan()
    assert len(plan.micro_steps_B) == task.mini_batch.max(initial=0) + 1
    for rank in range(task.num_ranks):
        rows = plan.rows(rank)
        assert tuple(len(mini) for mini in rows) == plan.micro_steps_B
        assert all(task.lengths[part].sum() <= task.max_tokens for mini in rows for part in mini)


@settings(max_examples=50, deadline=None)
@given(tasks())
def test_rows_stay_in_their_mini_batch_and_say_where_they_are(task):
    plan = task.plan()
    for rank in range(task.num_ranks):
        for number, mini in enumerate(plan.rows(rank)):
            for step, part in enumerate(mini):
                assert (task.mini_batch[part] == number).all()
                assert (plan.rank_N[part] == rank).all()
                assert (plan.micro_step_N[part] == step).all()


@settings(max_examples=50, deadline=None)
@given(tasks(grouped=True))
def test_a_group_has_one_rank_in_each_mini_batch(task):
    plan = task.plan()
    places = {}
    for row, rank in enumerate(plan.rank_N.tolist()):
        places.setdefault((task.mini_batch[row], task.group[row]), set()).add(rank)
    assert all(len(ranks) == 1 for ranks in places.values())


@settings(max_examples=50, deadline=None)
@given(tasks())
def test_the_stated_imbalance_is_the_true_one_and_no_better_than_the_bound(task):
    plan = task.plan()
    even = task.costs.sum() / task.num_ranks
    assert plan.imbalance == pytest.approx(slowest(task.costs, plan) / even if even > 0 else 1.0)
    assert plan.imbalance >= plan.lower_bound * (1 - 1e-9)
    assert plan.lower_bound >= 1
    assert plan.over_bound == pytest.approx(plan.imbalance / plan.lower_bound)


@settings(max_examples=50, deadline=None)
@given(tasks())
def test_the_same_rows_give_the_same_plan(task):
    first, second = task.plan(), task.plan()
    assert (first.rank_N == second.rank_N).all()
    assert (first.micro_step_N == second.micro_step_N).all()
    assert str(first) == str(second)


@settings(max_examples=50, deadline=None)
@given(tasks(grouped=False), st.randoms(use_true_random=False))
def test_the_order_in_which_rows_come_does_not_matter(task, random):
    order = list(range(len(task.lengths)))
    random.shuffle(order)
    shuffled = SplitCase(
        task.lengths[order], task.costs[order], task.mini_batch[order], None, task.num_ranks, task.max_tokens
    )
    assert shuffled.plan().imbalance == pytest.approx(task.plan().imbalance)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 3), st.booleans())
def test_no_plan_of_a_few_rows_beats_the_bound(lengths, num_ranks, tight):
    """Every way to put the rows into as many micro-steps as there are rows."""
    lengths = np.array(lengths)
    costs = SequenceCost.plain(linear=1.0, quadratic=0.5).of(lengths)
    cap = int(lengths.max()) if tight else 1000
    plan = split_rows(lengths, costs, num_ranks=num_ranks, max_tokens=cap)
    even = costs.sum() / num_ranks
    assert best_of_all(lengths, costs, num_ranks, cap) / even >= plan.lower_bound * (1 - 1e-9)


def best_of_all(lengths, costs, num_ranks, cap):
    """The least sum of the slowest, by trying all: micro-steps are sets of rows that the ranks can hold."""
    num = len(lengths)
    of_level = [float("inf")] * (1 << num)  # the slowest rank, with these rows in one micro-step
    of_level[0] = 0.0
    one_bin = [
        costs[rows(bits)].sum() if lengths[rows(bits)].sum() <= cap else float("inf") for bits in range(1 << num)
    ]
    level = one_bin
    for _ in range(num_ranks - 1):
        level = [min(max(level[bits ^ part], one_bin[part]) for part in parts(bits)) for bits in range(1 << num)]
    best = [0.0] + [float("inf")] * ((1 << num) - 1)
    for bits in range(1, 1 << num):
        best[bits] = min(best[bits ^ part] + level[part] for part in parts(bits) if part)
    return best[-1]


def rows(bits):
    return [row for row in range(bits.bit_length()) if bits >> row & 1]


def parts(bits):
    part = bits
    while part:
        yield part
        part = (part - 1) & bits
    yield 0


def test_swaps_that_even_out_the_work_keep_to_the_limit():
    # Cheap rows are long and dear ones short, so that evening out work moves tokens the other way, swap after swap.
    random = np.random.default_rng(3)
    lengths = random.integers(1, 40, 600)
    costs = (41 - lengths) ** 2 + random.random(600) * 300
    plan = split_rows(lengths, costs, num_ranks=8, max_tokens=1600)
    assert all(lengths[part].sum() <= 1600 for rank in range(8) for part in plan.rows(rank)[0])


def test_each_mini_batch_is_even_for_itself():
    # 3+1 and 2+2 in the first update, 5 and 5 in the second: 4 + 5 on both ranks.
    lengths = np.array([3, 5, 2, 1, 5, 2])
    plan = split_rows(lengths, lengths, num_ranks=2, max_tokens=10, mini_batch_N=[0, 1, 0, 0, 1, 0])
    assert plan.micro_batches == (((0, 3), (1,)), ((2, 5), (4,)))
    assert plan.imbalance == pytest.approx(1.0)


def test_groups_stay_together_where_rows_alone_would_be_more_even():
    # Groups of 6+2 and 1+1: 8 against 2. Without groups 6 against 2+1+1.
    lengths = np.array([6, 1, 2, 1])
    together = split_rows(lengths, lengths, num_ranks=2, max_tokens=10, group_N=[7, 3, 7, 3])
    assert together.micro_batches == (((0, 2),), ((1, 3),))
    assert together.imbalance == together.lower_bound == pytest.approx(8 / 5)
    assert re.search("group.* 8 tokens", together.bound.reason)
    alone = split_rows(lengths, lengths, num_ranks=2, max_tokens=10)
    assert alone.imbalance == alone.lower_bound == pytest.approx(6 / 5)


def test_a_group_longer_than_the_limit_takes_several_micro_steps_of_its_rank():
    lengths = np.array([6, 6, 6, 5])
    plan = split_rows(lengths, lengths, num_ranks=2, max_tokens=10, group_N=[0, 0, 0, 1])
    assert plan.micro_steps_B == (3,)
    assert len(set(plan.rank_N[:3].tolist())) == 1
    assert sorted(plan.micro_step_N[:3].tolist()) == [0, 1, 2]


def test_a_micro_step_that_one_row_makes_slow_is_filled_on_the_other_rank():
    # 10 against 5+5 in the first micro-step, 3 against 3 in the second: nobody waits.
    lengths = np.array([10, 5, 5, 3, 3])
    plan = split_rows(lengths, lengths, num_ranks=2, max_tokens=10)
    assert plan.micro_steps_B == (2,)
    assert plan.imbalance == pytest.approx(1.0)


def test_the_bound_is_the_dearest_row_where_it_is_more_than_an_even_share():
    plan = split_rows([9, 1, 1, 1], [9.0, 1.0, 1.0, 1.0], num_ranks=2, max_tokens=20)
    assert plan.lower_bound == plan.imbalance == pytest.approx(9 / 6)
    assert plan.over_bound == pytest.approx(1.0)
    assert re.search(r"row.* 9 tokens.*1\.50x.*mini-batch 0", plan.bound.reason)


def test_the_bound_knows_that_one_of_two_ranks_has_two_of_three_rows():
    plan = split_rows([4, 4, 4], [4.0, 4.0, 4.0], num_ranks=2, max_tokens=20)
    assert plan.lower_bound == plan.imbalance == pytest.approx(8 / 6)
    assert re.search(r"3 rows.*rank.* 2\b", plan.bound.reason)


def test_the_bound_knows_what_the_limit_keeps_from_a_slow_micro_step():
    # Cost L*L: 100 for the row of 10. The other rank can hold 10 tokens meanwhile, at most 5 rows of 2, which cost 20;
    # the other 5 rows cost 20 more, 10 on each rank at best: 110 where even work would be 70.
    lengths = np.array([10] + [2] * 10)
    plan = split_rows(lengths, lengths.astype(float) ** 2, num_ranks=2, max_tokens=10)
    assert plan.lower_bound == pytest.approx(110 / 70)
    assert plan.imbalance == pytest.approx(112 / 70)  # of 5 rows one rank has 3
    assert re.search("micro-steps.* 10 tokens", plan.bound.reason)


def test_ranks_without_rows_have_empty_micro_batches():
    plan = split_rows([5], [5.0], num_ranks=3, max_tokens=8)
    assert sorted(len(plan.rows(rank)[0][0]) for rank in range(3)) == [0, 0, 1]
    assert plan.imbalance == plan.lower_bound == pytest.approx(3.0)


def test_a_mini_batch_without_rows_is_one_empty_micro_step():
    plan = split_rows([4, 4], [1.0, 1.0], num_ranks=2, max_tokens=8, mini_batch_N=[0, 2])
    assert plan.micro_steps_B == (1, 1, 1)
    assert all(len(part) == 0 for rank in range(2) for part in plan.rows(rank)[1])


def test_rows_that_cost_nothing_are_still_placed():
    plan = split_rows([4, 4, 4], [0.0, 0.0, 0.0], num_ranks=2, max_tokens=4)
    assert plan.imbalance == plan.lower_bound == 1.0
    assert plan.micro_steps_B == (2,)


def test_a_row_longer_than_the_limit_is_an_error_with_the_fix():
    with pytest.raises(DataError, match=r"12 tokens.* 10\b.*data\.max_length.*micro_batch_tokens"):
        split_rows([3, 12], [1.0, 1.0], num_ranks=2, max_tokens=10)


def test_a_plan_prints_what_it_is():
    plan = split_rows([9, 1, 1, 1], [9.0, 1.0, 1.0, 1.0], num_ranks=2, max_tokens=1024)
    assert str(plan).splitlines() == [
        "ranks       2",
        "rows        4; 1 to 3 a rank",
        "tokens      12; 3 to 9 a rank, 3 to 9 a micro-batch (limit 1,024)",
        "micro-steps 1",
        "imbalance   1.5000 times even work, 1.0000 times the bound",
        f"bound       1.5000, since {plan.bound.reason}",
    ]


def long_tailed(num, seed=0):
    """Log-normal, mean about 2000, at most 32768."""
    lengths = np.random.default_rng(seed).lognormal(np.log(2000) - 0.5, 1.0, num)
    return np.clip(lengths, 1, 32768).astype(np.int64)


@pytest.mark.parametrize("quadratic", [0.0, 1 / 24576])
@pytest.mark.parametrize(("num", "num_ranks", "mini_batches"), [(1024, 8, 1), (1024, 64, 4), (8192, 64, 4)])
def test_with_room_a_plan_is_within_a_thousandth_of_the_bound(num, num_ranks, mini_batches, quadratic):
    lengths = long_tailed(num)
    costs = SequenceCost.plain(linear=1.0, quadratic=quadratic).of(lengths)
    mini_batch = np.arange(num) * mini_batches // num
    plan = split_rows(lengths, costs, num_ranks=num_ranks, max_tokens=ROOMY, mini_batch_N=mini_batch)
    assert plan.over_bound < 1.001


def test_a_limit_that_is_roomy_costs_less_than_a_thousandth_too():
    lengths = long_tailed(2048)
    costs = SequenceCost.plain(linear=24576.0, quadratic=1.0).of(lengths)
    plan = split_rows(lengths, costs, num_ranks=16, max_tokens=65536)
    assert plan.micro_steps_B == (-(-int(lengths.sum()) // (16 * 65536)),)
    assert plan.over_bound < 1.001


def test_a_hundred_thousand_rows_on_512_ranks_take_less_than_seconds():
    lengths = long_tailed(102_400)
    costs = SequenceCost.plain(linear=24576.0, quadratic=1.0).of(lengths)
    began = time.process_time()
    plan = split_rows(lengths, costs, num_ranks=512, max_tokens=ROOMY)
    assert time.process_time() - began < 2.0
    assert plan.over_bound < 1.001
