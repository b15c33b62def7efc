# SPDX-License-Identifier: Apache-2.0
"""Rows that cannot be used: they end the run, or are skipped, counted and named (`data.on_error`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from podium.data.rows import Row
from podium.errors import BadRowError, DataError, counted
from podium.recipe.schema import DataSection

# The share of skipped rows counts as if at least this many rows were read: a few bad rows at the beginning end no run.
_FEWEST_ROWS = 1000
# How many skipped rows an error names, and how much of each message.
_NAMED, _LONGEST_PROBLEM = 5, 300

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row that was left out, and why."""

    source: str  # its place in the recipe: data.train.0
    place: str  # file and line or row
    problem: str

    @classmethod
    def of(cls, row: Row, source: str, error: BadRowError) -> SkippedRow:
        """The row that raised the error."""
        return cls(source=source, place=row.where, problem=str(error))

    def values(self) -> dict[str, str]:
        """The fields as plain values for JSON."""
        return {"source": self.source, "place": self.place, "problem": self.problem}


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipCounts:
    """Rows read, rows skipped, and what was wrong with the first of them."""

    read: int = 0
    skipped: int = 0
    first: tuple[str, ...] = ()

    def add(self, read: int, skipped: list[SkippedRow]) -> SkipCounts:
        """The counts after further rows."""
        problems = (*self.first, *(each.problem[:_LONGEST_PROBLEM] for each in skipped))
        return SkipCounts(read=self.read + read, skipped=self.skipped + len(skipped), first=problems[:_NAMED])


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipPolicy:
    """What happens to rows that cannot be used."""

    skips: bool = False
    max_share: float = 1.0

    @classmethod
    def of(cls, data: DataSection) -> SkipPolicy:
        """The policy of a recipe."""
        return cls(skips=data.on_error == "skip", max_share=data.max_skipped_share)

    def check(self, counts: SkipCounts, key: str) -> None:
        """Raises a DataError if too many rows of the sources at `key` (`data.train`) were skipped."""
        if counts.skipped <= self.max_share * max(counts.read, _FEWEST_ROWS):
            return
        raise DataError(
            f"{key}: {counts.skipped} of the first {counted(counts.read, 'row')} cannot be used, more than "
            f"data.max_skipped_share {self.max_share:g} allows. The first of them:\n"
            + "".join(f"  {problem}\n" for problem in counts.first)
            + "Fix the rows (`podium check RECIPE --deep --all` names them), or raise data.max_skipped_share."
        )


class RowSkipper:
    """Applies a policy to the rows of the sources at `key`, one after the other."""

    def __init__(self, policy: SkipPolicy, key: str, counts: SkipCounts | None = None) -> None:
        """`counts` continues those of an earlier process."""
        self._policy, self._key = policy, key
        self.counts = counts or SkipCounts()
        self.rows: list[SkippedRow] = []  # of this process

    @property
    def skips(self) -> bool:
        """Whether rows that cannot be used are skipped."""
        return self._policy.skips

    def attempt(self, source: int, row: Row, use: Callable[[], T], *, epoch: int = 0) -> T | None:
        """The result of `use`; None for a row that is skipped. A row counts and is named in its first epoch only."""
        try:
            result = use()
        except BadRowError as error:
            if not self._policy.skips:
                raise
            if epoch:
                return None
            skipped = SkippedRow.of(row, f"{self._key}.{source}", error)
            self.rows.append(skipped)
            self.counts = self.counts.add(1, [skipped])
            self._policy.check(self.counts, self._key)
            return None
        self.counts = self.counts.add(1, [])
        return result


def encode_counts(counts: SkipCounts) -> dict[str, Any]:
    """The counts as plain values, for a checkpoint."""
    return {"read": counts.read, "skipped": counts.skipped, "first": list(counts.first)}


def decode_counts(values: Mapping[str, Any]) -> SkipCounts:
    """The inverse of `encode_counts`; what an older checkpoint lacks is 0."""
    first = tuple(str(problem) for problem in values.get("first", ()))
    return SkipCounts(read=int(values.get("read", 0)), skipped=int(values.get("skipped", 0)), first=first)
