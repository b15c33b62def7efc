# SPDX-License-Identifier: Apache-2.0
"""Rows in the object store: the controller holds references, ids and lengths; workers read the rows they need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from podium.data.trajectories import Ints, RowsT, TrajectoryIds
from podium.errors import ResultError, StoreError

Value_co = TypeVar("Value_co", covariant=True)


class Stored(ABC, Generic[Value_co]):
    """One object in the store. It lives until it is freed, or until the last reference to it is gone."""

    @abstractmethod
    def read(self) -> Value_co:
        """The object itself, without a copy if it is on this node. Waits for at most the store's deadline."""

    @abstractmethod
    def free(self, reason: str) -> None:
        """Frees the object; the error of a later `read` gives the reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowRefs(Generic[RowsT]):
    """Rows by reference: for each row, its stored object and its position there. Ids ascend. This is what travels
    through the controller: some 50 bytes a row, whatever its length."""

    ids: TrajectoryIds
    lengths_N: Ints
    pieces: tuple[Stored[RowsT], ...]
    piece_N: NDArray[np.int32]
    row_N: NDArray[np.int32]

    @classmethod
    def whole(cls, stored: Stored[RowsT], ids: TrajectoryIds, lengths_N: Ints) -> RowRefs[RowsT]:
        """All rows of one stored object."""
        refs = cls(
            ids=ids,
            lengths_N=lengths_N,
            pieces=(stored,),
            piece_N=np.zeros(len(ids), np.int32),
            row_N=np.arange(len(ids), dtype=np.int32),
        )
        return refs if _ascending(ids) else refs.take(ids.order)

    @classmethod
    def join(cls, parts: Sequence[RowRefs[RowsT]]) -> RowRefs[RowsT]:
        """Joins the rows of several, ids ascending. An id that is in two of them is an error."""
        parts = [part for part in parts if len(part)]
        if not parts:
            return cls(ids=TrajectoryIds.of(()), lengths_N=_NONE_64, pieces=(), piece_N=_NONE_32, row_N=_NONE_32)
        # An object that several parts refer to is one piece, and is opened once.
        number = {id(piece): at for at, piece in enumerate({id(p): p for part in parts for p in part.pieces}.values())}
        renamed = [np.array([number[id(piece)] for piece in part.pieces], np.int32)[part.piece_N] for part in parts]
        joined = cls(
            ids=TrajectoryIds.concatenate([part.ids for part in parts]),
            lengths_N=np.concatenate([part.lengths_N for part in parts]),
            pieces=tuple({id(piece): piece for part in parts for piece in part.pieces}.values()),
            piece_N=np.concatenate(renamed),
            row_N=np.concatenate([part.row_N for part in parts]),
        )
        twice = joined.ids.repeated()
        if len(twice):
            raise ResultError(
                f"these trajectories are stored more than once: {twice}. An id stands for one trajectory."
            )
        return joined if _ascending(joined.ids) else joined.take(joined.ids.order)

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, positions: NDArray[np.integer[Any]]) -> RowRefs[RowsT]:
        """Some of the rows, with only the references that they need."""
        piece_N = self.piece_N[positions]
        needed = np.unique(piece_N)
        return RowRefs(
            ids=self.ids.take(positions),
            lengths_N=self.lengths_N[positions],
            pieces=tuple(self.pieces[piece] for piece in needed.tolist()),
            piece_N=np.searchsorted(needed, piece_N).astype(np.int32),
            row_N=self.row_N[positions],
        )

    def select(self, ids: TrajectoryIds) -> RowRefs[RowsT]:
        """The rows of these ids, in their order. This cuts a column to the rows of a shard."""
        positions = self.ids.positions_of(ids)
        if (positions < 0).any():
            raise ResultError(f"these trajectories are not among the stored ones: {ids.without(self.ids)}.")
        return self.take(positions)

    def read(self) -> RowsT:
        """Reads the rows in the order of `ids`. Opens each stored object once, and copies only the requested rows
        (none, if a whole object is requested)."""
        if not self.pieces:
            raise ResultError("no row is asked for, so there is nothing to read; look at len() first.")
        parts: list[RowsT] = []
        order: list[Ints] = []
        for number, piece in enumerate(self.pieces):
            here = np.flatnonzero(self.piece_N == number)
            held, rows = piece.read(), self.row_N[here].astype(np.int64)
            everything = len(rows) == len(held.ids) and np.array_equal(rows, np.arange(len(rows)))
            parts.append(held if everything else held.take(rows))
            order.append(here)
        joined = type(parts[0]).concatenate(parts)
        came = np.concatenate(order)
        back = np.empty(len(came), np.int64)
        back[came] = np.arange(len(came))
        in_order = joined if np.array_equal(back, np.arange(len(back))) else joined.take(back)
        if not in_order.ids.same_as(self.ids):
            raise ResultError(
                f"the stored rows are of other trajectories than their references say: asked for {self.ids}, "
                f"found {in_order.ids}."
            )
        return in_order


_NONE_64, _NONE_32 = np.empty(0, np.int64), np.empty(0, np.int32)


def _ascending(ids: TrajectoryIds) -> bool:
    return np.array_equal(ids.order, np.arange(len(ids)))


class ObjectScope:
    """Objects that are freed when the block ends, also after an exception: those of one step, or of one evaluation."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held: list[Stored[Any]] = []

    def __enter__(self) -> ObjectScope:
        return self

    def hold(self, rows: RowRefs[RowsT]) -> RowRefs[RowsT]:
        """Registers rows to be freed when the scope closes."""
        self.free_at_end(rows.pieces)
        return rows

    def free_at_end(self, pieces: Iterable[Stored[Any]]) -> None:
        """Registers objects to be freed when the scope closes."""
        self._held += pieces

    def __exit__(self, *ended: object) -> None:
        """Frees its objects; reading them afterwards raises an error that says so."""
        for stored in self._held:
            stored.free(f"it was freed when {self._name} closed")
        self._held.clear()


class InlineStored(Stored[Value_co]):
    """An object of this process."""

    def __init__(self, value: Value_co) -> None:
        self._value: list[Value_co] = [value]
        self._gone = ""

    def read(self) -> Value_co:
        """The value; a StoreError after it was freed."""
        if not self._value:
            raise StoreError(
                f"a stored object cannot be read: {self._gone}. Read it before, or let a later step hold it."
            )
        return self._value[0]

    def free(self, reason: str) -> None:
        """Drops the value; `reason` is for errors of later reads."""
        self._value.clear()
        self._gone = reason
