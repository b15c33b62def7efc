# SPDX-License-Identifier: Apache-2.0
"""Records what each thread of a worker is doing now, since when, and its spans since the last reply."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from podium.cluster.deadlines import wall_s
from podium.cluster.identity import WorkerId
from podium.cluster.results import Span
from podium.observe.timing import NESTED

_DEEPEST = 30
_MOST_SPANS = 10_000
_HOST = str(Path(__file__).with_name("host.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPlace:
    """Where a thread is: its open spans, outermost first, and its stack, innermost call last."""

    thread: str
    span: str  # "" when it is in none
    stack: tuple[str, ...]

    def __str__(self) -> str:
        title = f"  thread {self.thread}" + (f", in {self.span}" if self.span else "")
        return "\n".join([title, *(f"    {frame}" for frame in self.stack)])


class SpanRecorder:
    """Spans of all threads of one worker. Opening and closing cost microseconds, and nothing is locked."""

    def __init__(self) -> None:
        # By thread, and by task of its event loop: tasks open and close spans in any order.
        self._open: dict[tuple[int, int], list[tuple[str, float]]] = {}
        self._names: dict[int, str] = {}
        self._done: deque[tuple[str, float, float, Mapping[str, float] | None]] = deque(maxlen=_MOST_SPANS)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Accounts the time inside to `name`, under the span that is open in this thread, or in this task of its event
        loop."""
        place = (threading.get_ident(), _task_number())
        mine = self._open.setdefault(place, [])
        path = f"{mine[-1][0]}{NESTED}{name}" if mine else name
        begin_s = wall_s()
        mine.append((path, begin_s))
        try:
            yield
        finally:
            mine.pop()
            if not mine:
                self._open.pop(place, None)
            self._done.append((path, begin_s, wall_s(), None))

    def add(self, name: str, begin_s: float, end_s: float, values: Mapping[str, float] | None = None) -> None:
        """Notes something that has ended, under the span that is open in this thread. What began before that one is cut
        there."""
        mine = self._open.get((threading.get_ident(), _task_number()))
        path, first_s = (f"{mine[-1][0]}{NESTED}{name}", mine[-1][1]) if mine else (name, begin_s)
        if end_s > first_s:
            self._done.append((path, max(begin_s, first_s), end_s, values))

    def name_thread(self, name: str) -> None:
        """Sets the name of this thread in reports."""
        self._names[threading.get_ident()] = name

    def drain(self, worker: WorkerId) -> tuple[Span, ...]:
        """The spans that ended since the last call."""
        done = [self._done.popleft() for _ in range(len(self._done))]  # other threads may add to it meanwhile
        return tuple(Span(name, begin_s, end_s, worker, values) for name, begin_s, end_s, values in done)

    def doing(self, thread: str) -> tuple[str, float]:
        """The innermost open span of a named thread and for how long it has been open; ("", 0.0) when idle."""
        for ident, name in list(self._names.items()):
            open_spans = self._open_in(ident) if name == thread else []
            if open_spans:
                path, since_s = open_spans[-1]
                return path, wall_s() - since_s
        return "", 0.0

    def _open_in(self, ident: int) -> list[tuple[str, float]]:
        """The open spans of a thread; those of one of its tasks, if it runs several."""
        for (thread, _), spans in list(self._open.items()):  # copies: the thread may change both
            if thread == ident and (copied := list(spans)):
                return copied
        return []

    def places(self, *, everyone: bool, with_this: bool = False) -> tuple[ThreadPlace, ...]:
        """All threads of the process, or only those that this worker has named; the one that asks only `with_this`."""
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
        asker = threading.get_ident()
        places = []
        for ident, frame in frames.items():
            if (ident == asker and not with_this) or (not everyone and ident not in self._names):
                continue
            open_spans = self._open_in(ident)
            path = open_spans[-1][0] if open_spans else ""
            name = self._names.get(ident) or names.get(ident, f"thread {ident}")
            places.append(ThreadPlace(thread=name, span=path, stack=_stack(frame)))
        return tuple(sorted(places, key=lambda place: (place.thread != "work", place.thread)))


def _task_number() -> int:
    """Of the task that runs in this thread; 0: no event loop runs here."""
    try:
        return id(asyncio.current_task())
    except RuntimeError:
        return 0


def process_places() -> tuple[ThreadPlace, ...]:
    """All threads of this process."""
    return SpanRecorder().places(everyone=True, with_this=True)


def _stack(frame: FrameType) -> tuple[str, ...]:
    summary = traceback.extract_stack(frame)[-_DEEPEST:]
    # Frames that lead to the role's own code are the same for all workers.
    inside = [at for at, entry in enumerate(summary) if entry.filename == _HOST and entry.name == "_invoke"]
    summary = summary[inside[-1] + 1 :] if inside and inside[-1] + 1 < len(summary) else summary
    return tuple(f"{entry.filename}:{entry.lineno} {entry.name}" for entry in summary)
