# SPDX-License-Identifier: Apache-2.0
"""An exchange between simulated ranks: threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class ExchangeGroup:
    """What the ranks of one group share."""

    world: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    rounds: dict[int, dict[int, bytes]] = field(default_factory=dict)
    failure: BaseException | None = None

    def ends(self) -> list[ThreadExchange]:
        """One end for each rank."""
        return [ThreadExchange(rank=rank, group=self) for rank in range(self.world)]


@dataclass(slots=True)
class ThreadExchange:
    """One simulated rank's end."""

    rank: int
    group: ExchangeGroup
    num_rounds: int = 0
    num_bytes: int = 0

    @property
    def world(self) -> int:
        return self.group.world

    def all_gather(self, payload: bytes, is_stopped: Callable[[], bool]) -> list[bytes] | None:
        group, number, deadline = self.group, self.num_rounds, time.monotonic() + 30
        self.num_rounds, self.num_bytes = number + 1, self.num_bytes + len(payload)
        with group.changed:
            parts = group.rounds.setdefault(number, {})
            assert self.rank not in parts
            parts[self.rank] = payload
            group.changed.notify_all()
            while len(parts) < group.world:
                if group.failure is not None:
                    raise group.failure
                if is_stopped():
                    return None
                assert time.monotonic() < deadline, f"rank {self.rank} waits in round {number} for the others"
                group.changed.wait(0.05)
        return [parts[rank] for rank in range(group.world)]

    def fail(self, error: BaseException) -> None:
        with self.group.changed:
            self.group.failure = self.group.failure or error
            self.group.changed.notify_all()
