# SPDX-License-Identifier: Apache-2.0
"""Trajectories as jagged NumPy arrays, and their permanent ids."""

# N trajectories · T tokens of all of them, one after the other

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from podium.data.routed_experts import Experts, aligned
from podium.errors import DataError

Ints = NDArray[np.int64]


class TrajectoryId(NamedTuple):
    """One trajectory of a run. A new attempt at the same episode is another trajectory and has another id."""

    prompt_index: int
    sample: int
    branch: int = 0
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.prompt_index}.{self.sample}" + (f".{self.branch}" if self.branch else "") + f"#{self.attempt}"


@dataclass(frozen=True, eq=False)
class TrajectoryIds:
    """Ids of N trajectories as one array, so that thousands of them cost a few microseconds to send and compare."""

    array_N4: Ints

    def __post_init__(self) -> None:
        if self.array_N4.ndim != 2 or self.array_N4.shape[1] != 4 or self.array_N4.dtype != np.int64:
            raise DataError(
                f"trajectory ids are an int64 array of (prompt_index, sample, branch, attempt) rows, not "
                f"{self.array_N4.dtype} of shape {self.array_N4.shape}."
            )

    @classmethod
    def of(cls, ids: Iterable[TrajectoryId]) -> Self:
        """From single ids."""
        return cls(np.array([tuple(map(operator.index, each)) for each in ids], np.int64).reshape(-1, 4))

    @classmethod
    def concatenate(cls, parts: Sequence[TrajectoryIds]) -> TrajectoryIds:
        """One after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(np.concatenate([part.array_N4 for part in parts]) if parts else np.empty((0, 4), np.int64))

    def __len__(self) -> int:
        return len(self.array_N4)

    def __iter__(self) -> Iterator[TrajectoryId]:
        return (TrajectoryId(*row) for row in self.array_N4.tolist())

    def __getitem__(self, position: int) -> TrajectoryId:
        return TrajectoryId(*self.array_N4[position].tolist())

    def __str__(self) -> str:
        shown = ", ".join(str(each) for each in self.take(np.arange(min(len(self), 8))))
        return f"{shown} and {len(self) - 8} more" if len(self) > 8 else shown

    def __reduce__(self) -> tuple[Any, ...]:
        return TrajectoryIds, (self.array_N4,)

    def take(self, positions: NDArray[np.integer[Any]]) -> TrajectoryIds:
        """The ids at these positions."""
        return TrajectoryIds(self.array_N4[positions])

    def same_as(self, other: TrajectoryIds) -> bool:
        """The same ids in the same order."""
        return np.array_equal(self.array_N4, other.array_N4)

    @cached_property
    def order(self) -> Ints:
        """Positions in ascending order of id; equal ids keep their order."""
        prompt_index, sample, branch, attempt = self.array_N4.T
        if _ascends(self.array_N4):
            return np.arange(len(self))
        return np.lexsort((attempt, branch, sample, prompt_index)).astype(np.int64)

    def repeated(self) -> TrajectoryIds:
        """The ids that occur here more than once, each listed once."""
        if _ascends(self.array_N4):
            return TrajectoryIds(self.array_N4[:0])
        rows = self.array_N4[self.order]
        again = (rows[1:] == rows[:-1]).all(axis=1)
        return TrajectoryIds(np.unique(rows[1:][again], axis=0).reshape(-1, 4))

    def positions_of(self, wanted: TrajectoryIds) -> Ints:
        """Position of each wanted id, -1 if it is absent. Ids here must not repeat."""
        both = TrajectoryIds(np.concatenate([self.array_N4, wanted.array_N4]))
        order = both.order
        rows = both.array_N4[order]
        starts = np.ones(len(rows), bool)
        starts[1:] = (rows[1:] != rows[:-1]).any(axis=1)
        run = np.cumsum(starts) - 1
        # The sort is stable, so of each run of equal ids the one that stands here comes first.
        first = order[starts]
        sorted_positions = np.where(first < len(self), first, -1)[run]
        positions = np.empty(len(both), np.int64)
        positions[order] = sorted_positions
        return positions[len(self) :]

    def without(self, others: TrajectoryIds) -> TrajectoryIds:
        """The ids that `others` does not have."""
        known = TrajectoryIds(np.unique(others.array_N4, axis=0).reshape(-1, 4))
        return self.take(np.flatnonzero(known.positions_of(self) < 0))


def _ascends(rows_N4: Ints) -> bool:
    """Whether the rows are already strictly ascending, which is the usual case: then no sort is needed."""
    if len(rows_N4) < 2:
        return True
    differs = rows_N4[1:] != rows_N4[:-1]
    first = differs.argmax(axis=1)
    at = np.arange(len(first))
    return bool((differs[at, first] & (rows_N4[1:][at, first] > rows_N4[:-1][at, first])).all())


class Rows(Protocol):
    """Data that can be stored, cut and joined by row: each row belongs to one trajectory."""

    @property
    def ids(self) -> TrajectoryIds:
        """The trajectory of each row."""

    @property
    def lengths_N(self) -> Ints:
        """Tokens of each row."""

    @property
    def nbytes(self) -> int:
        """The size in memory."""

    def take(self, rows: Ints) -> Self:
        """The rows at these positions."""

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """One after another."""


RowsT = TypeVar("RowsT", bound=Rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Jagged:
    """Flat arrays with one value per token, and where each trajectory begins. Read-only once created."""

    ids: TrajectoryIds
    offsets: Ints  # N + 1

    def __post_init__(self) -> None:
        for name in ("offsets", *self._flat()):
            object.__setattr__(self, name, _read_only(getattr(self, name)))
        if self.offsets.dtype != np.int64:
            raise DataError(f"{type(self).__name__}: offsets are int64, not {self.offsets.dtype}.")
        total = int(self.offsets[-1]) if len(self.offsets) else -1
        if len(self.offsets) != len(self.ids) + 1 or self.offsets[0] != 0 or (np.diff(self.offsets) < 0).any():
            raise DataError(
                f"{type(self).__name__}: {len(self.ids)} trajectories need {len(self.ids) + 1} ascending offsets "
                f"from 0, found {len(self.offsets)}."
            )
        for name in self._flat():
            if len(getattr(self, name)) != total:
                raise DataError(
                    f"{type(self).__name__}.{name} has {len(getattr(self, name))} values and the offsets end at "
                    f"{total}; every token has exactly one."
                )

    def _flat(self) -> list[str]:
        """Names of the arrays; those that are not there are left out."""
        names = [field.name for field in fields(self) if field.name not in ("ids", "offsets")]
        return [name for name in names if getattr(self, name) is not None]

    @property
    def lengths_N(self) -> Ints:
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        flat = sum(int(getattr(self, name).nbytes) for name in self._flat())
        return self.ids.array_N4.nbytes + self.offsets.nbytes + flat

    def take(self, rows: Ints) -> Self:
        """These rows, in this order. Neighbours are copied at once, so contiguous ranges cost little."""
        lengths = self.lengths_N[rows]
        breaks = np.flatnonzero(np.diff(rows) != 1)
        edges = np.r_[0, breaks + 1, len(rows)] if len(rows) else np.zeros(1, np.int64)
        begins = self.offsets[rows[edges[:-1]]].tolist()
        ends = self.offsets[rows[edges[1:] - 1] + 1].tolist()
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        taken = {name: _pieces(getattr(self, name), begins, ends) for name in self._flat()}
        return type(self)(ids=self.ids.take(rows), offsets=offsets, **taken)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        ends = np.cumsum([0, *(int(part.offsets[-1]) for part in parts)])
        offsets = [part.offsets[1:] + end for part, end in zip(parts, ends, strict=False)]
        return cls(
            ids=TrajectoryIds.concatenate([part.ids for part in parts]),
            offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
            **cls._joined(parts),
        )

    @classmethod
    def _joined(cls, parts: Sequence[Self]) -> dict[str, NDArray[Any] | None]:
        names = [field.name for field in fields(cls) if field.name not in ("ids", "offsets")]
        return {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    """Makes arrays read-only, like those from the object store. This holds in one process too, so that no role writes
    into another's rows."""
    view = values.view()
    view.flags.writeable = False
    return view


