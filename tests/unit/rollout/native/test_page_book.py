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

from podium.rollout.native.pages import Lease, PageBook, PageCopy, common_prefix


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def computed(book: PageBook, *tokens: int) -> Lease:
    """A sequence that has begun and whose tokens have all been computed."""
    lease = book.begin(ids(*tokens), len(tokens))
    assert lease is not None
    book.take_copies()
    book.remember(lease, ids(*tokens))
    return lease


def finished(book: PageBook, *tokens: int) -> list[int]:
    """The pages that a sequence had, which is over and remembered."""
    lease = computed(book, *tokens)
    pages = list(lease.pages)
    book.release(lease, ids(*tokens))
    return pages


PROMPT = tuple(range(10, 20))


def test_two_samples_of_one_prompt_hold_the_same_full_pages() -> None:
    book = PageBook(num_pages=8, page_tokens=4)
    first = computed(book, *PROMPT)
    second = book.begin(ids(*PROMPT), 10)
    assert second is not None
    assert first.pages == [0, 1, 2]
    assert second.pages == [0, 1, 3]
    assert [book.holders(page) for page in range(4)] == [2, 2, 2, 1]  # page 2 is pinned until it is copied
    assert second.reused == 9  # the last token must be fed for its logits
    assert book.take_copies() == [PageCopy(source=2, target=3, tokens=1)]
    assert [book.holders(page) for page in range(4)] == [2, 2, 1, 1]
    assert book.num_held == 4


def test_eight_samples_hold_the_full_pages_of_their_prompt_once() -> None:
    book = PageBook(num_pages=32, page_tokens=4)
    computed(book, *PROMPT)
    for _ in range(7):
        assert book.begin(ids(*PROMPT), 10) is not None
    book.take_copies()
    assert book.num_held == 2 + 8


def test_a_prompt_that_ends_with_a_full_page_still_feeds_its_last_token() -> None:
    """So that page cannot be shared: it is written again. Its beginning is copied."""
    book = PageBook(num_pages=4, page_tokens=4)
    computed(book, *PROMPT[:8])
    second = book.begin(ids(*PROMPT[:8]), 8)
    assert second is not None
    assert (second.pages, second.reused) == ([0, 2], 7)
    assert book.take_copies() == [PageCopy(source=1, target=2, tokens=3)]


def test_the_longest_unused_page_is_given_up_first() -> None:
    book = PageBook(num_pages=3, page_tokens=2)
    finished(book, 1, 2)
    finished(book, 3, 4)
    finished(book, 5, 6)
    assert (book.num_kept, book.num_available) == (3, 3)
    finished(book, 1, 2, 9)  # uses the first again, and takes the page of 3, 4
    assert book.common_with_remembered(ids(3, 4)) == 0
    assert book.common_with_remembered(ids(1, 2)) == 2
    assert book.common_with_remembered(ids(5, 6)) == 2


def test_the_end_of_a_sequence_is_given_up_before_its_beginning() -> None:
    book = PageBook(num_pages=3, page_tokens=2)
    finished(book, *range(6))
    computed(book, 7)
    assert book.common_with_remembered(ids(*range(6))) == 4
    computed(book, 8)
    assert book.common_with_remembered(ids(*range(6))) == 2


def test_what_is_held_is_never_given_up() -> None:
    book = PageBook(num_pages=2, page_tokens=2)
    held = computed(book, 1, 2)
    finished(book, 3, 4)
    assert book.begin(ids(5, 6, 7), 3) is None
    assert book.common_with_remembered(ids(3, 4)) == 2, "a refusal changes nothing"
    assert computed(book, 5, 6).pages == [1]
    assert held.pages == [0]


def test_a_sequence_that_goes_on_where_a_finished_one_ended_takes_its_page_over() -> None:
    """In slots this is every further turn of a conversation: nothing is copied."""
    book = PageBook(num_pages=2, page_tokens=64)
    (page,) = finished(book, 1, 2, 3, 4, 5)
    lease = book.begin(ids(1, 2, 3, 4, 5, 6, 7), 7)
    assert lease is not None
    assert (lease.pages, lease.reused, book.take_copies()) == ([page], 5, [])
    assert (book.num_kept, book.num_held) == (0, 1)


