# SPDX-License-Identifier: Apache-2.0
"""How evenly the routers of a mixture of experts spread tokens, from sums over a step. Torch-free."""

# L layers with a router · E experts

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Columns after the counts and the probabilities of all experts.
ENTROPY, MISMATCHED, REPLAYED = -3, -2, -1
NUM_OTHER_COLUMNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatistics:
    """Over the tokens of one optimizer step, of all ranks. All but the share of dead experts are means over layers."""

    max_load: float  # tokens of the busiest expert over those of an expert on average
    dead_experts: float  # share of experts that no token reached
    entropy: float  # of the router's distribution, in nats
    aux_loss: float  # the load-balancing loss; as many as experts per token if the load is even
    mismatch: float | None  # share of replayed choices that the router would not have made; None: nothing is replayed

    @classmethod
    def of(cls, sums_LC: NDArray[np.float64], num_tokens: float) -> RouterStatistics:
        """`sums_LC`: a layer's counts of tokens [E], sums of probabilities [E], and the other columns."""
        num_experts = (sums_LC.shape[1] - NUM_OTHER_COLUMNS) // 2
        counts_LE, probabilities_LE = sums_LC[:, :num_experts], sums_LC[:, num_experts : 2 * num_experts]
        tokens = max(num_tokens, 1.0)
        mean_L = np.maximum(counts_LE.mean(axis=1), 1e-9)
        replayed = float(sums_LC[:, REPLAYED].sum())
        return cls(
            max_load=float((counts_LE.max(axis=1) / mean_L).mean()),
            dead_experts=float((counts_LE == 0).mean()),
            entropy=float(sums_LC[:, ENTROPY].mean()) / tokens,
            aux_loss=float(num_experts * ((counts_LE / tokens) * (probabilities_LE / tokens)).sum(axis=1).mean()),
            mismatch=float(sums_LC[:, MISMATCHED].sum()) / replayed if replayed else None,
        )

    @classmethod
    def mean(cls, parts: Sequence[RouterStatistics]) -> RouterStatistics | None:
        """The mean over optimizer steps; None: there are none."""
        if not parts:
            return None
        replayed = [part.mismatch for part in parts if part.mismatch is not None]
        return cls(
            max_load=float(np.mean([part.max_load for part in parts])),
            dead_experts=float(np.mean([part.dead_experts for part in parts])),
            entropy=float(np.mean([part.entropy for part in parts])),
            aux_loss=float(np.mean([part.aux_loss for part in parts])),
            mismatch=float(np.mean(replayed)) if replayed else None,
        )

    def metrics(self) -> dict[str, float]:
        """The values as docs/metrics.md names them."""
        metrics = {
            "router/max_load": self.max_load,
            "router/dead_experts": self.dead_experts,
            "router/entropy": self.entropy,
            "router/aux_loss": self.aux_loss,
        }
        return metrics if self.mismatch is None else {**metrics, "router/mismatch": self.mismatch}
