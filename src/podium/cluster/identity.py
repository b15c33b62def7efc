# SPDX-License-Identifier: Apache-2.0
"""The identity of a worker: its name in every log line, span and error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """One process on one device slot. A respawned worker has the next incarnation, and counts as another worker."""

    pool: str
    index: int  # slot of the pool
    node: str
    device: str  # "cpu", or "gpu3" as the node numbers it
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.pool}[{self.index}]@{self.node}/{self.device}#{self.incarnation}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Dataclasses with slots are slow to pickle, and this is in every message."""
        return WorkerId, (self.pool, self.index, self.node, self.device, self.incarnation)