def test_a_page_that_ends_otherwise_is_copied_and_stays_remembered() -> None:
    book = PageBook(num_pages=2, page_tokens=64)
    (page,) = finished(book, 1, 2, 3, 4, 5)
    lease = book.begin(ids(1, 2, 3, 9), 4)
    assert lease is not None
    assert lease.reused == 3
    assert book.take_copies() == [PageCopy(source=page, target=lease.pages[0], tokens=3)]
    assert book.common_with_remembered(ids(1, 2, 3, 4, 5)) == 5


def test_the_last_page_there_is_is_taken_over_rather_than_computed_anew() -> None:
    book = PageBook(num_pages=1, page_tokens=64)
    finished(book, 1, 2, 3, 4, 5)
    lease = book.begin(ids(1, 2, 3, 9), 4)
    assert lease is not None
    assert (lease.pages, lease.reused, book.take_copies()) == ([0], 3, [])
    assert book.common_with_remembered(ids(1, 2, 3, 4, 5)) == 0


def test_a_page_that_somebody_still_writes_is_copied() -> None:
    book = PageBook(num_pages=2, page_tokens=64)
    computed(book, 1, 2, 3)
    second = book.begin(ids(1, 2, 3, 4), 4)
    assert second is not None
    assert (second.pages, second.reused) == ([1], 3)
    assert book.take_copies() == [PageCopy(source=0, target=1, tokens=3)]


def test_growing_takes_a_page_only_when_the_last_is_full() -> None:
    book = PageBook(num_pages=2, page_tokens=4)
    lease = computed(book, 1, 2, 3)
    assert book.grow(lease, 4)
    assert lease.pages == [0]
    assert book.grow(lease, 5)
    assert lease.pages == [0, 1]
    assert not book.grow(lease, 9)
    assert lease.pages == [0, 1]


def test_nothing_is_found_after_forgetting_and_what_is_held_stays_held() -> None:
    book = PageBook(num_pages=4, page_tokens=2)
    held = computed(book, 1, 2, 3)
    finished(book, 5, 6)
    book.forget()
    assert book.common_with_remembered(ids(1, 2, 3)) == 0
    assert book.common_with_remembered(ids(5, 6)) == 0
    assert (book.num_held, book.num_kept, book.num_available) == (2, 0, 2)
    book.release(held, None)
    assert book.num_available == 4


def test_a_book_that_does_not_remember_finds_nothing() -> None:
    book = PageBook(num_pages=4, page_tokens=2, remember=False)
    finished(book, 1, 2, 3)
    assert not book.remembers
    assert book.common_with_remembered(ids(1, 2, 3)) == 0
    assert book.num_available == 4


def test_a_lease_is_given_back_once_however_often_it_is_released() -> None:
    book = PageBook(num_pages=2, page_tokens=2)
    lease = computed(book, 1, 2)
    book.release(lease, None)
    book.release(lease, None)
    book.forget()
    assert book.num_available == 2
    assert not list(book.check())
    with pytest.raises(AssertionError, match="page 0 was given back twice"):
        book.release(Lease(pages=[0], reused=0), None)


def test_renamed_pages_are_found_under_their_new_names() -> None:
    book = PageBook(num_pages=3, page_tokens=8)
    finished(book, 1, 2, 3)
    held = computed(book, 7, 8)
    assert held.pages == [1]
    book.rename({0: 2, 2: 1, 1: 0}, [held])
    assert held.pages == [0]
    assert book.longest_remembered([0, 1]) == 2
    assert book.longest_remembered([2]) == 3
    lease = book.begin(ids(1, 2, 3, 4), 4)
    assert lease is not None
    assert (lease.pages, lease.reused) == ([2], 3)


