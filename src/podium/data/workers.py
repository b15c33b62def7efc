# SPDX-License-Identifier: Apache-2.0
"""Tokenizes rows in the calling thread or in separate processes; the order of results is the same."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Protocol

from podium.data.examples import MakerSpec
from podium.data.results import RowResult
from podium.data.rows import Row
from podium.errors import DataError
from podium.progress import mark_progress
from podium.stack_dumps import allow_dumps

RowsOfSources = Sequence[tuple[int, Row]]  # (source, row)

_POLL_S = 0.2


class ChunkMaker(Protocol):
    """Turns chunks of rows into documents; results come in the order of submission."""

    capacity: int  # how many chunks may be in flight

    def submit(self, rows: RowsOfSources | Exception) -> None:
        """Queues a chunk of rows, or the error that reading ended with; nothing follows that."""

    def result(self, is_stopped: Callable[[], bool]) -> list[RowResult] | None:
        """The oldest chunk's documents, or its error; None if stopped while waiting."""

    def close(self) -> None:
        """Ends the processes, if there are any."""


class InlineMaker:
    """Makes them in the calling thread."""

    capacity = 1

    def __init__(self, spec: MakerSpec) -> None:
        self._maker = spec.build()
        self._waiting: deque[RowsOfSources | Exception] = deque()

    def submit(self, rows: RowsOfSources | Exception) -> None:
        """Queues a chunk of rows, or the error that reading ended with."""
        self._waiting.append(rows)

    def result(self, is_stopped: Callable[[], bool]) -> list[RowResult] | None:
        """Makes the oldest chunk now."""
        rows = self._waiting.popleft()
        if isinstance(rows, Exception):
            raise rows
        examples: list[RowResult] = []
        for source, row in rows:
            if is_stopped():
                return None
            examples.append(self._maker.make(source, row))
        return examples

    def close(self) -> None:
        """Does nothing: there is no process to end."""


class TokenizerPool:
    """Makes them in `num_workers` processes, round-robin: chunk i goes to worker i modulo their number.

    Each worker has one chunk in flight. It waits only for its pipe. The next chunk, `close`, and the death of its
    parent unblock it, so none is left behind."""

    def __init__(self, spec: MakerSpec, num_workers: int) -> None:
        self.capacity = num_workers
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(num_workers):
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(there, spec, number), name=f"podium-tokenizer-{number}", daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._num_submitted = 0
        self._num_received = 0
        self._ended_by: Exception | None = None  # follows the last chunk

    def submit(self, rows: RowsOfSources | Exception) -> None:
        """Sends a chunk of rows to the next worker, or keeps the error that reading ended with."""
        if isinstance(rows, Exception):
            self._ended_by = rows
            return
        assert self._num_submitted - self._num_received < self.capacity
        number = self._num_submitted % self.capacity
        try:
            self._pipes[number].send(rows)
        except OSError as error:
            raise self._died(number) from error
        self._num_submitted += 1

    def result(self, is_stopped: Callable[[], bool]) -> list[RowResult] | None:
        """Waits for the oldest chunk; None if stopped while waiting."""
        if self._ended_by is not None and self._num_received == self._num_submitted:
            raise self._ended_by
        number = self._num_received % self.capacity
        pipe, process = self._pipes[number], self._processes[number]
        while not is_stopped():
            if pipe not in wait([pipe, process.sentinel], timeout=_POLL_S) and process.is_alive():
                continue
            try:
                answer = pipe.recv()
            except (EOFError, OSError) as error:
                raise self._died(number) from error
            self._num_received += 1
            mark_progress()
            if isinstance(answer, BaseException):
                raise answer
            examples: list[RowResult] = answer
            return examples
        return None

    def close(self) -> None:
        """Ends the worker processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join(timeout=5)
        for pipe in self._pipes:
            pipe.close()

    def _died(self, number: int) -> DataError:
        self._processes[number].join(timeout=1)
        return DataError(
            f"tokenizer process {number} ended by itself (exit code {self._processes[number].exitcode}); a negative "
            "code is a signal, -9 most often the system short of memory. Lower data.workers, or set it to 0."
        )


def _work(pipe: Connection, spec: MakerSpec, number: int) -> None:
    """A worker's main loop: waits for chunks on its pipe and answers them in order; ends when the pipe closes."""
    allow_dumps(f"tokenizer {number}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    maker = None
    try:
        while True:
            rows: RowsOfSources = pipe.recv()
            try:
                maker = maker or spec.build()
                answer: object = [maker.make(source, row) for source, row in rows]
            except Exception as error:
                answer = sendable(error)
            pipe.send(answer)
    except (EOFError, OSError):
        return


def sendable(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # exceptions of plug-ins may not survive pickling
        return DataError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    while os.getppid() == parent.pid:
        wait([parent.sentinel], timeout=1.0)
    os._exit(1)
