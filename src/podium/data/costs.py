# SPDX-License-Identifier: Apache-2.0
"""Cost of a sequence by its length: work per token, and per pair of a query and a visible key."""

# N sequences

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """The attention layers that share one window."""

    window: int | None  # None: all earlier tokens are visible
    per_pair: float  # cost of one (query, visible key) pair, over all these layers


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCost:
    """Cost of computing one sequence. For splitting work, only ratios matter."""

    per_token: float
    attention: tuple[AttentionCost, ...] = ()

    @classmethod
    def plain(cls, *, linear: float, quadratic: float = 0.0) -> SequenceCost:
        """`linear * L + quadratic * L**2`."""
        if quadratic == 0:
            return cls(per_token=linear)
        # A causal layer has L * (L + 1) / 2 pairs: twice the weight for each, and the surplus L taken back.
        return cls(per_token=linear - quadratic, attention=(AttentionCost(window=None, per_pair=2 * quadratic),))

    def of(self, lengths_N: ArrayLike) -> NDArray[np.float64]:
        """The cost of each sequence."""
        sizes_N = np.asarray(lengths_N, np.float64)
        costs_N = self.per_token * sizes_N
        for kind in self.attention:
            costs_N += kind.per_pair * visible_pairs(sizes_N, kind.window)
        return costs_N


def visible_pairs(lengths_N: ArrayLike, window: int | None) -> NDArray[np.float64]:
    """Number of (query, visible key) pairs that causal attention has in each sequence."""
    sizes_N = np.asarray(lengths_N, np.float64)
    reach_N = sizes_N if window is None else np.minimum(sizes_N, window)
    # A triangle up to the window, then a band.
    return reach_N * (reach_N + 1) / 2 + (sizes_N - reach_N) * reach_N
