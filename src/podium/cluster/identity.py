# SPDX-License-Identifier: Apache-2.0
"""The identity of a worker: its name in every log line, span and error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_PROCESS_NAME = re.compile(r"(.+)\[(\d+)\]#(\d+)")


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


def process_name(pool: str, slot: int, incarnation: int) -> str:
    """The name of a process before it is known where it runs."""
    return f"{pool}[{slot}]#{incarnation}"


def read_process_name(name: str) -> tuple[str, int, int] | None:
    """Pool, slot and incarnation; None: it is no such name."""
    found = _PROCESS_NAME.fullmatch(name)
    return None if found is None else (found[1], int(found[2]), int(found[3]))
