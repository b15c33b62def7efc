# SPDX-License-Identifier: Apache-2.0
"""Device memory of an engine: the KV cache, and copies of the weights if there are any, on all ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from podium.models.fp8 import Fp8Layers
from podium.rollout.engine import MemoryChange
from podium.rollout.native.cache import KVCache, LayerShape, bytes_per_token
from podium.rollout.native.holding import Holding, free_bytes, hold
from podium.rollout.native.merged_copy import MergedCopy
from podium.rollout.native.tensor_group import Allocate, LeadingCache, Sleep, TensorLeader, Wake
from podium.weights.whole_copy import WholeCopy


def free_on_each(device: torch.device, group: TensorLeader | None) -> int:
    """Bytes that every rank has free, after the ranks of a group were told to `Prepare`. Ranks on CPU share theirs."""
    if group is None:
        return free_bytes(device)
    free: int = min(free_bytes(device), *group.answers())
    return free // group.size if device.type == "cpu" else free


class EngineMemory:
    """Allocated once, freed while the engine sleeps, and taken again."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_blocks: int,
        block_size: int,
        copy: WholeCopy | None,
        group: TensorLeader | None,
        fp8: Fp8Layers | None = None,
        merged: MergedCopy | None = None,
    ) -> None:
        self._device, self._group = device, group
        copies = (copy, merged, fp8)
        self._copies: list[WholeCopy | MergedCopy | Fp8Layers] = [each for each in copies if each is not None]
        size = num_blocks * block_size * bytes_per_token(shapes, dtype)
        self._holding: Holding = hold(size, device)
        storage = self._holding.bytes
        self.cache_bytes = self._holding.nbytes  # of all ranks
        if group is None:
            self.cache = KVCache(shapes, num_blocks=num_blocks, block_size=block_size, storage=storage, dtype=dtype)
            return
        self.cache = LeadingCache(
            group, shapes, num_blocks=num_blocks, block_size=block_size, storage=storage, dtype=dtype
        )
        group.send(Allocate(num_blocks=num_blocks, block_size=block_size))
        self.cache_bytes += sum(group.answers())

    def release(self) -> MemoryChange:
        """Frees the memory."""
        before = free_bytes(self._device)
        accounted = self._holding.release() + sum(each.release() for each in self._copies)
        change = MemoryChange(measured_bytes=self._measured(before), accounted_bytes=accounted)
        return self._of_all_ranks(Sleep(), change)

    def restore(self) -> tuple[MemoryChange, bool]:
        """Takes the memory again. Also whether some address changed."""
        before = free_bytes(self._device)
        moved = self._holding.restore()
        accounted = self._holding.nbytes
        for each in self._copies:
            moved |= each.restore()
            accounted += each.nbytes
        change = MemoryChange(measured_bytes=-self._measured(before), accounted_bytes=accounted)
        return self._of_all_ranks(Wake(), change), moved

    def close(self) -> None:
        """Frees the cache for good."""
        self._holding.close()

    def _measured(self, before: int) -> int:
        return free_bytes(self._device) - before if self._device.type == "cuda" else 0

    def _of_all_ranks(self, command: Sleep | Wake, change: MemoryChange) -> MemoryChange:
        """Lets the other ranks do the same, and adds up what all of them freed or took."""
        if self._group is None:
            return change
        self._group.send(command)
        changes = [change, *self._group.answers()]
        return MemoryChange(
            measured_bytes=sum(each.measured_bytes for each in changes),
            accounted_bytes=sum(each.accounted_bytes for each in changes),
        )
