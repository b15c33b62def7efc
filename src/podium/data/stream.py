# SPDX-License-Identifier: Apache-2.0
"""The order in which rows are drawn from several sources: endless, deterministic, and resumable from a few numbers."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from podium.data.rows import Row
from podium.data.sources import Source
from podium.data.splitmix import GAMMA, mix
from podium.errors import DataError
from podium.progress import mark_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePosition:
    """The next row of one source: `block` is where its pool begins in the epoch's order of blocks."""

    epoch: int = 0
    block: int = 0
    row: int = 0  # rows already drawn from the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """The next draw, and the next row of every source."""

    draw: int
    sources: tuple[SourcePosition, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamRow:
    """A row, the source that it comes from, and the epoch of that source."""

    row: Row
    source: int
    epoch: int


class MixedStream:
    """An endless stream of rows from several sources, mixed by weight.

    The source of row number n depends on (seed, n) only. A source's blocks are permuted again in every epoch,
    and rows are shuffled within pools of at least `shuffle_rows` rows. A small file is shuffled whole, and a large one
    streams. Without shuffling each source is read in file order.
    """

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[float], *, seed: int, shuffle: bool, shuffle_rows: int,
        position: StreamPosition | None = None,
    ) -> None:  # fmt: skip
        assert sources
        assert len(sources) == len(weights)
        start = position or StreamPosition(draw=0, sources=(SourcePosition(),) * len(sources))
        if len(start.sources) != len(sources):
            raise DataError(
                f"the saved position has {len(start.sources)} sources, the recipe has {len(sources)}. Resume with the "
                "sources that the run began with."
            )
        total = sum(weights)
        self._bounds = [bound / total for bound in accumulate(weights)]
        self._seed = mix(seed + GAMMA)
        self._draw = start.draw
        self._cursors = [
            _SourceCursor(source, index, seed, shuffle_rows if shuffle else None, place)
            for index, (source, place) in enumerate(zip(sources, start.sources, strict=True))
        ]

    @property
    def position(self) -> StreamPosition:
        """The position of the stream; a new stream continues from it."""
        return StreamPosition(draw=self._draw, sources=tuple(cursor.position for cursor in self._cursors))

    def draw(self) -> StreamRow:
        """The next row."""
        source = self._choice(self._draw)
        cursor = self._cursors[source]
        row = cursor.next()
        self._draw += 1
        return StreamRow(row=row, source=source, epoch=cursor.position.epoch)

    def _choice(self, draw: int) -> int:
        if len(self._bounds) == 1:
            return 0
        uniform = (mix(self._seed + (draw + 1) * GAMMA) >> 11) / (1 << 53)
        return min(bisect.bisect_right(self._bounds, uniform), len(self._bounds) - 1)


class _SourceCursor:
    """Reads one source pool by pool. A pool is read when its first row is needed, without reading earlier ones."""

    def __init__(self, source: Source, index: int, seed: int, pool_rows: int | None, position: SourcePosition) -> None:
        self._source = source
        self._key = (seed, index)
        self._pool_rows = pool_rows  # None: no shuffling
        self._epoch, self._block, self._row = position.epoch, position.block, position.row
        self._order = self._block_order()
        self._pool: list[Row] | None = None
        self._next_block = position.block

    @property
    def position(self) -> SourcePosition:
        return SourcePosition(epoch=self._epoch, block=self._block, row=self._row)

    def next(self) -> Row:
        if self._pool is None:
            self._pool = self._read_pool()
        num_empty_blocks = 0
        while self._row >= len(self._pool):
            num_empty_blocks += self._next_block - self._block if not self._pool else 0
            # Over two epochs of another order each: every block has been seen to be empty.
            if num_empty_blocks >= 2 * self._source.num_blocks:
                raise DataError(f"{self._source.name} has no rows. Check that the right file was written.")
            self._advance()
        row = self._pool[self._row]
        self._row += 1
        return row

    def _advance(self) -> None:
        self._block, self._row = self._next_block, 0
        if self._block >= self._source.num_blocks:
            self._epoch, self._block = self._epoch + 1, 0
            self._order = self._block_order()
        self._pool = self._read_pool()

    def _read_pool(self) -> list[Row]:
        wanted = self._pool_rows or 1
        rows: list[Row] = []
        self._next_block = self._block
        while len(rows) < wanted and self._next_block < self._source.num_blocks:
            rows += self._source.read_block(int(self._order[self._next_block]))
            self._next_block += 1
            mark_progress()
        if self._pool_rows is None:
            return rows
        return [rows[index] for index in _permutation(len(rows), *self._key, self._epoch, 1, self._block)]

    def _block_order(self) -> NDArray[np.int64]:
        if self._pool_rows is None:
            return np.arange(self._source.num_blocks)
        return _permutation(self._source.num_blocks, *self._key, self._epoch, 0)


def _permutation(count: int, *key: int) -> NDArray[np.int64]:
    """The same on every machine and NumPy version: raw bits of a counter-based generator, sorted."""
    bits = np.random.Philox(seed=np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(bits, kind="stable")
