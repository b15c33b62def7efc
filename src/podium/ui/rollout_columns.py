# SPDX-License-Identifier: Apache-2.0
"""Columns of all indexed rollouts in memory: which rows match, and which of them are on a page of some order. And the
search in previews, which goes on where the last request had to end."""

# P positions: rows of all blocks, in the order of steps

from __future__ import annotations

import sqlite3
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from podium.ui.rollout_blocks import (
    COLUMNS,
    NO_LENGTH,
    NO_ROW,
    Array,
    Block,
    blocks_of,
    read_column,
    read_details,
    source_number,
    version_of,
)  # fmt: skip

SORTS = ("step", "-step", "group", "reward", "-reward", "length", "-length")
# Searches that are remembered, for pages of what they found.
_MOST_SEARCHES = 4
_KEYS = {"group": "grp", "reward": "reward", "length": "length"}
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Which episodes, and in which order. None: no condition."""

    sort: str
    search: str = ""
    source: str | None = None
    group: int | None = None
    row: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    changed_since: int | None = None
    """Only episodes of this step and later ones, of prompts that were answered before it too: with another mean reward
    than at the last step before it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """Rows of one page as blocks and places in them, and how many match. `is_whole`: the search saw every row."""

    rows: Sequence[tuple[Block, int]]
    total: int
    is_whole: bool


@dataclass(slots=True)
class _Search:
    """The rows that have a text, by the block that was looked at."""

    needle: bytes
    found: dict[tuple[int, str], Array] = field(default_factory=dict)


