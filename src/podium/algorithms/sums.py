# SPDX-License-Identifier: Apache-2.0
"""Statistics that shards report as sums: the whole is the same for every split and every order of the answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final, Self

# As the metadata of a field: shards keep the largest instead of the sum.
LARGEST: Final = {"merged_by": "largest"}


@dataclass(frozen=True, slots=True)
class Sums:
    """Base of the statistics: `+` joins two shards, `merge` any number, field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self).merge((self, other))

    @classmethod
    def merge(cls, parts: Iterable[Self]) -> Self:
        """All shards as one; of no shards, the statistics of nothing. The order of `parts` changes no bit."""
        shards = tuple(parts)
        merged: dict[str, float] = {}
        for field in fields(cls):
            values = [float(getattr(shard, field.name)) for shard in shards]
            merged[field.name] = max(values, default=0.0) if field.metadata == LARGEST else total(values)
        return cls(**merged)


def total(values: Sequence[float]) -> float:
    """The sum, rounded once at the end: the order in which the values come does not matter."""
    # fsum refuses inf beside -inf and sums that overflow; a diverged run must be reported, not end here.
    if all(map(math.isfinite, values)):
        try:
            return math.fsum(values)
        except OverflowError:
            pass
    return float(sum(values))
