# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes as a tree: every document is a path of it, and it is used only where that pays."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.prefixes import ALWAYS
from podium.data.costs import AttentionCost, SequenceCost
from podium.data.prefixes import PrefixCost, PrefixTree, prefix_tree

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


def packed(texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    return np.concatenate([np.array(text, np.int32) for text in texts]), offsets


def tree_of(texts: list[list[int]], least_saved: int = 1) -> PrefixTree:
    return prefix_tree(*packed(texts), least_saved=least_saved)


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, least_saved=st.integers(1, 6))
def test_every_document_is_a_path_of_segments(texts: list[list[int]], least_saved: int) -> None:
    tokens_T, offsets = packed(texts)
    tree = prefix_tree(tokens_T, offsets, least_saved=least_saved)
    tokens_U = tokens_T[tree.first_U]
    assert (tokens_U[tree.place_T] == tokens_T).all()
    segment_U = np.repeat(np.arange(len(tree.parents_G)), tree.lengths_G)
    position_U = np.arange(tree.num_tokens) - tree.offsets_G[segment_U] + tree.starts_G[segment_U]
    for start, stop in pairwise(offsets):
        places = tree.place_T[start:stop]
        assert position_U[places].tolist() == list(range(stop - start))
        path = list(dict.fromkeys(segment_U[places].tolist()))
        assert [tree.parents_G[segment] for segment in path] == [-1, *path[:-1]]


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS)
def test_a_tree_without_a_threshold_has_each_prefix_once(texts: list[list[int]]) -> None:
    prefixes = {tuple(text[:length]) for text in texts for length in range(1, len(text) + 1)}
    assert tree_of(texts).num_tokens == len(prefixes)


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, least_saved=st.integers(1, 6))
def test_all_that_continues_a_segment_follows_it_without_a_gap(texts: list[list[int]], least_saved: int) -> None:
    tree = tree_of(texts, least_saved)
    for segment in range(len(tree.parents_G)):
        below = {segment}
        for other in range(len(tree.parents_G)):
            if tree.parents_G[other] in below:
                below.add(other)
        assert sorted(below) == list(range(segment, max(below) + 1))
        assert tree.ends_G[segment] == tree.offsets_G[max(below) + 1]


def test_prefixes_that_save_too_little_are_computed_again() -> None:
    texts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 9]]
    assert tree_of(texts).num_tokens == 7  # 1 | 2 3 4 | 5, 6, 9
    shared = tree_of(texts, least_saved=3)  # the first token alone saves 1 of it and 1 of the last document
    assert shared.num_tokens == 8
    assert shared.lengths_G[shared.inner].tolist() == [4]
    assert tree_of(texts, least_saved=5).num_tokens == 12


def test_documents_that_continue_each_other_are_one_path() -> None:
    tree = tree_of([[7] * length for length in range(1, 300)])
    assert tree.num_tokens == 299


GROUP = [[5] * 40 + [6, number] for number in range(4)]


@pytest.mark.parametrize(("per_segment", "pays"), [(0.0, True), (100.0, True), (130.0, False)])
def test_a_group_shares_its_prompt_if_more_is_saved_than_a_segment_costs(per_segment: float, pays: bool) -> None:
    """Four documents of 42 tokens: 168 with them apart, 41 + 4 in the tree."""
    cost = PrefixCost(sequence=SequenceCost(per_token=1.0), per_segment=per_segment)
    assert (cost.share(*packed(GROUP)) is not None) == pays


@pytest.mark.parametrize(("per_query", "pays"), [(0.0, True), (20.0, True), (35.0, False)])
def test_merging_counts_for_every_token_that_continues_a_segment(per_query: float, pays: bool) -> None:
    cost = PrefixCost(sequence=SequenceCost(per_token=1.0), per_segment=0.0, per_query=per_query)
    assert (cost.share(*packed(GROUP)) is not None) == pays


def test_less_than_a_twentieth_is_not_worth_another_order_of_sums() -> None:
    long = [[number] * 60 for number in range(10, 20)]
    assert ALWAYS.share(*packed([*long, [1] * 31, [1] * 32])) is None  # 31 of 663 tokens
    assert ALWAYS.share(*packed([*long, [1] * 40, [1] * 40])) is not None


def test_documents_that_share_nothing_have_no_tree() -> None:
    assert ALWAYS.share(*packed([[1, 2], [2, 2], [3]])) is None
    assert ALWAYS.share(*packed([[1, 2]])) is None


def test_attention_of_a_continued_segment_costs_what_its_queries_see() -> None:
    """Only attention: two documents of 10 tokens that share 8 have 55 pairs each, and 36 + 19 + 19 together."""
    cost = PrefixCost(
        sequence=SequenceCost(per_token=0.0, attention=(AttentionCost(window=None, per_pair=1.0),)), per_segment=30.0
    )
    texts = [[5] * 8 + [1, 1], [5] * 8 + [2, 2]]
    assert cost.share(*packed(texts)) is not None  # 74 + 30 <= 0.95 * 110
    dearer = PrefixCost(sequence=cost.sequence, per_segment=31.0)
    assert dearer.share(*packed(texts)) is None
