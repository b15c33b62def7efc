# SPDX-License-Identifier: Apache-2.0
"""Axes whose ranks are threads of one process, for tests without process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

ResultT = TypeVar("ResultT")


class ThreadAxis:
    """Has the methods of TensorAxis. All ranks call the same ones, in the same order."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: dict[int, Tensor]) -> None:
        self.rank, self.size, self.num_exchanged = rank, size, 0
        self._barrier, self._shared = barrier, shared

    def part(self, length: int) -> slice:
        each = length // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def sum(self, values: Tensor) -> Tensor:
        return values.copy_(torch.stack(self._exchange(values)).sum(0))

    def largest(self, values: Tensor) -> Tensor:
        return values.copy_(torch.stack(self._exchange(values)).amax(0))

    def broadcast(self, values: Tensor) -> Tensor:
        return values.copy_(self._exchange(values)[0])

    def gather(self, part: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(part), dim)

    def _exchange(self, values: Tensor) -> list[Tensor]:
        self.num_exchanged = max(self.num_exchanged, values.numel())
        self._shared[self.rank] = values.detach().clone()
        self._barrier.wait()
        all_values = [self._shared[rank] for rank in range(self.size)]
        self._barrier.wait()
        return all_values


class ThreadContext(ThreadAxis):
    """Has the methods of ContextAxis. `received`: numbers that came with each exchange."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.received: list[int] = []

    def gather(self, part: Tensor) -> Tensor:  # type: ignore[override]
        return torch.stack(self._exchange(part))

    def add_up(self, parts: Tensor) -> Tensor:
        return torch.stack(self._exchange(parts)).sum(0)[self.rank]

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], None]:
        self.received.append(sum(each.numel() for each in receives.values()))
        self._shared[self.rank] = {peer: each.detach().clone() for peer, each in sends.items()}  # type: ignore[assignment]
        self._barrier.wait()
        sent = {peer: self._shared[peer].pop(self.rank) for peer in receives}  # type: ignore[operator]
        self._barrier.wait()
        assert not self._shared[self.rank], "nobody received it"
        for peer, each in receives.items():
            each.copy_(sent[peer])
        return lambda: None

    def swap(self, parts: Tensor) -> Tensor:
        assert len(parts) == self.size
        return torch.stack([each[self.rank] for each in self._exchange(parts)])


def on_threads(size: int, work: Callable[[Any], ResultT], kind: type[ThreadAxis] = ThreadAxis) -> list[ResultT]:
    """Calls `work(axis)` on each rank."""
    barrier, shared = threading.Barrier(size, timeout=30), dict[int, Tensor]()

    def rank_work(rank: int) -> ResultT:
        try:
            return work(kind(rank, size, barrier, shared))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_work, range(size)))