@pytest.mark.parametrize(("left", "right", "shared"), [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2), (1, 3), 1)])
def test_the_common_prefix_is_counted(left: tuple[int, ...], right: tuple[int, ...], shared: int) -> None:
    assert common_prefix(ids(*left), ids(*right)) == shared


@dataclass(eq=False)
class Sequence:
    """One under way: `done` of its tokens are computed. `weights` is the version that the first of them came from."""

    lease: Lease
    tokens: list[int]
    done: int
    weights: int


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)


class PagesInUse(RuleBasedStateMachine):
    """Any schedule, with memory beside it: a position of a page holds what was written there, which is the whole
    beginning of the sequence that it was computed from and the version of the weights."""

    @initialize(page_tokens=st.sampled_from([1, 2, 3, 4, 8, 64]), num_pages=st.integers(1, 12))
    def open(self, page_tokens: int, num_pages: int) -> None:
        self.book = PageBook(num_pages, page_tokens)
        self.live: list[Sequence] = []
        self.memory: dict[tuple[int, int], Any] = {}
        self.weights = 0

    def at(self, lease: Lease, position: int) -> tuple[int, int]:
        return lease.pages[position // self.book.page_tokens], position % self.book.page_tokens

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
            before = self.book.num_available
            lease = self.book.begin(ids(*tokens), len(tokens))
            if lease is None:
                assert self.book.num_available == before
                continue
            assert lease.reused < len(tokens)
            assert len(lease.pages) == self.book.pages_for(len(tokens))
            begun.append(Sequence(lease, list(tokens), lease.reused, self.weights))
        self.copy()
        for sequence in begun:
            assert all(
                self.memory[self.at(sequence.lease, i)] == self.holds(sequence, i) for i in range(sequence.done)
            ), "reused content is not what this sequence would compute"
        self.live += begun

    def copy(self) -> None:
        copies = self.book.take_copies()
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
        pages, available = list(sequence.lease.pages), self.book.num_available
        if not self.book.grow(sequence.lease, until):
            assert sequence.lease.pages == pages
            assert self.book.num_available == available < self.book.pages_for(until) - len(pages)
            return
        for i in range(sequence.done, until):
            page, offset = self.at(sequence.lease, i)
            assert self.book.holders(page) == 1, "a page is written that another sequence holds"
            self.memory[page, offset] = self.holds(sequence, i)
        sequence.done = until
        if remember and sequence.weights == self.weights:
            self.book.remember(sequence.lease, ids(*sequence.tokens[:until]))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        worth = keep and sequence.weights == self.weights
        self.book.release(sequence.lease, ids(*sequence.tokens[: sequence.done]) if worth else None)
        assert sequence.lease.pages == []

    @rule()
    def forget(self) -> None:
        self.book.forget()
        self.weights += 1
        assert self.book.num_kept == 0

    @rule(data=st.data())
    def rename(self, data: st.DataObject) -> None:
        targets = data.draw(st.permutations(range(self.book.num_pages)))
        self.book.rename(dict(enumerate(targets)), [sequence.lease for sequence in self.live])
        self.memory = {(targets[page], i): value for (page, i), value in self.memory.items()}

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "book"):
            return
        assert list(self.book.check()) == []
        held = [page for sequence in self.live for page in sequence.lease.pages]
        assert self.book.num_held == len(set(held))
        assert self.book.num_held + self.book.num_available == self.book.num_pages
        assert all(self.book.holders(page) == held.count(page) for page in range(self.book.num_pages))

    @invariant()
    def nobody_has_written_into_what_another_holds(self) -> None:
        for sequence in getattr(self, "live", ()):
            for i in range(sequence.done):
                assert self.memory[self.at(sequence.lease, i)] == self.holds(sequence, i)

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for sequence in self.live:
            self.book.release(sequence.lease, None)
        self.book.forget()
        assert (self.book.num_available, self.book.num_held) == (self.book.num_pages, 0)
        assert list(self.book.check()) == []


TestPagesInUse = PagesInUse.TestCase
TestPagesInUse.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
