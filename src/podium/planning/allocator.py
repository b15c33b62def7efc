# SPDX-License-Identifier: Apache-2.0
"""What torch's caching allocator holds beyond live tensors, by its rules. Torch-free.

A tensor is a block of a segment that was taken from the driver. Sizes are rounded up to 512 bytes. Blocks up to 1 MiB
share segments of 2 MiB, those below 10 MiB segments of 20 MiB; a larger one gets a segment rounded up to 2 MiB. Of free
blocks that are large enough the smallest serves a request, and is split. Free neighbours are joined, and segments stay
with the process. Podium leaves `expandable_segments` off."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from podium.planning.activations import HEAD_CHUNK
from podium.planning.model_shape import ModelShape

MIB = 1 << 20
_UNIT = 512
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
_OWN_SEGMENT, _LARGE_SEGMENT, _ROUND = 10 * MIB, 20 * MIB, 2 * MIB
_FLOAT = 4


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment."""

    num_bytes: int
    is_small: bool
    number: int  # in the order in which blocks came to be
    is_free: bool = False
    before: Block | None = None  # neighbours in its segment
    after: Block | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Places blocks one after the other; counts bytes and knows no memory."""

    reserved: int = 0  # bytes of all segments
    live: int = 0  # of blocks that are not free
    most_live: int = 0
    _free: dict[bool, list[tuple[int, int, Block]]] = field(default_factory=lambda: {True: [], False: []})
    _count: int = 0

    def take(self, num_bytes: int) -> Block:
        """A block for a tensor."""
        size = -(-num_bytes // _UNIT) * _UNIT
        block = self._fitting(size, size <= _SMALL)
        if block is None:
            block = self._segment(size)
        rest = block.num_bytes - size
        if rest >= _UNIT if block.is_small else rest > _SMALL:
            block.num_bytes = size
            left = self._block(rest, block.is_small)
            left.before, left.after, block.after = block, block.after, left
            if left.after is not None:
                left.after.before = left
            self._put(left)
        self.live += block.num_bytes
        self.most_live = max(self.most_live, self.live)
        return block

    def give(self, block: Block) -> None:
        """Frees a block. It joins free neighbours."""
        self.live -= block.num_bytes
        if block.before is not None and block.before.is_free:
            self._remove(block.before)
            self._join(block.before, block)
            block = block.before
        if block.after is not None and block.after.is_free:
            self._remove(block.after)
            self._join(block, block.after)
        self._put(block)

    def _fitting(self, size: int, is_small: bool) -> Block | None:
        """The smallest free block that is large enough."""
        pool = self._free[is_small]
        at = bisect.bisect_left(pool, size, key=lambda each: each[0])
        if at == len(pool):
            return None
        block = pool.pop(at)[2]
        block.is_free = False
        return block

    def _segment(self, size: int) -> Block:
        if size <= _SMALL:
            whole = _SMALL_SEGMENT
        else:
            whole = _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _ROUND) * _ROUND
        self.reserved += whole
        return self._block(whole, size <= _SMALL)

    def _block(self, size: int, is_small: bool) -> Block:
        self._count += 1
        return Block(num_bytes=size, is_small=is_small, number=self._count)

    def _put(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.num_bytes, block.number, block))

    def _remove(self, block: Block) -> None:
        block.is_free = False
        self._free[block.is_small].remove((block.num_bytes, block.number, block))

    @staticmethod
    def _join(first: Block, second: Block) -> None:
        first.num_bytes += second.num_bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first


@functools.lru_cache(maxsize=64)
def state_rounding(shape: ModelShape, itemsize: int, *, offloaded: bool = False) -> int:
    """What segments of weights, masters and moments have beyond their bytes, on a single device. `offloaded`: weights
    alone are there."""
    allocator, wanted = CachingAllocator(), 0
    trained = [size for size, is_trained in _sizes(shape) if is_trained]
    blocks = [size * itemsize for size, _ in _sizes(shape)]
    if not offloaded:
        masters = trained if itemsize != _FLOAT else []
        blocks += [size * _FLOAT for size in (*masters, *trained, *trained)]
    for size in blocks:
        allocator.take(size)
        wanted += size
    return allocator.reserved - wanted


def _sizes(shape: ModelShape) -> Iterator[tuple[int, bool]]:
    """Elements of each tensor, layer by layer, and whether it is trained."""
    outside = [each for each in shape.tensors if not each.in_layer]
    for each in outside:
        yield from [(math.prod(each.shape), each.is_trained)] * each.count
    for layer in range(shape.num_layers):
        for each in shape.tensors:
            if each.in_layer:
                here = each.count * (layer + 1) // shape.num_layers - each.count * layer // shape.num_layers
                yield from [(math.prod(each.shape), each.is_trained)] * here


@functools.lru_cache(maxsize=256)
def freed_logits(tokens: int, vocab_rows: int, *, itemsize: int) -> int:
    """What the compiled head leaves in segments beyond its live bytes. A chunk's float32 logits are made while those of
    the chunk before it are there, and its gradient while that of the chunk before it is. The second gradient splits the
    segment of the first logits, so that the third logits need a segment of their own."""
    allocator = CachingAllocator()
    logits: Block | None = None
    gradient: Block | None = None
    for start in range(0, tokens, HEAD_CHUNK):
        elements = min(HEAD_CHUNK, tokens - start) * vocab_rows
        made = allocator.take(elements * _FLOAT)
        if logits is not None:
            allocator.give(logits)
        logits, made = made, allocator.take(elements * itemsize)
        if gradient is not None:
            allocator.give(gradient)
        gradient = made
    return allocator.reserved - allocator.most_live
