# SPDX-License-Identifier: Apache-2.0
"""Parts of named tensors that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: start and stop in every dimension."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The size in every dimension."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def is_empty(self) -> bool:
        """Whether it holds no element."""
        return any(size <= 0 for size in self.shape)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Indices of the box in a tensor that begins at `origin`."""
        base = origin or (0,) * len(self.starts)
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.starts, self.stops, base, strict=True))

    def overlap(self, other: Box) -> Box:
        """The intersection of both boxes; may be empty."""
        return Box(
            tuple(map(max, self.starts, other.starts)),
            tuple(map(min, self.stops, other.stops)),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorShard:
    """The part of one named tensor that this rank holds. Saving reads `local`; loading fills it in place. `is_copy`:
    another rank holds the same part and saves it."""

    name: str
    local: Tensor
    box: Box
    shape: tuple[int, ...]
    is_copy: bool = False
