# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: the same from any sharding, other ones for any change, and exactly what their definition says."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from podium.models.tensor_shards import Box
from podium.weights import fingerprints
from podium.weights.fingerprints import (
    BLOCK,
    Piece,
    fingerprint,
    partial_fingerprint,
    piece_fingerprint,
    piece_fingerprints,
    unsigned,
)

WRAP = 1 << 64


def mixed(value: int) -> int:
    """splitmix64's finaliser in Python's own integers."""
    value = (value + 1) * 0x9E3779B97F4A7C15 % WRAP
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % WRAP
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % WRAP
    return value ^ (value >> 31)


def weight(index: int) -> int:
    return (mixed(index % BLOCK) | 1) * (mixed(index // BLOCK + 0x51ED270B9A5F1C3D) | 1)


def by_hand(values: list[float], first: int = 0) -> int:
    """From the definition, for float32."""
    bits = [struct.unpack("<i", struct.pack("<f", value))[0] for value in values]
    return sum(each * weight(first + at) for at, each in enumerate(bits)) % WRAP


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_it_is_the_sum_of_bits_times_weights() -> None:
    values = [1.0, -2.5, 0.0, -0.0, 3e-9, float("inf")]
    assert fingerprint(torch.tensor(values)) == by_hand(values)
    assert fingerprint(torch.zeros(4)) == 0


def test_a_part_is_weighed_by_its_place_in_the_whole_across_blocks_too() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    first = 3 * BLOCK - 2
    found = partial_fingerprint(torch.tensor(values), first=first, dtype=torch.float32)
    assert unsigned(found.reshape(1)) == [by_hand(values, first)]


def test_many_blocks_and_chunks_add_up_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_tensor(2 * BLOCK + 77)
    wanted = fingerprint(values)
    monkeypatch.setattr(fingerprints, "_CHUNK", 50_001)
    assert fingerprint(values) == wanted


@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 7),
    padding=st.integers(0, 5),
    ranks=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_shards_of_any_number_of_ranks_add_up_to_the_whole_without_padding(
    rows: int, width: int, padding: int, ranks: int, dtype: torch.dtype
) -> None:
    padded = random_tensor(rows + padding, width)
    wanted = fingerprint(padded[:rows].to(dtype))
    each = -(-(rows + padding) // ranks)
    total = torch.zeros((), dtype=torch.int64)
    for rank in range(ranks):
        start, stop = min(rank * each, rows + padding), min((rank + 1) * each, rows + padding)
        box = Box((start, 0), (stop, width))
        total += piece_fingerprint(padded[start:stop], box, (rows, width), dtype)
    assert unsigned(total.reshape(1)) == [wanted]


def test_many_pieces_have_the_fingerprints_of_each_alone_and_none_counts_as_zero() -> None:
    masters = random_tensor(12, 7)
    pieces = [
        Piece.of_rows(masters[3:9], Box((3, 0), (9, 7)), (8, 7), torch.bfloat16),  # the last row is padding
        None,
        Piece.of_rows(masters[8:], Box((8, 0), (12, 7)), (8, 7), torch.bfloat16),  # nothing but padding
        Piece.of_rows(masters[0, 0], Box((), ()), (), torch.float32),
    ]
    alone = partial_fingerprint(masters[3:8].bfloat16(), first=21, dtype=torch.bfloat16)
    scalar = partial_fingerprint(masters[0, :1], first=0, dtype=torch.float32)
    assert piece_fingerprints(pieces, torch.device("cpu")).tolist() == [int(alone), 0, 0, int(scalar)]


@given(cuts=st.sets(st.integers(1, 999), max_size=8), order=st.randoms())
def test_parts_of_a_vector_add_up_in_any_order(cuts: set[int], order: object) -> None:
    values = random_tensor(1000)
    parts = list(pairwise([0, *sorted(cuts), 1000]))
    order.shuffle(parts)  # type: ignore[attr-defined]
    total = sum(partial_fingerprint(values[a:b], first=a, dtype=torch.float32) for a, b in parts)
    assert isinstance(total, Tensor)
    assert unsigned(total.reshape(1)) == [fingerprint(values)]


@given(at=st.integers(0, 99), bit=st.integers(0, 31))
def test_one_flipped_bit_is_always_seen(at: int, bit: int) -> None:
    values = random_tensor(100)
    wanted = fingerprint(values)
    flipped = values.view(torch.int32).clone()
    flipped[at] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert fingerprint(flipped.view(torch.float32)) != wanted


def test_exchanged_elements_rows_signs_and_blocks_are_seen() -> None:
    values = random_tensor(6, 8)
    moved = [values.flip(0), values.flip(1), values.roll(1, 0), values.T.reshape(6, 8), -values, values + 0.0 * 1e-9]
    assert [fingerprint(each) == fingerprint(values) for each in moved] == [False] * 5 + [True]
    assert fingerprint(torch.tensor([0.0, -0.0])) != fingerprint(torch.tensor([-0.0, 0.0]))
    two_blocks = random_tensor(2 * BLOCK)
    assert fingerprint(two_blocks.roll(BLOCK)) != fingerprint(two_blocks)


def test_every_nan_is_bits_like_any_other() -> None:
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert fingerprint(quiet) == fingerprint(quiet.clone())
    assert fingerprint(quiet) != fingerprint(other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_all_dtypes_and_shapes_have_one(dtype: torch.dtype) -> None:
    values = torch.arange(24).to(dtype)
    found = {fingerprint(values.reshape(shape)) for shape in ((24,), (2, 12), (2, 3, 4))}
    assert len(found) == 1
    assert 0 < next(iter(found)) < WRAP
    assert fingerprint(torch.ones((), dtype=dtype)) > 0
    assert fingerprint(torch.empty(0, 3).to(dtype)) == 0
