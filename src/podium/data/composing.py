# SPDX-License-Identifier: Apache-2.0
"""The packing buffer: made documents come in, whole steps go out, and every row is accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from podium.data.chat import Dropped, Made
from podium.data.documents import Document
from podium.data.packing import compose_step
from podium.data.state import DocumentCounts, LoaderState
from podium.data.stream import Drawn, StreamPosition
from podium.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowChunk:
    """Consecutive draws, and where the stream stands after them."""

    drawn: tuple[Drawn, ...]
    position: StreamPosition


class StepComposer:
    """Holds the documents that wait. The same chunks give the same steps, however and wherever they were made."""

    def __init__(self, names: Sequence[str], tokens_per_step: int, window: int, state: LoaderState) -> None:
        self._names = tuple(names)
        self._tokens_per_step = tokens_per_step
        self._window = window
        self._waiting = list(state.waiting)
        self._num_waiting_inputs = sum(document.num_inputs for document in self._waiting)
        self._position = state.position
        self._counts = state.counts
        self._made_in_epoch = list(state.made_in_epoch)

    @property
    def is_ready(self) -> bool:
        """Whether enough documents wait to fill a step well."""
        return len(self._waiting) >= self._window and self._num_waiting_inputs >= self._tokens_per_step

    def add(self, chunk: RowChunk, made: Sequence[Made | Dropped]) -> None:
        counts = self._counts
        drawn_by_source, epochs = list(counts.drawn), list(counts.epochs)
        num_kept = num_truncated = 0
        dropped = dict.fromkeys(Dropped, 0)
        for drawn, result in zip(chunk.drawn, made, strict=True):
            if drawn.epoch != epochs[drawn.source]:
                self._require_some_trained(drawn.source)
                epochs[drawn.source] = drawn.epoch
                self._made_in_epoch[drawn.source] = 0
            drawn_by_source[drawn.source] += 1
            match result:
                case Made(document=document, truncated=truncated):
                    self._waiting.append(document)
                    self._num_waiting_inputs += document.num_inputs
                    self._made_in_epoch[drawn.source] += 1
                    num_kept += 1
                    num_truncated += truncated
                case Dropped():
                    dropped[result] += 1
                case other:
                    assert_never(other)
        self._position = chunk.position
        self._counts = replace(
            counts,
            read=counts.read + len(chunk.drawn),
            trained=counts.trained + num_kept,
            truncated=counts.truncated + num_truncated,
            dropped_overlong=counts.dropped_overlong + dropped[Dropped.OVERLONG],
            dropped_untrained=counts.dropped_untrained + dropped[Dropped.UNTRAINED],
            dropped_by_map=counts.dropped_by_map + dropped[Dropped.BY_MAP],
            drawn=tuple(drawn_by_source),
            epochs=tuple(epochs),
        )

    def take(self) -> tuple[tuple[Document, ...], LoaderState]:
        """The next step's documents, and the state right after they left the buffer."""
        chosen = compose_step(self._waiting, self._tokens_per_step)
        documents = tuple(self._waiting[index] for index in chosen)
        gone = set(chosen)
        self._waiting = [document for index, document in enumerate(self._waiting) if index not in gone]
        self._num_waiting_inputs -= sum(document.num_inputs for document in documents)
        return documents, self._state()

    def _state(self) -> LoaderState:
        return LoaderState(
            position=self._position,
            waiting=tuple(self._waiting),
            counts=self._counts,
            made_in_epoch=tuple(self._made_in_epoch),
        )

    def _require_some_trained(self, source: int) -> None:
        if self._made_in_epoch[source] == 0:
            raise no_trained_token(self._names[source], self._counts)


def first_state(position: StreamPosition) -> LoaderState:
    """The state before the first draw."""
    zeros = (0,) * len(position.sources)
    counts = DocumentCounts(drawn=zeros, epochs=zeros)
    return LoaderState(position=position, waiting=(), counts=counts, made_in_epoch=zeros)


def no_trained_token(name: str, counts: DocumentCounts) -> DataError:
    return DataError(
        f"no trained token in the whole of {name}: every row was dropped (so far {counts.dropped_untrained} without a "
        f"trained token, {counts.dropped_overlong} overlong, {counts.dropped_by_map} by the map, over all sources). "
        "Check data.trained (chats need assistant turns), data.max_length with data.overlong, and the source's `map`."
    )
