# SPDX-License-Identifier: Apache-2.0
"""The packing buffer: takes examples, gives out whole steps, and accounts for every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from podium.data.chat import Dropped
from podium.data.documents import Example
from podium.data.dropping import no_trained_token
from podium.data.packing import compose_step
from podium.data.results import MadeExample, RowResult
from podium.data.skipping import SkipCounts, SkippedRow, SkipPolicy
from podium.data.state import DocumentCounts, LoaderState
from podium.data.stream import StreamPosition, StreamRow

_LARGEST_CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowChunk:
    """Consecutive rows of the stream, and the position of the stream after them."""

    rows: tuple[StreamRow, ...]
    position: StreamPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The size of one step: as many rows as fit a number of tokens, or a fixed number of rows."""

    tokens: int
    rows: int | None = None


class StepComposer:
    """Holds waiting examples. The same chunks always give the same steps."""

    def __init__(
        self, names: Sequence[str], size: StepSize, window: int, state: LoaderState, policy: SkipPolicy | None = None
    ) -> None:
        self._names = tuple(names)
        self._policy = policy or SkipPolicy()
        self._skipped: list[SkippedRow] = []
        # Since the epoch of a source began, or the run was resumed in it.
        self._dropped_in_epoch: list[Counter[Dropped]] = [Counter() for _ in self._names]
        self._size = size
        self._window = window
        self._waiting = list(state.waiting)
        self._num_waiting_inputs = sum(example.num_inputs for example in self._waiting)
        self._position = state.position
        self._counts = state.counts
        self._made_in_epoch = list(state.made_in_epoch)

    @property
    def is_ready(self) -> bool:
        """Whether enough examples wait to fill a step well."""
        if self._size.rows is not None:
            return len(self._waiting) >= self._size.rows
        return len(self._waiting) >= self._window and self._num_waiting_inputs >= self._size.tokens

    def add(self, chunk: RowChunk, examples: Sequence[RowResult]) -> None:
        """Adds the examples of a chunk, and counts dropped and skipped rows."""
        counts = self._counts
        drawn_by_source, epochs = list(counts.drawn), list(counts.epochs)
        num_kept = num_truncated = 0
        dropped = dict.fromkeys(Dropped, 0)
        skipped: list[SkippedRow] = []
        for each, result in zip(chunk.rows, examples, strict=True):
            if each.epoch != epochs[each.source]:
                self._require_some_trained(each.source)
                epochs[each.source] = each.epoch
                self._made_in_epoch[each.source] = 0
                self._dropped_in_epoch[each.source].clear()
            drawn_by_source[each.source] += 1
            match result:
                case MadeExample(example=example, truncated=truncated):
                    self._waiting.append(example)
                    self._num_waiting_inputs += example.num_inputs
                    self._made_in_epoch[each.source] += 1
                    num_kept += 1
                    num_truncated += truncated
                case Dropped():
                    dropped[result] += 1
                    self._dropped_in_epoch[each.source][result] += 1
                case SkippedRow():
                    skipped += [result] if each.epoch == 0 else []  # a row counts and is named once
                case other:
                    assert_never(other)
        self._position = chunk.position
        self._skipped += skipped
        skip_counts = SkipCounts(read=counts.read, skipped=counts.skipped, first=counts.first_skipped)
        skip_counts = skip_counts.add(len(chunk.rows), skipped)
        self._counts = replace(
            counts,
            read=counts.read + len(chunk.rows),
            trained=counts.trained + num_kept,
            truncated=counts.truncated + num_truncated,
            dropped_overlong=counts.dropped_overlong + dropped[Dropped.OVERLONG],
            dropped_untrained=counts.dropped_untrained + dropped[Dropped.UNTRAINED] + dropped[Dropped.NO_ANSWER],
            dropped_by_map=counts.dropped_by_map + dropped[Dropped.BY_MAP],
            drawn=tuple(drawn_by_source),
            epochs=tuple(epochs),
            skipped=skip_counts.skipped,
            first_skipped=skip_counts.first,
        )
        self._policy.check(skip_counts, "data.train")

    def take_skipped(self) -> tuple[SkippedRow, ...]:
        """The rows that were skipped since the last call."""
        skipped, self._skipped = tuple(self._skipped), []
        return skipped

    def take(self) -> tuple[tuple[Example, ...], LoaderState]:
        """The next step's examples, and the state after removing them from the buffer."""
        rows = self._size.rows
        chosen = compose_step(self._waiting, self._size.tokens) if rows is None else tuple(range(rows))
        examples = tuple(self._waiting[index] for index in chosen)
        gone = set(chosen)
        self._waiting = [example for index, example in enumerate(self._waiting) if index not in gone]
        self._num_waiting_inputs -= sum(example.num_inputs for example in examples)
        return examples, self._state()

    def _state(self) -> LoaderState:
        return LoaderState(
            position=self._position,
            waiting=tuple(self._waiting),
            counts=self._counts,
            made_in_epoch=tuple(self._made_in_epoch),
        )

    def _require_some_trained(self, source: int) -> None:
        if self._made_in_epoch[source] == 0:
            raise no_trained_token(self._names[source], self._dropped_in_epoch[source], self._counts.first_skipped)


def chunk_rows(window: int) -> int:
    """Rows that are read and tokenized together, for a packing window."""
    return max(1, min(_LARGEST_CHUNK, window // 8))


def first_state(position: StreamPosition) -> LoaderState:
    """The state before the first draw."""
    zeros = (0,) * len(position.sources)
    counts = DocumentCounts(drawn=zeros, epochs=zeros)
    return LoaderState(position=position, waiting=(), counts=counts, made_in_epoch=zeros)