class EpisodeColumns:
    """The columns that somebody has asked for, as far as the index goes. Not for several threads at once."""

    def __init__(self) -> None:
        self._searches: OrderedDict[bytes, _Search] = OrderedDict()
        self.forget()

    def forget(self) -> None:
        """Frees the memory."""
        self._version: tuple[int, int] | None = None
        self._blocks: list[Block] = []
        self._begins = self._steps = np.zeros(0, np.int64)
        self._loaded: dict[str, tuple[list[Block], Array]] = {}
        self._changed: tuple[list[Block], int, Array] | None = None
        self._searches.clear()

    def select(
        self, connection: sqlite3.Connection, wanted: RolloutFilter, *, begin: int, end: int, until_s: float
    ) -> Selection:
        """Rows `begin` to `end` of those that match. A search ends at a time of `time.monotonic`, and the next request
        continues it. The connection must be in a transaction: all is read as of one moment."""
        self._refresh(connection)
        low, high = self._between(wanted.first_step, wanted.last_step)
        is_match, is_whole = self._matches(connection, wanted, low, high, until_s)
        begins = self._begins[low : high + 1]
        offset = int(begins[0])
        total = int(begins[-1]) - offset if is_match is None else int(np.count_nonzero(is_match))
        end = min(end, total)
        if begin >= end:
            return Selection(rows=(), total=total, is_whole=is_whole)
        name = _KEYS.get(wanted.sort.removeprefix("-"))
        if name is None:
            order_P = _by_step(begins - offset, is_match, begin, end, newest_first=wanted.sort == "-step")
        else:
            values_P = self._column(connection, name)[offset : int(begins[-1])]
            chosen_P = None if is_match is None else np.flatnonzero(is_match)
            values_P = values_P if chosen_P is None else values_P[chosen_P]
            missing = NO_LENGTH if name == "length" else NO_ROW
            order_P = ranked(values_P, begin, end, descending=wanted.sort.startswith("-"), missing=missing)
            order_P = order_P if chosen_P is None else chosen_P[order_P]
        positions = (order_P + offset).tolist()
        numbers = (np.searchsorted(self._begins, positions, "right") - 1).tolist()
        rows = [(self._blocks[at], place - int(self._begins[at])) for at, place in zip(numbers, positions, strict=True)]
        return Selection(rows=rows, total=total, is_whole=is_whole)

    def _refresh(self, connection: sqlite3.Connection) -> None:
        version = version_of(connection)
        if version == self._version:
            return
        self._blocks = [each for each in blocks_of(connection) if each.rows]
        self._begins = np.cumsum([0, *(each.rows for each in self._blocks)])
        self._steps = np.array([each.step for each in self._blocks], np.int64)
        self._version = version

    def _between(self, first_step: int | None, last_step: int | None) -> tuple[int, int]:
        """Which blocks have steps of an interval: from one to before the other."""
        low = 0 if first_step is None else int(np.searchsorted(self._steps, first_step, "left"))
        high = len(self._blocks) if last_step is None else int(np.searchsorted(self._steps, last_step, "right"))
        return low, max(low, high)

    def _column(self, connection: sqlite3.Connection, name: str) -> Array:
        """All values of a column. What is known already is not read again."""
        blocks, values = self._loaded.get(name, ([], np.zeros(0, COLUMNS[name])))
        if blocks is not self._blocks:
            known, at = {}, 0
            for each in blocks:
                known[each.content] = values[at : at + each.rows]
                at += each.rows
            since = min((each.block for each in self._blocks if each.content not in known), default=None)
            read = {} if since is None else read_column(connection, name, since)
            pieces = [
                known[each.content] if each.content in known else np.frombuffer(read[each.block], COLUMNS[name])
                for each in self._blocks
            ]
            values = np.concatenate(pieces) if pieces else values[:0]
            self._loaded[name] = self._blocks, values
        return values

    def _matches(
        self, connection: sqlite3.Connection, wanted: RolloutFilter, low: int, high: int, until_s: float
    ) -> tuple[Array | None, bool]:
        """Whether each row of these blocks matches (None: all do), and whether the search saw all of them."""
        begin, end = int(self._begins[low]), int(self._begins[high])
        conditions = [("grp", wanted.group), ("row", wanted.row)]
        if wanted.source is not None:
            number = source_number(connection, wanted.source)
            if number is None:
                return np.zeros(end - begin, bool), True
            conditions.append(("source", number))
        found: Array | None = None
        for name, value in conditions:
            if value is not None:
                is_equal = self._column(connection, name)[begin:end] == value
                found = is_equal if found is None else found & is_equal
        if wanted.changed_since is not None:
            is_changed = self._is_changed(connection, wanted.changed_since)[begin:end]
            found = is_changed if found is None else found & is_changed
        if not wanted.search:
            return found, True
        search, is_whole = self._searched(connection, wanted.search, self._blocks[low:high], until_s)
        has_text = np.zeros(end - begin, bool)
        for block, at in zip(self._blocks[low:high], (self._begins[low:high] - begin).tolist(), strict=True):
            places = search.found.get(block.content)
            if places is not None and len(places):
                has_text[places + at] = True
        return (has_text if found is None else found & has_text), is_whole

    def _is_changed(self, connection: sqlite3.Connection, step: int) -> Array:
        """Whether the prompt of each row has another mean reward at its step than before this one. That of the last
        request is kept."""
        if self._changed is None or self._changed[0] is not self._blocks or self._changed[1] != step:
            columns = (self._column(connection, name) for name in ("source", "row", "reward"))
            steps_P = np.repeat(self._steps, [each.rows for each in self._blocks])
            self._changed = self._blocks, step, changed_since(step, steps_P, *columns)
        return self._changed[2]

    def _searched(
        self, connection: sqlite3.Connection, text: str, blocks: Sequence[Block], until_s: float
    ) -> tuple[_Search, bool]:
        """Looks through blocks that were not looked at for this text, the newest first, and through one at least."""
        needle = text.encode("utf-8", "replace").lower()
        search = self._searches.pop(needle, None) or _Search(needle)
        self._searches[needle] = search
        while len(self._searches) > _MOST_SEARCHES:
            self._searches.popitem(last=False)
        rest = [each for each in reversed(blocks) if each.content not in search.found]
        for number, each in enumerate(rest):
            if number and time.monotonic() >= until_s:
                return search, False
            search.found[each.content] = places_of(connection, each, needle)
        return search, True


def places_of(connection: sqlite3.Connection, block: Block, needle: bytes) -> Array:
    """The rows of a block whose previews have a text, given in lower case. Letters of ASCII match both cases."""
    previews = read_details(connection, block.block, ["preview"]).column(0)
    _, offsets_buffer, data = previews.buffers()
    text = b"" if data is None else data.to_pybytes().lower()
    offsets = np.frombuffer(offsets_buffer, np.int32)[previews.offset : previews.offset + len(previews) + 1]
    places: list[int] = []
    at = text.find(needle, int(offsets[0]))
    while at >= 0:
        row = int(np.searchsorted(offsets, at, "right")) - 1
        if row >= len(previews):
            break
        if at + len(needle) <= offsets[row + 1]:
            places.append(row)
            at = text.find(needle, int(offsets[row + 1]))
        else:  # it begins in one preview and ends in the next
            at = text.find(needle, at + 1)
    return np.array(places, np.int32)


