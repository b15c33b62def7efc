# SPDX-License-Identifier: Apache-2.0
"""Which experts the tokens in the KV cache went to: in host memory, block by block like keys and values.

A prompt whose beginning is reused from the cache is not fed again. Its experts are those of the sequence that
fed it, so they are stored where its keys are, and copied and moved with them."""

# T tokens fed · L layers with a router · K experts of a token

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from podium.data.routed_experts import Experts, RouterShape
from podium.rollout.native.block_manager import BlockCopy
from podium.rollout.native.slots import Arrangement

Ints = NDArray[np.int64]


class ExpertCache:
    """[blocks, positions of a block, L, K]. Steps are applied in the order in which they ran."""

    def __init__(self, shape: RouterShape, *, num_blocks: int, block_size: int) -> None:
        self.shape = shape
        self._block_size = block_size
        self._store: Experts = np.zeros((num_blocks, block_size, shape.num_layers, shape.per_token), shape.dtype)

    @property
    def nbytes(self) -> int:
        """The size in host memory, if all blocks are written."""
        return self._store.nbytes

    def apply(
        self, moves: Arrangement | None, copies: Sequence[BlockCopy], places: tuple[Ints, Ints], experts_TLK: Experts
    ) -> None:
        """One step: slots change places, blocks are copied, then these tokens are written at (block, offset)."""
        if moves is not None:
            taken = {target: self._store[source, : moves.tokens].copy() for source, target in moves.target_of.items()}
            for target, part in taken.items():
                self._store[target, : moves.tokens] = part
        for copy in copies:
            self._store[copy.target, : copy.tokens] = self._store[copy.source, : copy.tokens]
        block_T, offset_T = places
        self._store[block_T, offset_T] = experts_TLK

    def read(self, blocks: Ints, length: int) -> Experts:
        """The experts of the first `length` positions of a sequence in these blocks: [length, L, K]."""
        at = np.arange(length)
        experts: Experts = self._store[blocks[at // self._block_size], at % self._block_size]
        return experts
