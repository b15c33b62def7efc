# SPDX-License-Identifier: Apache-2.0
"""Shared memory that shows what a process with user code is doing. The parent can read it when the process hangs or
dies."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Any, Self

_BEATS, _ENTRIES, _OVER_BYTES, _FIRST_SLOT = 0, 1, 2, 3
_WORD = 8


class Activity:
    """Counters and slots in a shared file. The child writes them, the parent reads them.

    A slot belongs to one unit of user code: an episode, or a reward function. It is nonzero while that code runs.
    `progress` changes as long as the child's event loop runs or enters user code."""

    OVER_AT = _OVER_BYTES * _WORD
    """Where in the file a supervisor writes `over_bytes`."""

    def __init__(self, file: int, num_slots: int, on_leave: Callable[[], None] | None = None) -> None:
        """`on_leave` is called in the child whenever user code has returned, before that is written."""
        self._on_leave = on_leave
        self._map = mmap.mmap(file, self.num_bytes(num_slots))
        self._words = memoryview(self._map).cast("q")
        self._num_slots = num_slots
        self._lock = threading.Lock()  # threads of the child; the parent only reads

    @staticmethod
    def num_bytes(num_slots: int) -> int:
        """Size of the shared file for this many slots."""
        return (_FIRST_SLOT + num_slots) * _WORD

    def beat(self) -> None:
        """Counts one beat: the event loop of the process runs."""
        self._words[_BEATS] += 1

    def enter(self, slot: int, value: int | None) -> None:
        """Sets the slot to a value, or counts it up without one: an episode can be in its coroutine and in threads."""
        with self._lock:
            self._words[_ENTRIES] += 1
            self._words[_FIRST_SLOT + slot] = self._words[_FIRST_SLOT + slot] + 1 if value is None else value

    def leave(self, slot: int, value: int | None) -> None:
        """Marks that user code of a slot has returned; `value` is the one given to `enter`."""
        if self._on_leave is not None:
            self._on_leave()
        with self._lock:
            if value is None:
                self._words[_FIRST_SLOT + slot] -= 1
            elif self._words[_FIRST_SLOT + slot] == value:  # not the value of a newer call, after one that was given up
                self._words[_FIRST_SLOT + slot] = 0

    @property
    def progress(self) -> tuple[int, int]:
        """(beats, entries) so far. A parent that sees neither grow knows that user code blocks the process."""
        return self._words[_BEATS], self._words[_ENTRIES]

    @property
    def over_bytes(self) -> int:
        """The memory of the child and its children when it was above their limit; 0: it was not."""
        return self._words[_OVER_BYTES]

    @property
    def running(self) -> Mapping[int, int]:
        """Slots whose user code runs now, or ran when the process died."""
        values = self._words[_FIRST_SLOT : _FIRST_SLOT + self._num_slots].tolist()
        return {slot: value for slot, value in enumerate(values) if value}


class Mark:
    """A context around user code: its slot is set while it runs."""

    def __init__(self, activity: Activity, slot: int, value: int | None = None) -> None:
        self._activity, self._slot, self._value = activity, slot, value

    def __enter__(self) -> Self:
        self._activity.enter(self._slot, self._value)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activity.leave(self._slot, self._value)

    def driven(self, awaitable: Awaitable[Any]) -> Awaitable[Any]:
        """The same awaitable; its slot is set while its own code runs, and not while it waits."""
        return _Driven(awaitable, self)


class _Driven:
    def __init__(self, awaitable: Awaitable[Any], mark: Mark) -> None:
        self.awaitable, self._mark = awaitable, mark

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self.awaitable.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                with self._mark:
                    signal = inner.send(value) if error is None else inner.throw(error)
            except StopIteration as stop:
                return stop.value
            try:
                value, error = (yield signal), None
            except BaseException as raised:  # cancellation, for instance, which user code can catch
                value, error = None, raised


def driven_in(frame: FrameType) -> Awaitable[Any] | None:
    """The user's awaitable that a frame of `Mark.driven` runs; None: it is a frame of something else."""
    driven = frame.f_locals.get("self")
    return driven.awaitable if isinstance(driven, _Driven) else None


# Of the user code that this task or thread runs; None if it is not tracked.
MARK: ContextVar[Mark | None] = ContextVar("MARK", default=None)
