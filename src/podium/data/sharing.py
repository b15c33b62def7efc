# SPDX-License-Identifier: Apache-2.0
"""Ranks tokenize disjoint chunks of the stream that all of them read, and exchange the results.

Chunk number n belongs to rank n modulo the number of ranks. A round is one chunk for each rank: when a rank has
tokenized its own, it exchanges it for those of the others, and has the results of all rows in the order of the stream.
What is made of them cannot depend on the number of ranks."""

from __future__ import annotations

import pickle
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from podium.data.exchange import Exchange
from podium.data.remembering import RememberedRows
from podium.data.results import EncodedResults, RowResult, decode_results, encode_results
from podium.data.rows import LinePlace, Row
from podium.data.workers import ChunkMaker, RowsOfSources, sendable
from podium.errors import DataError
from podium.recipe import SourceSection


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chunk:
    """Rows of the stream, or the error that reading ended with."""

    rows: RowsOfSources
    known: Sequence[RowResult | None]  # results from earlier rounds
    unknown: RowsOfSources  # the other rows
    error: Exception | None = None  # of reading

    def join(self, results: Sequence[RowResult]) -> list[RowResult]:
        """The results of all rows, from those of the unknown ones."""
        rest = iter(results)
        return [next(rest) if result is None else result for result in self.known]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """What a rank sends in a round."""

    first: int  # number of the round's first chunk
    rows: int  # checksum of the rows of the whole round
    made: EncodedResults | Exception | None  # of the unknown rows of its chunk, if there are any
    ended: tuple[int, Exception] | None  # the chunk at which its reading ended, and why


Outcome = list[RowResult] | Exception


class SharedMaker:
    """Makes this rank's chunks with `maker` and gets the others from the other ranks, in the order of submission.

    Results that all ranks have seen are remembered on all of them, so that rows of later epochs are neither tokenized
    nor exchanged again. All ranks make the same calls, so they remember the same rows."""

    def __init__(self, maker: ChunkMaker, exchange: Exchange, sections: Sequence[SourceSection]) -> None:
        self._maker, self._exchange = maker, exchange
        self.capacity = maker.capacity * exchange.world
        self._remembered = RememberedRows(sections)
        self._waiting: deque[_Chunk] = deque()  # not yet exchanged
        self._outcomes: deque[Outcome] = deque()  # exchanged, not yet returned
        self._num_submitted = 0
        self._unsent: dict[int, Exception] = {}  # own chunks that `maker` did not take
        self._num_exchanged = 0

    def submit(self, rows: RowsOfSources | Exception) -> None:
        """Queues a chunk of rows, or the error that reading ended with."""
        number = self._num_submitted
        self._num_submitted += 1
        if isinstance(rows, Exception):
            self._waiting.append(_Chunk(rows=(), known=(), unknown=(), error=rows))
            return
        known = [self._remembered.get(source, row) for source, row in rows]
        unknown = [each for each, result in zip(rows, known, strict=True) if result is None]
        self._waiting.append(_Chunk(rows=rows, known=known, unknown=unknown))
        if unknown and number % self._exchange.world == self._exchange.rank:
            try:
                self._maker.submit(unknown)
            except Exception as error:
                self._unsent[number] = error

    def result(self, is_stopped: Callable[[], bool]) -> list[RowResult] | None:
        """The oldest chunk's results, or its error on all ranks; None if stopped while waiting. Waits for the chunks of
        its round: for the own one, and for the other ranks, which wait for this one."""
        if not self._outcomes:
            num_chunks = min(self._exchange.world, len(self._waiting))
            outcomes = self._exchange_round([self._waiting.popleft() for _ in range(num_chunks)], is_stopped)
            if outcomes is None:
                return None
            self._outcomes.extend(outcomes)
        outcome = self._outcomes.popleft()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        """Ends the processes of the own maker, if there are any."""
        self._maker.close()

    def _exchange_round(self, chunks: Sequence[_Chunk], is_stopped: Callable[[], bool]) -> list[Outcome] | None:
        first, self._num_exchanged = self._num_exchanged, self._num_exchanged + len(chunks)
        if not any(chunk.unknown for chunk in chunks):  # on all ranks, unless reading ended here
            return [chunk.join(()) if chunk.error is None else chunk.error for chunk in chunks]
        made: EncodedResults | Exception | None = None
        own_results: list[RowResult] | None = None
        rank = self._exchange.rank
        if rank < len(chunks) and chunks[rank].unknown:
            try:
                own_results = self._own(first + rank, is_stopped)
            except Exception as error:
                made = sendable(error)
            else:
                if own_results is None:
                    return None
                made = encode_results(own_results)
        ended = next(
            ((first + at, sendable(chunk.error)) for at, chunk in enumerate(chunks) if chunk.error is not None), None
        )
        part = _Part(first=first, rows=_checksum(chunks), made=made, ended=ended)
        try:
            received = self._exchange.all_gather(pickle.dumps(part, protocol=5), is_stopped)
        except Exception as error:  # of another rank, which may have had no need of this round
            complete = takewhile(lambda chunk: not chunk.unknown and chunk.error is None, chunks)
            return [*(chunk.join(()) for chunk in complete), error]
        if received is None:
            return None
        parts = [part if at == rank else pickle.loads(each) for at, each in enumerate(received)]
        return self._joined(chunks, parts, own_results)

    def _own(self, number: int, is_stopped: Callable[[], bool]) -> list[RowResult] | None:
        if number in self._unsent:
            raise self._unsent[number]
        return self._maker.result(is_stopped)

    def _joined(
        self, chunks: Sequence[_Chunk], parts: Sequence[_Part], own_results: list[RowResult] | None
    ) -> list[Outcome]:
        """The outcome of each chunk of a round. From where reading ended on any rank, that error."""
        ended = min((part.ended for part in parts if part.ended is not None), key=lambda end: end[0], default=None)
        own = parts[self._exchange.rank]
        others = [rank for rank, part in enumerate(parts) if (part.first, part.rows) != (own.first, own.rows)]
        if ended is None and others:
            raise DataError(
                f"data.train: rank {others[0]} reads other rows than rank {self._exchange.rank}, so they cannot share "
                "the work of tokenizing. All ranks must see the same files: look whether a file differs between nodes, "
                "or changed while the run started."
            )
        outcomes: list[Outcome] = []
        for at, (chunk, part) in enumerate(zip(chunks, parts, strict=False)):
            if ended is not None and own.first + at >= ended[0]:
                outcomes.append(ended[1])
            elif isinstance(part.made, Exception):
                outcomes.append(part.made)
            elif not chunk.unknown:
                outcomes.append(chunk.join(()))
            else:
                assert part.made is not None
                is_own = at == self._exchange.rank and own_results is not None
                results = own_results if is_own else decode_results(part.made, [source for source, _ in chunk.unknown])
                assert results is not None
                for (source, row), result in zip(chunk.unknown, results, strict=True):
                    self._remembered.add(source, row, result)
                outcomes.append(chunk.join(results))
        return outcomes


def _checksum(chunks: Sequence[_Chunk]) -> int:
    """Of the places of a round's rows. Without folders: nodes may keep the same files in different ones."""
    return zlib.crc32("\n".join([f"{source} {_place(row)}" for chunk in chunks for source, row in chunk.rows]).encode())


def _place(row: Row) -> str:
    place = row.place
    if isinstance(place, LinePlace):
        return f"{place.file.rpartition('/')[2]} {place.byte}"
    return place.rpartition("/")[2]
