# SPDX-License-Identifier: Apache-2.0
"""Rows with one prompt stay in one micro-batch where that is faster, within the limit of tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.data.costs import SequenceCost
from podium.data.prefix_splitting import share_in_micro_batches
from podium.data.prefixes import PrefixCost, RowPrefixes
from podium.data.splitting import SplitPlan, split_rows
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds

COST = PrefixCost(sequence=SequenceCost(per_token=1.0), per_segment=4.0)


def prefixes_of(groups: int, size: int, prompt: int) -> RowPrefixes:
    return RowPrefixes(
        tokens_N=np.full(groups * size, prompt, np.int64), key_N=np.repeat(np.arange(groups, dtype=np.int64) - 3, size)
    )


def plans(
    lengths: np.ndarray, prefixes: RowPrefixes, *, ranks: int, limit: int, cost: PrefixCost = COST
) -> tuple[SplitPlan, SplitPlan]:
    plain = split_rows(lengths, lengths.astype(float), num_ranks=ranks, max_tokens=limit)
    return plain, share_in_micro_batches(plain, lengths.astype(float), prefixes, cost)


def micro_batch_of(plan: SplitPlan) -> list[tuple[int, int, int]]:
    return list(zip(plan.rank_N.tolist(), plan.mini_batch_N.tolist(), plan.micro_step_N.tolist(), strict=True))


def test_groups_stay_together_and_need_fewer_micro_steps() -> None:
    """Eight groups of four rows with prompts of 90 tokens and answers of 10: 400 tokens a group, 130 computed."""
    lengths = np.full(32, 100)
    plain, shared = plans(lengths, prefixes_of(8, 4, 90), ranks=2, limit=400)
    assert plain.num_micro_steps == 4
    assert shared.num_micro_steps == 2
    places = micro_batch_of(shared)
    assert all(len(set(places[row : row + 4])) == 1 for row in range(0, 32, 4))
    assert shared.imbalance == 1.0  # two groups in each micro-batch
    assert (shared.lengths_N == lengths).all()


def test_short_prompts_are_split_as_before() -> None:
    plain, shared = plans(np.full(32, 100), prefixes_of(8, 4, 2), ranks=2, limit=400)
    assert shared is plain


def test_groups_that_would_leave_ranks_idle_are_split_as_before() -> None:
    """Two groups of eight rows and four ranks: apart, each rank has four rows of 100 tokens."""
    prefixes = prefixes_of(2, 8, 30)
    plain, shared = plans(np.full(16, 100), prefixes, ranks=4, limit=4000)
    assert shared is plain
    assert plans(np.full(16, 100), prefixes_of(2, 8, 90), ranks=4, limit=4000)[1] is not plain


def test_a_group_that_does_not_fit_is_cut_into_parts_that_share() -> None:
    """Prompts of 80 and answers of 20: a limit of 160 tokens holds one prompt and four answers."""
    _, shared = plans(np.full(8, 100), prefixes_of(1, 8, 80), ranks=1, limit=160)
    assert shared.num_micro_steps == 2
    assert np.bincount(shared.micro_step_N).tolist() == [4, 4]


def test_where_attention_copies_keys_each_row_counts_its_prompt() -> None:
    copying = PrefixCost(sequence=COST.sequence, per_segment=4.0, copies_keys=True)
    _, shared = plans(np.full(8, 100), prefixes_of(1, 8, 80), ranks=1, limit=200, cost=copying)
    assert shared.num_micro_steps == 4


@settings(max_examples=100, deadline=None)
@given(
    answers=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    prompt=st.integers(0, 60),
    ranks=st.integers(1, 3),
    room=st.integers(0, 200),
)
def test_every_row_is_in_a_micro_batch_within_the_limit(answers: list[int], prompt: int, ranks: int, room: int) -> None:
    lengths = np.array(answers) + prompt
    key_N = (np.arange(len(lengths)) // 4).astype(np.int64)
    prefixes = RowPrefixes(tokens_N=np.full(len(lengths), prompt, np.int64), key_N=key_N)
    limit = int(lengths.max()) + room
    _, shared = plans(lengths, prefixes, ranks=ranks, limit=limit)
    seen: list[int] = []
    for rank in range(ranks):
        for (mini_batch,) in [shared.rows(rank)]:
            for rows in mini_batch:
                repeated = sum(prompt * (count - 1) for count in np.bincount(key_N[rows]).tolist() if count > 1)
                assert lengths[rows].sum() - repeated <= limit
                seen += rows.tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_rows_with_the_same_tokens_before_their_first_sampled_one_have_one_key() -> None:
    """Rows 0 and 1 have one prompt; 2 has another token, 3 another length; 4 is not sampled, 5 has no prompt."""
    rows = [([1, 2], [8]), ([1, 2], [9, 9]), ([1, 3], [8]), ([1], [2, 8]), ([1, 2], []), ([], [4])]
    block = TrajectoryBlock(
        ids=TrajectoryIds.of(TrajectoryId(row, 0) for row in range(len(rows))),
        offsets=np.cumsum([0, *(len(prompt) + len(answer) for prompt, answer in rows)]).astype(np.int64),
        tokens_T=np.array([token for prompt, answer in rows for token in prompt + answer], np.int32),
        loss_mask_T=np.array([at for p, a in rows for at in [False] * len(p) + [True] * len(a)]),
        behavior_logprobs_T=np.zeros(sum(len(p) + len(a) for p, a in rows), np.float32),
        versions_T=np.array([at for p, a in rows for at in [-1] * len(p) + [0] * len(a)], np.int32),
    )
    found = RowPrefixes.of(block)
    assert found.tokens_N.tolist() == [2, 2, 2, 1, 0, 0]
    assert found.key_N[0] == found.key_N[1]
    assert len(set(found.key_N[[0, 2, 3]].tolist())) == 3
    joined = RowPrefixes.concatenate([found.take(np.array([2])), found])
    assert joined is not None
    assert joined.key_N[0] == joined.key_N[3]
    assert RowPrefixes.concatenate([found, None]) is None
