# SPDX-License-Identifier: Apache-2.0
"""splitmix64 against the published outputs, and its three forms against each other."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.data.splitmix import GAMMA, WORD, mix, mix_array, mix_tensor, shifted_right, signed

# The first outputs of the reference implementation (splitmix64.c) for two seeds.
PUBLISHED = {
    0: (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F),
    1234567: (6457827717110365317, 3203168211198807973, 9817491932198370423),
}


@pytest.mark.parametrize("seed", PUBLISHED)
def test_the_outputs_are_the_published_ones(seed):
    assert tuple(mix(seed + n * GAMMA) for n in (1, 2, 3)) == PUBLISHED[seed]


@given(st.lists(st.integers(0, WORD), min_size=1, max_size=20))
def test_arrays_and_tensors_hold_the_same_bits_as_integers(words):
    expected = [mix(word) for word in words]
    assert mix_array(np.array(words, np.uint64)).tolist() == expected
    tensor = mix_tensor(torch.tensor([signed(word) for word in words]))
    assert [value & WORD for value in tensor.tolist()] == expected


@given(st.integers(0, WORD), st.integers(1, 63))
def test_a_shift_of_a_tensor_fills_with_zeros(word, by):
    assert shifted_right(torch.tensor([signed(word)]), by).item() == word >> by


def test_signed_keeps_the_bits():
    assert [signed(word) for word in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 2**63 - 1, -(2**63), -1]
