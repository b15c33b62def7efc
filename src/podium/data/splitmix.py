# SPDX-License-Identifier: Apache-2.0
"""splitmix64: a 64-bit hash for counters, with the same bits from Python integers, NumPy and torch on any device.

`mix(seed + n * GAMMA)` is the n-th output of the generator that starts from `seed` (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

WORD = (1 << 64) - 1
# The published constants: the step of the counter (2^64 over the golden ratio) and the two multipliers of the mix.
GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(word: int) -> int:
    """The hash of one integer, modulo 2^64."""
    word &= WORD
    word = ((word ^ (word >> 30)) * _FIRST) & WORD
    word = ((word ^ (word >> 27)) * _SECOND) & WORD
    return word ^ (word >> 31)


def mix_array(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same for each element."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    return words ^ (words >> np.uint64(31))


def mix_tensor(words: Tensor) -> Tensor:
    """The same for each element of an int64 tensor, whose arithmetic wraps around."""
    words = (words ^ shifted_right(words, 30)) * signed(_FIRST)
    words = (words ^ shifted_right(words, 27)) * signed(_SECOND)
    return words ^ shifted_right(words, 31)


def shifted_right(words: Tensor, by: int) -> Tensor:
    """Shifts in zeros from the left; torch's own shift of int64 copies the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def signed(word: int) -> int:
    """The int64 with the same bits."""
    return word - (1 << 64) if word >= 1 << 63 else word
