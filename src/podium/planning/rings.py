# SPDX-License-Identifier: Apache-2.0
"""How often ranks of a context axis send keys and values where these travel (models/ring_attention.py). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


def counted_rank(context: int) -> int:
    """The rank of a context axis whose messages are counted. With a document over all ranks it sends the most: every
    stretch but the last one passes by it, and the last rank only sends gradients home."""
    return max(context - 2, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Packed documents of one length, over a context axis in equal stretches."""

    context: int
    tokens: int  # of all ranks
    length: int  # of a document

    @property
    def stretch(self) -> int:
        """Tokens of a rank, with padding after the last one."""
        return -(-self.tokens // self.context)

    def sees(self, rank: int, stretch: int, window: int | None) -> bool:
        """Whether queries of a rank see keys of this earlier one."""
        if not 0 <= stretch < rank < self.context:
            return False
        start = rank * self.stretch
        first = start if start >= self.tokens else start // self.length * self.length
        if window is not None:
            first = max(first, start - window + 1)
        return first < (stretch + 1) * self.stretch

    def sent_keys(self, rank: int, window: int | None) -> int:
        """How many stretches of keys and values a rank passes on in one pass, its own and those of earlier ones."""
        return sum(self.sees(rank + 1, stretch, window) for stretch in range(rank + 1))

    def sent_gradients(self, rank: int, window: int | None) -> int:
        """How many stretches of their gradients a rank passes on or sends home in the backward pass."""
        return sum(self.sees(rank, stretch, window) for stretch in range(rank))
