# SPDX-License-Identifier: Apache-2.0
"""How a layer attends, beside its queries, keys and values."""

# H query heads

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec:
    """What transformers' attention signature says of one layer."""

    scaling: float | None = None  # None: by the width of a head
    dropout: float = 0.0
    window: int | None = None  # a query sees so many keys, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]

    def scale(self, width: int) -> float:
        """What scores are multiplied by, with heads of this width."""
        return self.scaling if self.scaling is not None else width**-0.5

    def visible(self, distance: Tensor) -> Tensor:
        """Which keys a query sees, by how many tokens they are before it."""
        return (distance >= 0) if self.window is None else (distance >= 0) & (distance < self.window)


def distances(queries: slice, keys: slice, device: torch.device) -> Tensor:
    """[queries, keys]: how many tokens each key is before each query."""
    rows = torch.arange(queries.start, queries.stop, device=device)
    columns = torch.arange(keys.start, keys.stop, device=device)
    return rows[:, None] - columns[None, :]
