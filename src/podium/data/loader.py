# SPDX-License-Identifier: Apache-2.0
"""Prepares steps of examples in the background: reads, tokenizes and packs while the last step trains."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from podium.data.composing import RowChunk, StepComposer, StepSize, chunk_rows, first_state
from podium.data.documents import Example
from podium.data.examples import MakerSpec
from podium.data.exchange import Exchange
from podium.data.sharing import SharedMaker
from podium.data.skipping import SkippedRow, SkipPolicy
from podium.data.sources import Source
from podium.data.state import DocumentCounts, LoaderState, decode, encode
from podium.data.stream import MixedStream
from podium.data.workers import ChunkMaker, InlineMaker, TokenizerPool
from podium.errors import DataError
from podium.progress import mark_progress, mark_progress_of

__all__ = ["DocumentCounts", "LoaderState", "StepExamples", "StepLoader", "StepSize", "decode", "encode"]

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_WARN_AFTER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepExamples:
    """The examples of one optimizer step over all ranks, in order, and the loader's state right after it."""

    examples: tuple[Example, ...]
    state: LoaderState
    wait_s: float  # how long the consumer waited for it
    skipped: tuple[SkippedRow, ...] = ()  # rows that were skipped since the step before

    @property
    def counts(self) -> DocumentCounts:
        """The counts after this step."""
        return self.state.counts

    @property
    def num_trained(self) -> int:
        """Tokens with a loss in this step."""
        return sum(example.num_trained for example in self.examples)


_Composed = tuple[tuple[Example, ...], LoaderState, tuple[SkippedRow, ...]]


class StepLoader:
    """Yields steps forever. Close it, or use it as a context manager.

    The steps depend on sources, seed and packing alone, not on `workers`, `prefetch` or the number of ranks. From the
    state of any step a new loader gives exactly the steps that follow it. With an `exchange` every rank has a loader
    of the same steps, and they share the work of tokenizing."""

    def __init__(
        self, sources: Sequence[Source], maker_spec: MakerSpec, *, seed: int, shuffle: bool, shuffle_rows: int,
        size: StepSize, window: int, workers: int, prefetch: int, state: LoaderState | None = None,
        policy: SkipPolicy | None = None, exchange: Exchange | None = None,
    ) -> None:  # fmt: skip
        assert len(sources) == len(maker_spec.sections)
        if maker_spec.max_length > size.tokens and size.rows is None:
            raise DataError(
                f"data.max_length: documents of up to {maker_spec.max_length} tokens do not fit tokens_per_step "
                f"{size.tokens}. Lower data.max_length or raise tokens_per_step."
            )
        self._stream = MixedStream(
            sources, [section.weight for section in maker_spec.sections], seed=seed, shuffle=shuffle,
            shuffle_rows=shuffle_rows, position=state.position if state else None,
        )  # fmt: skip
        self._composer = StepComposer(
            [source.name for source in sources], size, window, state or first_state(self._stream.position), policy
        )
        # The same for any number of workers, so that the state after a step is the same too.
        self._chunk_rows = chunk_rows(window)
        self._spec, self._num_workers, self._sources = maker_spec, workers, tuple(sources)
        self._exchange = exchange
        self._steps: queue.Queue[_Composed | BaseException] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        self._doing = "starting"
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._produce, name="podium-loader", daemon=True)
        self._thread.start()

    @property
    def notes(self) -> list[str]:
        """What reading changed in the rows so far, for the user."""
        return [source.note for source in self._sources if source.note is not None]

    def __iter__(self) -> Iterator[StepExamples]:
        return self

    def __next__(self) -> StepExamples:
        """Waits for the producer thread, which ends the wait with a step or with its exception. Warns when it takes
        long, and raises an error when the thread is gone."""
        if self._failure is not None:
            raise self._failure
        begun_s = time.monotonic()
        warn_at_s = begun_s + _WARN_AFTER_S
        while True:
            try:
                item = self._steps.get(timeout=_POLL_S)
                break
            except queue.Empty:
                pass
            mark_progress_of(self._thread.ident)
            if self._stop.is_set():
                raise RuntimeError("the loader is closed")
            if not self._thread.is_alive() and self._steps.empty():
                raise RuntimeError(f"the loader's thread is gone; it was last {self._doing}")
            if time.monotonic() > warn_at_s:
                waited_s = time.monotonic() - begun_s
                _LOG.warning("waiting for data for %.0f s: the loader is %s", waited_s, self._doing)
                warn_at_s += _WARN_AFTER_S
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        examples, state, skipped = item
        return StepExamples(examples=examples, state=state, wait_s=time.monotonic() - begun_s, skipped=skipped)

    def close(self) -> None:
        """Ends the thread and the worker processes; a second call does nothing."""
        self._stop.set()
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            _LOG.warning("the loader's thread is still %s; it ends with the process", self._doing)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _produce(self) -> None:
        """Consumes the stream, fills the queue of steps. Waits for room in the queue (freed by the consumer) and for
        the makers of documents, which may wait for other ranks; `close` ends all waits."""
        maker: ChunkMaker | None = None
        try:
            self._doing = "loading the tokenizer"
            maker = TokenizerPool(self._spec, self._num_workers) if self._num_workers else InlineMaker(self._spec)
            if self._exchange is not None:
                maker = SharedMaker(maker, self._exchange, self._spec.sections)
            mark_progress()
            under_way: deque[RowChunk | Exception] = deque()
            while not self._stop.is_set():
                if not self._composer.is_ready:
                    self._add_chunk(maker, under_way)
                    continue
                self._doing = "packing a step"
                self._put((*self._composer.take(), self._composer.take_skipped()))
        except BaseException as error:
            if self._exchange is not None:
                self._exchange.fail(error)
            self._put(error)
        finally:
            if maker is not None:
                maker.close()

    def _add_chunk(self, maker: ChunkMaker, under_way: deque[RowChunk | Exception]) -> None:
        """Keeps all makers busy, and adds the oldest chunk to the packing buffer."""
        while len(under_way) < maker.capacity and not (under_way and isinstance(under_way[-1], Exception)):
            chunk = self._next_chunk()
            under_way.append(chunk)
            maker.submit(chunk if isinstance(chunk, Exception) else [(each.source, each.row) for each in chunk.rows])
        self._doing = "tokenizing" if self._exchange is None else "tokenizing, or waiting for rows of other ranks"
        oldest, examples = under_way.popleft(), maker.result(self._stop.is_set)
        if examples is not None:
            assert isinstance(oldest, RowChunk)
            self._composer.add(oldest, examples)

    def _next_chunk(self) -> RowChunk | Exception:
        """A chunk, or the error from reading it. The error is raised when its step is due, so that reading ahead with
        many workers loses no earlier step."""
        self._doing = "reading rows"
        try:
            rows = tuple(self._stream.draw() for _ in range(self._chunk_rows))
        except Exception as error:
            return error
        return RowChunk(rows=rows, position=self._stream.position)

    def _put(self, item: _Composed | BaseException) -> None:
        self._doing = "waiting for the trainer to take a step"
        while not self._stop.is_set():
            try:
                self._steps.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue
