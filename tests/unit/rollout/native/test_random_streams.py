# SPDX-License-Identifier: Apache-2.0
"""A request's random numbers: fixed values, no dependence on company or attempt, and uniform."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.data.splitmix import signed
from podium.data.trajectories import TrajectoryId
from podium.rollout.randomness import stream_key, uniforms, uniforms_on_host

WORD = 1 << 64


def splitmix(state: int) -> int:
    """The generator's output function in unbounded integers, written down again."""
    z = state % WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def expected(key: int, position: int) -> float:
    return ((splitmix(key + position * 0x9E3779B97F4A7C15) >> 32) + 0.5) / 2**32


def found(key: int, position: int) -> float:
    return uniforms(torch.tensor([signed(key)]), torch.tensor([position])).item()


def test_key_zero_gives_the_published_sequence_of_the_generator() -> None:
    """The first outputs of splitmix64 from seed 0, upper halves."""
    assert [found(0, position) for position in (1, 2, 3)] == [
        (upper + 0.5) / 2**32 for upper in (0xE220A839, 0x6E789E6A, 0x06C45D18)
    ]


@given(st.integers(0, WORD - 1), st.integers(0, 2**40))
def test_torch_computes_the_same_integers_as_unbounded_arithmetic(key: int, position: int) -> None:
    assert found(key, position) == expected(key, position)


@given(st.integers(-(2**63), 2**64 - 1), st.tuples(*[st.integers(0, 2**40)] * 3))
def test_a_key_mixes_seed_prompt_index_sample_and_branch(seed: int, id: tuple[int, int, int]) -> None:
    key = 0
    for part in (seed, *id):
        key = splitmix(key + 0x9E3779B97F4A7C15 + part)
    assert stream_key(seed, TrajectoryId(*id)) == key


def test_company_and_order_change_nothing() -> None:
    keys_B = torch.tensor([signed(stream_key(0, TrajectoryId(i, 0))) for i in range(100)])
    positions_B = torch.arange(100) * 3
    together = uniforms(keys_B, positions_B)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniforms(keys_B[order], positions_B[order]), together[order])
    alone = [uniforms(keys_B[i : i + 1], positions_B[i : i + 1]).item() for i in range(100)]
    assert together.tolist() == alone


def test_another_attempt_has_the_same_stream_and_nothing_else_has() -> None:
    first = stream_key(3, TrajectoryId(5, 6, 7, attempt=0))
    assert stream_key(3, TrajectoryId(5, 6, 7, attempt=9)) == first
    others = [
        (4, TrajectoryId(5, 6, 7)),
        (3, TrajectoryId(6, 5, 7)),
        (3, TrajectoryId(5, 7, 6)),
        (3, TrajectoryId(5, 6)),
    ]
    assert len({first, *(stream_key(seed, id) for seed, id in others)}) == 5


def table() -> np.ndarray:
    """[samples, positions]: neighbours in everything that keys a stream."""
    keys = [signed(stream_key(0, TrajectoryId(draw, sample))) for draw in range(20) for sample in range(10)]
    keys_B = torch.tensor(keys).repeat_interleave(200)
    return uniforms(keys_B, torch.arange(200).repeat(len(keys))).reshape(len(keys), 200).numpy()


def test_numbers_lie_inside_the_unit_interval_and_fill_it_evenly() -> None:
    """40,000 numbers in 100 bins: chi-square of 99 degrees stays below 99 + 4 · sqrt(198)."""
    numbers = table()
    assert ((numbers > 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) > 39_990  # 32 bits: some 0.2 pairs are expected
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 99 + 4 * 198**0.5


@pytest.mark.parametrize("axis", [0, 1])
def test_neighbouring_samples_and_positions_are_uncorrelated(axis: int) -> None:
    numbers = table() - 0.5
    left, right = (numbers[:-1], numbers[1:]) if axis == 0 else (numbers[:, :-1], numbers[:, 1:])
    assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / numbers.size**0.5


def test_the_ends_of_the_interval_are_never_reached() -> None:
    """The integers 0 and 2^32 - 1 stand for half a step inside."""
    assert (0 + 0.5) * 2.0**-32 > 0
    assert (2**32 - 1 + 0.5) * 2.0**-32 < 1


def test_numpy_and_torch_give_the_same_random_numbers() -> None:
    keys = np.array([signed(stream_key(seed, TrajectoryId(seed, 3))) for seed in range(500)])
    positions = np.arange(500) * 7919
    assert (
        uniforms(torch.from_numpy(keys), torch.from_numpy(positions)).numpy() == uniforms_on_host(keys, positions)
    ).all()
