# SPDX-License-Identifier: Apache-2.0
"""The order of rows: deterministic, mixed by weight, shuffled, and resumable without reading what came before."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.data.rows import Row
from podium.data.stream import MixedStream, SourcePosition, StreamPosition
from podium.errors import DataError


class ListSource:
    """Blocks of numbers; remembers which blocks were read."""

    def __init__(self, name, *blocks):
        self.name = name
        self.blocks = blocks
        self.read = []

    @property
    def num_blocks(self):
        return len(self.blocks)

    def read_block(self, index):
        self.read.append(index)
        return [Row({"number": number}, f"{self.name}, row {number}") for number in self.blocks[index]]

    def fingerprint(self):
        return self.name


def stream(*sources, weights=None, seed=0, shuffle=True, shuffle_rows=100, position=None):
    return MixedStream(
        sources,
        weights or [1.0] * len(sources),
        seed=seed,
        shuffle=shuffle,
        shuffle_rows=shuffle_rows,
        position=position,
    )


def numbers(mixed, count):
    return [mixed.draw().row.values["number"] for _ in range(count)]


def test_without_shuffling_a_source_is_read_in_order_again_and_again():
    mixed = stream(ListSource("a", [1, 2], [], [3]), shuffle=False)
    sampled = [mixed.draw() for _ in range(7)]
    assert [one.row.values["number"] for one in sampled] == [1, 2, 3, 1, 2, 3, 1]
    assert [one.epoch for one in sampled] == [0, 0, 0, 1, 1, 1, 2]


def test_every_epoch_has_every_row_once_in_another_order():
    mixed = stream(ListSource("a", range(10), range(10, 20), range(20, 30)))
    first, second = numbers(mixed, 30), numbers(mixed, 30)
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second != list(range(30))


def test_the_seed_decides_the_order():
    source = ListSource("a", range(20))
    assert numbers(stream(source, seed=1), 40) == numbers(stream(source, seed=1), 40)
    assert numbers(stream(source, seed=1), 40) != numbers(stream(source, seed=2), 40)


def test_two_sources_with_the_same_rows_are_shuffled_differently():
    sampled = [stream(ListSource("a", range(20)), ListSource("b", range(20))).draw() for _ in range(1)]
    assert sampled[0].source in (0, 1)
    mixed = stream(ListSource("a", range(20)), ListSource("b", range(20)))
    by_source = {0: [], 1: []}
    for _ in range(200):
        one = mixed.draw()
        by_source[one.source].append(one.row.values["number"])
    assert by_source[0][:20] != by_source[1][:20]


def test_pools_are_of_the_size_requested_so_large_files_stream():
    source = ListSource("a", *[range(start, start + 10) for start in range(0, 100, 10)])
    mixed = stream(source, shuffle_rows=25)
    mixed.draw()
    assert len(source.read) == 3  # three blocks of ten make a pool of at least 25
    pool = sorted(number for block in source.read for number in source.blocks[block])
    assert sorted([*numbers(mixed, 29)]) != pool  # one of the thirty was drawn before
    assert len(source.read) == 3
    mixed.draw()
    assert len(source.read) == 6


def test_sources_are_mixed_by_weight():
    mixed = stream(ListSource("a", [1]), ListSource("b", [2]), ListSource("c", [3]), weights=[6.0, 3.0, 1.0])
    sampled = numbers(mixed, 10_000)
    # Standard deviation of a share of 0.6 over 10,000 draws: 0.005.
    assert [round(sampled.count(number) / 10_000, 1) for number in (1, 2, 3)] == [0.6, 0.3, 0.1]


def test_which_source_a_row_comes_from_depends_on_its_number_alone():
    sources = (ListSource("a", range(3)), ListSource("b", range(7)))
    begin = [stream(*sources).draw().source]
    whole = stream(*sources)
    choices = [whole.draw().source for _ in range(50)]
    later = stream(*sources, position=StreamPosition(draw=20, sources=(SourcePosition(), SourcePosition())))
    assert choices[:1] == begin
    assert [later.draw().source for _ in range(30)] == choices[20:]


@given(
    blocks=st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=6).filter(any),
    other=st.lists(st.integers(0, 99), min_size=1, max_size=5),
    shuffle=st.booleans(),
    shuffle_rows=st.integers(1, 12),
    cut=st.integers(0, 40),
)
def test_a_stream_continues_from_any_saved_position(blocks, other, shuffle, shuffle_rows, cut):
    def new(position=None):
        sources = (ListSource("a", *blocks), ListSource("b", other))
        return stream(*sources, shuffle=shuffle, shuffle_rows=shuffle_rows, position=position)

    unbroken = new()
    numbers(unbroken, cut)
    assert numbers(new(unbroken.position), 40) == numbers(unbroken, 40)


def test_resuming_reads_only_the_pool_that_it_stands_in():
    blocks = [range(start, start + 10) for start in range(0, 100, 10)]
    before = stream(ListSource("a", *blocks), shuffle_rows=10)
    numbers(before, 75)
    source = ListSource("a", *blocks)
    numbers(stream(source, shuffle_rows=10, position=before.position), 1)
    assert len(source.read) == 1


def test_the_position_is_a_few_numbers():
    mixed = stream(ListSource("a", [1, 2]), ListSource("b", [3]))
    numbers(mixed, 5)
    position = mixed.position
    assert position.draw == 5
    assert json.dumps([[one.epoch, one.block, one.row] for one in position.sources])


def test_a_source_whose_blocks_are_all_empty_is_an_error_and_not_a_loop():
    with pytest.raises(DataError, match=r"^blank "):
        stream(ListSource("blank", [], [], [])).draw()


def test_a_position_of_other_sources_is_refused():
    one = stream(ListSource("a", [1])).position
    with pytest.raises(DataError, match=r" 1 sources.* 2\b"):
        stream(ListSource("a", [1]), ListSource("b", [2]), position=one)
