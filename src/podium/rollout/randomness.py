# SPDX-License-Identifier: Apache-2.0
"""The random stream of a request: one number for every position, from the request's own key and nothing else.

A counter-based generator: the number at a position does not depend on what was drawn before, in which order or with
whom. The same integers come out of torch on any device and out of NumPy.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.data.trajectories import TrajectoryId

_WORD = (1 << 64) - 1
# Odd constants with well mixed bits; the shifts are of the finaliser that goes with them (splitmix64).
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def stream_key(seed: int, id: TrajectoryId) -> int:
    """A 64-bit key of (seed, draw, sample, branch). The attempt is left out: another attempt draws the same."""
    key = 0
    for part in (seed, id.draw, id.sample, id.branch):
        key = _mixed((key + GOLDEN + part) & _WORD)
    return key


def uniforms(keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """Float64 in (0, 1) for each (key, position), both int64: 32 random bits each."""
    mixed = _mixed_tensor(keys_B + positions_B * signed(GOLDEN))
    return (_shifted(mixed, 32).double() + 0.5) * 2.0**-32


def uniforms_on_host(keys_B: NDArray[np.int64], positions_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """The same numbers without torch, which takes ten times as long for a few rows."""
    words = keys_B.view(np.uint64) + positions_B.view(np.uint64) * np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND)
    words = words ^ (words >> np.uint64(31))
    numbers: NDArray[np.float64] = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    return numbers


def signed(word: int) -> int:
    """The int64 with the same bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _mixed(word: int) -> int:
    word = ((word ^ (word >> 30)) * FIRST) & _WORD
    word = ((word ^ (word >> 27)) * SECOND) & _WORD
    return word ^ (word >> 31)


def _mixed_tensor(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 30)) * signed(FIRST)
    words = (words ^ _shifted(words, 27)) * signed(SECOND)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, by: int) -> Tensor:
    """Right by some bits, zeros from the left; torch's own shift of int64 copies the sign."""
    return torch.bitwise_and(words >> by, (1 << (64 - by)) - 1)