def changed_since(step: int, steps_P: Positions, sources_P: Array, rows_P: Array, rewards_P: Array) -> Array:
    """Whether each row is of this step or a later one, and its prompt has another mean reward at its step than at the
    last step before this one. Rows without a reward, or of which no row of the data is known, have not."""
    known_P = np.flatnonzero((rows_P != NO_ROW) & np.isfinite(rewards_P))
    found_P = np.zeros(len(steps_P), bool)
    if not len(known_P):
        return found_P
    _, row_K = np.unique(rows_P[known_P], return_inverse=True)
    prompt_K = row_K.astype(np.int64) * (int(sources_P.max()) + 2) + sources_P[known_P] + 1
    _, prompt_K = np.unique(prompt_K, return_inverse=True)
    step_K, reward_K = steps_P[known_P], rewards_P[known_P]
    is_before_K = step_K < step
    last_step = np.full(int(prompt_K.max()) + 1, -1, np.int64)
    np.maximum.at(last_step, prompt_K[is_before_K], step_K[is_before_K])
    is_last_K = is_before_K & (step_K == last_step[prompt_K])
    before = _means(prompt_K[is_last_K], reward_K[is_last_K], len(last_step))
    after = np.flatnonzero(~is_before_K & (last_step[prompt_K] >= 0))
    if not len(after):
        return found_P
    span = int(step_K.max()) + 1
    _, answer = np.unique(prompt_K[after] * span + step_K[after], return_inverse=True)
    means = _means(answer, reward_K[after], int(answer.max()) + 1)
    found_P[known_P[after]] = ~np.isclose(means[answer], before[prompt_K[after]], rtol=1e-9, atol=1e-12)
    return found_P


def _means(numbers: Array, values: Array, count: int) -> Array:
    """The mean of the values of each number; NaN without one."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.bincount(numbers, values, count) / np.bincount(numbers, minlength=count))


def _by_step(begins: Positions, is_match: Array | None, begin: int, end: int, *, newest_first: bool) -> Positions:
    """Positions of the rows from `begin` to `end` in the order of steps, those of one step in their own order."""
    counts = np.diff(begins)
    if is_match is not None:
        counts = np.add.reduceat(is_match.astype(np.int64), begins[:-1])
    order = np.arange(len(counts))[::-1] if newest_first else np.arange(len(counts))
    ends = np.cumsum(counts[order])
    first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(ends, end, "left")
    pieces = []
    for at in order[first : last + 1].tolist():
        places = np.arange(begins[at], begins[at + 1])
        pieces.append(places if is_match is None else places[is_match[begins[at] : begins[at + 1]]])
    skipped = begin - int(ends[first - 1] if first else 0)
    return np.concatenate(pieces)[skipped : skipped + end - begin]


def ranked(values_P: Array, begin: int, end: int, *, descending: bool = False, missing: int = NO_LENGTH) -> Positions:
    """Positions of the values with the ranks `begin` to `end`. Equal values are in their order, and missing ones (NaN,
    or an integer) last. Takes time in proportion to the number of values, however deep the page is: nothing is sorted
    but the page."""
    is_known = ~np.isnan(values_P) if values_P.dtype.kind == "f" else values_P != missing
    num_known = int(np.count_nonzero(is_known))
    known_P = None if num_known == len(values_P) else np.flatnonzero(is_known)
    found = np.zeros(0, np.int64)
    if begin < num_known:
        keys = values_P if known_P is None else values_P[known_P]
        keys = -keys if descending else keys
        last = min(end, num_known) - 1
        parted = np.partition(keys, (begin, last))
        low, high = parted[begin], parted[last]
        skipped = begin - int(np.count_nonzero(keys < low))
        count = last + 1 - begin
        found = np.flatnonzero(keys == low)[skipped : skipped + count]
        if high > low:
            between = np.flatnonzero((keys > low) & (keys < high))
            between = between[np.argsort(keys[between], kind="stable")]
            found = np.concatenate((found, between, np.flatnonzero(keys == high)[:count]))[:count]
        found = found if known_P is None else known_P[found]
    if end > num_known:
        unknown_P = np.flatnonzero(~is_known)[max(0, begin - num_known) : end - num_known]
        found = np.concatenate((found, unknown_P))
    return found