def _pieces(values: NDArray[Any], begins: list[int], ends: list[int]) -> NDArray[Any]:
    if not begins:
        return values[:0]
    if len(begins) == 1:
        return values[begins[0] : ends[0]]
    return np.concatenate([values[begin:end] for begin, end in zip(begins, ends, strict=True)])


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryBlock(_Jagged):
    """Trajectories stored together: prompt and answer tokens, which of them are trained, and the version that sampled
    them. A trajectory is one token sequence, or several of one episode, one after the other: no token of one attends
    to those of another."""

    tokens_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    behavior_logprobs_T: NDArray[np.float32]  # 0 where the token was not sampled
    versions_T: NDArray[np.int32]  # of the weights that sampled the token; -1 where it was not sampled
    experts_TLK: Experts | None = None  # that the engine's routers chose for the token; None: not recorded
    starts_T: NDArray[np.bool_] | None = None  # where a further sequence of a trajectory begins; None: there is none

    def sequences(self, row: int) -> Iterator[tuple[int, int]]:
        """Begin and end of each token sequence of a trajectory, as positions in the block."""
        begin, end = int(self.offsets[row]), int(self.offsets[row + 1])
        edges = [begin, end]
        if self.starts_T is not None:
            edges[1:1] = (np.flatnonzero(self.starts_T[begin:end]) + begin).tolist()
        return pairwise(edges)

    @property
    def first_T(self) -> Ints:
        """Positions of the first tokens of all sequences: nothing predicts them."""
        firsts: Ints = self.offsets[:-1][self.lengths_N > 0]
        if self.starts_T is None:
            return firsts
        return np.union1d(firsts, np.flatnonzero(self.starts_T)).astype(np.int64)

    @classmethod
    def _joined(cls, parts: Sequence[Self]) -> dict[str, NDArray[Any] | None]:
        joined: dict[str, NDArray[Any] | None] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("tokens_T", "loss_mask_T", "behavior_logprobs_T", "versions_T")
        }
        starts_T: NDArray[np.bool_] | None = None
        if any(part.starts_T is not None for part in parts):
            known = [
                np.zeros(len(part.tokens_T), np.bool_) if part.starts_T is None else part.starts_T for part in parts
            ]
            starts_T = np.concatenate(known)
        experts_TLK = aligned([(part.experts_TLK, len(part.tokens_T)) for part in parts])
        return {**joined, "experts_TLK": experts_TLK, "starts_T": starts_T}


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenColumn(_Jagged):
    """One value per token, computed later than the block and stored beside it: log-probs, values, advantages."""

    values_T: NDArray[Any]

    @classmethod
    def like(cls, rows: TrajectoryBlock | TokenColumn, values_T: NDArray[Any]) -> TokenColumn:
        """A column with the ids and lengths of these rows."""
        return cls(ids=rows.ids, offsets=rows.offsets, values_T=values_T)


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueColumns(_Jagged):
    """A critic's results for each token: the value of the state that it was sampled in, and what follows from that."""

    values_T: NDArray[np.float32]
    advantages_T: NDArray[np.float32]
    returns_T: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowColumn:
    """One value per trajectory: rewards, scores."""

    ids: TrajectoryIds
    values_N: NDArray[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values_N", _read_only(self.values_N))
        if len(self.ids) != len(self.values_N):
            raise DataError(
                f"RowColumn has {len(self.values_N)} values for {len(self.ids)} trajectories; each has exactly one."
            )

    @property
    def lengths_N(self) -> Ints:
        """One value for each row."""
        return np.ones(len(self.ids), np.int64)

    @property
    def nbytes(self) -> int:
        """The size in memory."""
        return self.ids.array_N4.nbytes + self.values_N.nbytes

    def take(self, rows: Ints) -> RowColumn:
        """The rows at these positions."""
        return RowColumn(ids=self.ids.take(rows), values_N=self.values_N[rows])

    @classmethod
    def concatenate(cls, parts: Sequence[RowColumn]) -> RowColumn:
        """One after another."""
        return cls(
            ids=TrajectoryIds.concatenate([part.ids for part in parts]),
            values_N=np.concatenate([part.values_N for part in parts]),
        )
