# SPDX-License-Identifier: Apache-2.0
"""The book of the cache's pages: what it promises by hand-computed values, and what must hold in any schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_steps import inconsistencies

from podium.rollout.native.block_manager import BlockCopy, BlockManager, BlockTable, common_prefix


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def computed(block_manager: BlockManager, *tokens: int) -> BlockTable:
    """A sequence that has begun and whose tokens have all been computed."""
    block_table = block_manager.begin(ids(*tokens), len(tokens))
    assert block_table is not None
    block_manager.take_copies()
    block_manager.remember(block_table, ids(*tokens))
    return block_table


def finished(block_manager: BlockManager, *tokens: int) -> list[int]:
    """The pages that a sequence had, which is over and remembered."""
    block_table = computed(block_manager, *tokens)
    blocks = list(block_table.blocks)
    block_manager.release(block_table, ids(*tokens))
    return blocks


PROMPT = tuple(range(10, 20))


def test_two_samples_of_one_prompt_hold_the_same_full_pages() -> None:
    block_manager = BlockManager(num_blocks=8, block_size=4)
    first = computed(block_manager, *PROMPT)
    second = block_manager.begin(ids(*PROMPT), 10)
    assert second is not None
    assert first.blocks == [0, 1, 2]
    assert second.blocks == [0, 1, 3]
    assert [block_manager._holders[block] for block in range(4)] == [2, 2, 2, 1]  # page 2 is pinned until it is copied
    assert second.reused == 9  # the last token must be fed for its logits
    assert block_manager.take_copies() == [BlockCopy(source=2, target=3, tokens=1)]
    assert [block_manager._holders[block] for block in range(4)] == [2, 2, 1, 1]
    assert block_manager.num_held == 4


def test_eight_samples_hold_the_full_pages_of_their_prompt_once() -> None:
    block_manager = BlockManager(num_blocks=32, block_size=4)
    computed(block_manager, *PROMPT)
    for _ in range(7):
        assert block_manager.begin(ids(*PROMPT), 10) is not None
    block_manager.take_copies()
    assert block_manager.num_held == 2 + 8


def test_a_prompt_that_ends_with_a_full_page_still_feeds_its_last_token() -> None:
    """So that page cannot be shared: it is written again. Its beginning is copied."""
    block_manager = BlockManager(num_blocks=4, block_size=4)
    computed(block_manager, *PROMPT[:8])
    second = block_manager.begin(ids(*PROMPT[:8]), 8)
    assert second is not None
    assert (second.blocks, second.reused) == ([0, 2], 7)
    assert block_manager.take_copies() == [BlockCopy(source=1, target=2, tokens=3)]


def test_the_longest_unused_page_is_given_up_first() -> None:
    block_manager = BlockManager(num_blocks=3, block_size=2)
    finished(block_manager, 1, 2)
    finished(block_manager, 3, 4)
    finished(block_manager, 5, 6)
    assert (block_manager.num_kept, block_manager.num_available) == (3, 3)
    finished(block_manager, 1, 2, 9)  # uses the first again, and takes the page of 3, 4
    assert block_manager.common_with_remembered(ids(3, 4)) == 0
    assert block_manager.common_with_remembered(ids(1, 2)) == 2
    assert block_manager.common_with_remembered(ids(5, 6)) == 2


def test_the_end_of_a_sequence_is_given_up_before_its_beginning() -> None:
    block_manager = BlockManager(num_blocks=3, block_size=2)
    finished(block_manager, *range(6))
    computed(block_manager, 7)
    assert block_manager.common_with_remembered(ids(*range(6))) == 4
    computed(block_manager, 8)
    assert block_manager.common_with_remembered(ids(*range(6))) == 2


def test_what_is_held_is_never_given_up() -> None:
    block_manager = BlockManager(num_blocks=2, block_size=2)
    held = computed(block_manager, 1, 2)
    finished(block_manager, 3, 4)
    assert block_manager.begin(ids(5, 6, 7), 3) is None
    assert block_manager.common_with_remembered(ids(3, 4)) == 2, "a refusal changes nothing"
    assert computed(block_manager, 5, 6).blocks == [1]
    assert held.blocks == [0]


def test_a_sequence_that_continues_a_finished_one_takes_its_block_over() -> None:
    """In slots this is every further turn of a conversation: nothing is copied."""
    block_manager = BlockManager(num_blocks=2, block_size=64)
    (block,) = finished(block_manager, 1, 2, 3, 4, 5)
    block_table = block_manager.begin(ids(1, 2, 3, 4, 5, 6, 7), 7)
    assert block_table is not None
    assert (block_table.blocks, block_table.reused, block_manager.take_copies()) == ([block], 5, [])
    assert (block_manager.num_kept, block_manager.num_held) == (0, 1)


def test_a_page_that_ends_otherwise_is_copied_and_stays_remembered() -> None:
    block_manager = BlockManager(num_blocks=2, block_size=64)
    (block,) = finished(block_manager, 1, 2, 3, 4, 5)
    block_table = block_manager.begin(ids(1, 2, 3, 9), 4)
    assert block_table is not None
    assert block_table.reused == 3
    assert block_manager.take_copies() == [BlockCopy(source=block, target=block_table.blocks[0], tokens=3)]
    assert block_manager.common_with_remembered(ids(1, 2, 3, 4, 5)) == 5


def test_the_last_page_there_is_is_taken_over_rather_than_computed_anew() -> None:
    block_manager = BlockManager(num_blocks=1, block_size=64)
    finished(block_manager, 1, 2, 3, 4, 5)
    block_table = block_manager.begin(ids(1, 2, 3, 9), 4)
    assert block_table is not None
    assert (block_table.blocks, block_table.reused, block_manager.take_copies()) == ([0], 3, [])
    assert block_manager.common_with_remembered(ids(1, 2, 3, 4, 5)) == 0


def test_a_page_that_somebody_still_writes_is_copied() -> None:
    block_manager = BlockManager(num_blocks=2, block_size=64)
    computed(block_manager, 1, 2, 3)
    second = block_manager.begin(ids(1, 2, 3, 4), 4)
    assert second is not None
    assert (second.blocks, second.reused) == ([1], 3)
    assert block_manager.take_copies() == [BlockCopy(source=0, target=1, tokens=3)]


def test_growing_takes_a_page_only_when_the_last_is_full() -> None:
    block_manager = BlockManager(num_blocks=2, block_size=4)
    block_table = computed(block_manager, 1, 2, 3)
    assert block_manager.grow(block_table, 4)
    assert block_table.blocks == [0]
    assert block_manager.grow(block_table, 5)
    assert block_table.blocks == [0, 1]
    assert not block_manager.grow(block_table, 9)
    assert block_table.blocks == [0, 1]


def test_nothing_is_found_after_forgetting_and_what_is_held_stays_held() -> None:
    block_manager = BlockManager(num_blocks=4, block_size=2)
    held = computed(block_manager, 1, 2, 3)
    finished(block_manager, 5, 6)
    block_manager.forget()
    assert block_manager.common_with_remembered(ids(1, 2, 3)) == 0
    assert block_manager.common_with_remembered(ids(5, 6)) == 0
    assert (block_manager.num_held, block_manager.num_kept, block_manager.num_available) == (2, 0, 2)
    block_manager.release(held, None)
    assert block_manager.num_available == 4


def test_a_book_that_does_not_remember_finds_nothing() -> None:
    block_manager = BlockManager(num_blocks=4, block_size=2, remember=False)
    finished(block_manager, 1, 2, 3)
    assert not block_manager.remembers
    assert block_manager.common_with_remembered(ids(1, 2, 3)) == 0
    assert block_manager.num_available == 4


def test_a_lease_is_given_back_once_however_often_it_is_released() -> None:
    block_manager = BlockManager(num_blocks=2, block_size=2)
    block_table = computed(block_manager, 1, 2)
    block_manager.release(block_table, None)
    block_manager.release(block_table, None)
    block_manager.forget()
    assert block_manager.num_available == 2
    assert not list(inconsistencies(block_manager))
    with pytest.raises(AssertionError, match="page 0"):
        block_manager.release(BlockTable(blocks=[0], reused=0), None)


def test_renamed_pages_are_found_under_their_new_names() -> None:
    block_manager = BlockManager(num_blocks=3, block_size=8)
    finished(block_manager, 1, 2, 3)
    held = computed(block_manager, 7, 8)
    assert held.blocks == [1]
    block_manager.rename({0: 2, 2: 1, 1: 0}, [held])
    assert held.blocks == [0]
    assert block_manager.longest_remembered([0, 1]) == 2
    assert block_manager.longest_remembered([2]) == 3
    block_table = block_manager.begin(ids(1, 2, 3, 4), 4)
    assert block_table is not None
    assert (block_table.blocks, block_table.reused) == ([2], 3)


@pytest.mark.parametrize(("left", "right", "shared"), [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2), (1, 3), 1)])
def test_the_common_prefix_is_counted(left: tuple[int, ...], right: tuple[int, ...], shared: int) -> None:
    assert common_prefix(ids(*left), ids(*right)) == shared


@dataclass(eq=False)
class Sequence:
    """One under way: `done` of its tokens are computed. `weights` is the version that the first of them came from."""

    block_table: BlockTable
    tokens: list[int]
    done: int
    weights: int


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)


class PagesInUse(RuleBasedStateMachine):
    """Any schedule, with memory beside it: a position of a page holds what was written there, which is the whole
    beginning of the sequence that it was computed from and the version of the weights."""

    @initialize(block_size=st.sampled_from([1, 2, 3, 4, 8, 64]), num_blocks=st.integers(1, 12))
    def open(self, block_size: int, num_blocks: int) -> None:
        self.block_manager = BlockManager(num_blocks, block_size)
        self.live: list[Sequence] = []
        self.memory: dict[tuple[int, int], Any] = {}
        self.weights = 0

    def at(self, block_table: BlockTable, position: int) -> tuple[int, int]:
        return block_table.blocks[position // self.block_manager.block_size], position % self.block_manager.block_size

    def holds(self, sequence: Sequence, position: int) -> tuple[int, tuple[int, ...]]:
        return sequence.weights, tuple(sequence.tokens[: position + 1])

    @rule(prompts=st.lists(TOKENS, min_size=1, max_size=3), again=st.integers(0, 3), data=st.data())
    def begin(self, prompts: list[list[int]], again: int, data: st.DataObject) -> None:
        """Some begin in one step; some of them with what a sequence under way holds."""
        if self.live:
            like = data.draw(st.sampled_from(self.live))
            prompts = [like.tokens + tail[:2] for tail in prompts[:again]] + prompts[again:]
        begun = []
        for tokens in prompts:
            before = self.block_manager.num_available
            block_table = self.block_manager.begin(ids(*tokens), len(tokens))
            if block_table is None:
                assert self.block_manager.num_available == before
                continue
            assert block_table.reused < len(tokens)
            assert len(block_table.blocks) == self.block_manager.blocks_for(len(tokens))
            begun.append(Sequence(block_table, list(tokens), block_table.reused, self.weights))
        self.copy()
        for sequence in begun:
            assert all(
                self.memory[self.at(sequence.block_table, i)] == self.holds(sequence, i) for i in range(sequence.done)
            ), "reused content is not what this sequence would compute"
        self.live += begun

    def copy(self) -> None:
        copies = self.block_manager.take_copies()
        assert not {copy.source for copy in copies} & {copy.target for copy in copies}
        for copy in copies:
            for i in range(copy.tokens):
                self.memory[copy.target, i] = self.memory[copy.source, i]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(1, 6), token=st.integers(0, 2), remember=st.booleans())
    def feed(self, data: st.DataObject, more: int, token: int, remember: bool) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.done == len(sequence.tokens):
            sequence.tokens.append(token)
        until = min(len(sequence.tokens), sequence.done + more)
        blocks, available = list(sequence.block_table.blocks), self.block_manager.num_available
        if not self.block_manager.grow(sequence.block_table, until):
            assert sequence.block_table.blocks == blocks
            assert self.block_manager.num_available == available < self.block_manager.blocks_for(until) - len(blocks)
            return
        for i in range(sequence.done, until):
            block, offset = self.at(sequence.block_table, i)
            assert self.block_manager._holders[block] == 1, "a page is written that another sequence holds"
            self.memory[block, offset] = self.holds(sequence, i)
        sequence.done = until
        if remember and sequence.weights == self.weights:
            self.block_manager.remember(sequence.block_table, ids(*sequence.tokens[:until]))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        worth = keep and sequence.weights == self.weights
        self.block_manager.release(sequence.block_table, ids(*sequence.tokens[: sequence.done]) if worth else None)
        assert sequence.block_table.blocks == []

    @rule()
    def forget(self) -> None:
        self.block_manager.forget()
        self.weights += 1
        assert self.block_manager.num_kept == 0

    @rule(data=st.data())
    def rename(self, data: st.DataObject) -> None:
        targets = data.draw(st.permutations(range(self.block_manager.num_blocks)))
        self.block_manager.rename(dict(enumerate(targets)), [sequence.block_table for sequence in self.live])
        self.memory = {(targets[block], i): value for (block, i), value in self.memory.items()}

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "block_manager"):
            return
        assert list(inconsistencies(self.block_manager)) == []
        held = [block for sequence in self.live for block in sequence.block_table.blocks]
        assert self.block_manager.num_held == len(set(held))
        assert self.block_manager.num_held + self.block_manager.num_available == self.block_manager.num_blocks
        assert all(
            self.block_manager._holders[block] == held.count(block) for block in range(self.block_manager.num_blocks)
        )

    @invariant()
    def nobody_has_written_into_what_another_holds(self) -> None:
        for sequence in getattr(self, "live", ()):
            for i in range(sequence.done):
                assert self.memory[self.at(sequence.block_table, i)] == self.holds(sequence, i)

    def teardown(self) -> None:
        if not hasattr(self, "block_manager"):
            return
        for sequence in self.live:
            self.block_manager.release(sequence.block_table, None)
        self.block_manager.forget()
        assert (self.block_manager.num_available, self.block_manager.num_held) == (self.block_manager.num_blocks, 0)
        assert list(inconsistencies(self.block_manager)) == []


TestPagesInUse = PagesInUse.TestCase
TestPagesInUse.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
