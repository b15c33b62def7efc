# SPDX-License-Identifier: Apache-2.0
"""Which experts of a mixture vLLM sent tokens to, for router replay: kept by request, in the worker.

vLLM's scheduler returns them only with its second model runner, so the worker keeps what its routers report."""

# T tokens of one step · L layers with a router · K experts of a token · S tokens of the KV cache

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from podium.data.routed_experts import Experts, RouterShape, unrecorded


@dataclass(frozen=True, slots=True, kw_only=True)
class FedTokens:
    """Tokens of one request that a step fed to the model."""

    handle: str  # name of the request
    begin: int  # of its rows in the step
    count: int
    position: int  # of the first one in its sequence
    blocks: Sequence[int]  # of its KV cache, in the order of the sequence


@dataclass(slots=True, eq=False)
class _Sequence:
    parts: list[Experts] = field(default_factory=list)
    length: int = 0

    def append(self, part: Experts) -> None:
        self.parts.append(part)
        self.length += len(part)


class ExpertRecord:
    """The choices of running requests, and those of the tokens in the KV cache, which later prompts may reuse. A
    position keeps the experts of the first time that it was fed, also where its cache is computed again."""

    def __init__(self, shape: RouterShape, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        empty = np.empty((0, shape.num_layers, shape.per_token), shape.dtype)
        self._cached_SLK = unrecorded(num_blocks * block_size, empty)
        self._by_handle: dict[str, _Sequence] = {}

    def add(self, fed: Iterable[FedTokens], experts_TLK: Experts) -> None:
        """Takes the choices of one step."""
        for each in fed:
            new_TLK = experts_TLK[each.begin : each.begin + each.count].astype(self._cached_SLK.dtype)
            self._cached_SLK[self._slots(each.blocks, each.position, each.position + each.count)] = new_TLK
            sequence = self._by_handle.setdefault(each.handle, _Sequence())
            if sequence.length < each.position:  # of its prompt, in the prefix cache
                sequence.append(self._cached_SLK[self._slots(each.blocks, sequence.length, each.position)])
            sequence.append(new_TLK[sequence.length - each.position :])

    def take(self, handle: str) -> Experts | None:
        """Returns the choices of a request that has ended, and forgets them. None: nothing of it was fed."""
        sequence = self._by_handle.pop(handle, None)
        return None if sequence is None else np.concatenate(sequence.parts)

    def _slots(self, blocks: Sequence[int], begin: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(begin, end)
        of_blocks = np.asarray(blocks, np.int64)[positions // self._block_size]
        slots: NDArray[np.int64] = of_blocks * self._block_size + positions % self._block_size
        return slots
