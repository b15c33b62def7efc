# SPDX-License-Identifier: Apache-2.0
"""The result of a reward for one episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class RewardResult(NamedTuple):
    """The result of a reward for one sample. With neither value nor failure, the reward does not apply to it."""

    value: float | None
    failure: str | None = None
    extras: Mapping[str, float] | None = None  # further numbers that came with its score
