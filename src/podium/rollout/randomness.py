# SPDX-License-Identifier: Apache-2.0
"""The random stream of a request: one number for every position, from the request's own key and nothing else.

A counter-based generator: the number at a position does not depend on other positions, on their order or on other
requests. torch on any device and NumPy give the same integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from podium.data.splitmix import GAMMA, mix, mix_array, mix_tensor, shifted_right, signed
from podium.data.trajectories import TrajectoryId


def stream_key(seed: int, id: TrajectoryId) -> int:
    """A 64-bit key of (seed, prompt index, sample, branch). The attempt is left out, so that a retry has the same
    key."""
    key = 0
    for part in (seed, id.prompt_index, id.sample, id.branch):
        key = mix(key + GAMMA + part)
    return key


def uniforms(keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """Float64 in (0, 1) for each (key, position), both int64: 32 random bits each."""
    words = mix_tensor(keys_B + positions_B * signed(GAMMA))
    return (shifted_right(words, 32).double() + 0.5) * 2.0**-32


def uniforms_on_host(keys_B: NDArray[np.int64], positions_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """The same numbers without torch, which takes ten times as long for a few rows."""
    words = mix_array(keys_B.view(np.uint64) + positions_B.view(np.uint64) * np.uint64(GAMMA))
    numbers: NDArray[np.float64] = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    return numbers
