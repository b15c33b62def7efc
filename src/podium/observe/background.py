# SPDX-License-Identifier: Apache-2.0
"""A tracker behind a thread and a bounded queue: neither its failures nor its silence stop or delay a run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from podium.errors import counted
from podium.observe.machine import MachineFigures
from podium.observe.metrics import StepMetrics
from podium.observe.tracking import Row, Tracker, error_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long and how much a tracker may keep a run waiting."""

    most_waiting: int = 5000  # records; every row of a table counts as one
    tries: int = 3
    pause_s: float = 2.0  # before the second try; four times as long before each further one
    silence_s: float = 60.0  # of one call, until the user is warned
    close_s: float = 60.0  # of the end of a run, or of one call, until the run ends without what still waits


@dataclass(frozen=True, slots=True)
class _Record:
    send: Callable[[Tracker], None]
    weight: int


class BackgroundLogger:
    """Passes records on in their order. The caller's methods return at once, and only they call `warn`.

    The thread consumes `_waiting`, and waits for records or for `begin_close`; it alone calls the tracker. A call that
    raises is tried again, then the record is dropped. A tracker that cannot be opened is off."""

    def __init__(
        self, name: str, open: Callable[[], Tracker], *, warn: Callable[[str], None], limits: Limits | None = None
    ) -> None:
        self._name, self._open, self._warn, self._limits = name, open, warn, limits or Limits()
        self._changed = threading.Condition()
        self._waiting: deque[_Record] = deque()
        self._weight = self._num_lost = 0
        self._closing = threading.Event()
        self._failed, self._close_by_s = False, 0.0  # whether the run failed, as `begin_close` says
        self._messages: deque[str] = deque()
        self._has_failed_before = self._silence_is_told = False
        self._calling_since: float | None = None
        self._machine = MachineFigures()
        # A daemon: a tracker that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: StepMetrics) -> None:
        """Queues the metrics of one step."""
        self._put(_Record(partial(self._send_metrics, metrics), 1))

    def text(self, step: int, name: str, text: str) -> None:
        """Queues a text."""
        self._put(_Record(lambda tracker: tracker.text(step, name, text), 1))

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Queues a table."""
        self._put(_Record(lambda tracker: tracker.table(step, name, rows), 1 + len(rows)))

    def begin_close(self, *, failed: bool = False) -> None:
        """Says that no record follows."""
        with self._changed:
            now_s, since = time.monotonic(), self._calling_since
            # A call that has lasted as long already gets little more: a run that recovers closes its log several times.
            spent_s = 0.0 if since is None else min(now_s - since, 0.9 * self._limits.close_s)
            self._failed, self._close_by_s = failed, now_s + self._limits.close_s - spent_s
            self._closing.set()
            self._changed.notify_all()

    def close(self) -> None:
        """Waits until everything is sent, or the limit since `begin_close` has passed."""
        if not self._closing.is_set():
            self.begin_close()
        self._thread.join(max(0.0, self._close_by_s - time.monotonic()))
        with self._changed:
            is_stuck = self._thread.is_alive()
            num_lost = self._num_lost + len(self._waiting) + is_stuck
        self._report()
        if is_stuck:
            self._warn(
                f"{self._name} has not taken everything within {self._limits.close_s:g} s. The run ends without it; "
                f"{counted(num_lost, 'record')} may be missing there. metrics.jsonl has all metrics."
            )
        elif num_lost:
            self._warn(f"{counted(num_lost, 'record')} missing at {self._name}. metrics.jsonl has all metrics.")

    def _put(self, record: _Record) -> None:
        with self._changed:
            self._waiting.append(record)
            self._weight += record.weight
            while self._weight > self._limits.most_waiting and len(self._waiting) > 1:
                self._weight -= self._waiting.popleft().weight
                self._num_lost += 1
            self._changed.notify_all()
        self._report()

    def _report(self) -> None:
        """Shows what the thread has to say; a console is not made for several threads."""
        while self._messages:
            self._warn(self._messages.popleft())
        since = self._calling_since
        if not self._silence_is_told and since is not None and time.monotonic() - since > self._limits.silence_s:
            self._silence_is_told = True
            self._warn(
                f"{self._name} has not answered for {self._limits.silence_s:g} s. Training goes on, and records wait "
                f"(at most {self._limits.most_waiting}; the oldest are dropped first)."
            )

    def _work(self) -> None:
        opened: list[Tracker] = []
        if not self._tried(lambda: opened.append(self._open())):
            self._messages.append(f"{self._name} is off for the rest of this run. metrics.jsonl has all metrics.")
            self._drop_all()
            return
        tracker = opened[0]
        while (record := self._next()) is not None:
            if not self._tried(partial(record.send, tracker)):
                with self._changed:
                    self._num_lost += 1
        self._tried(lambda: tracker.close(failed=self._failed), tries=1)

    def _next(self) -> _Record | None:
        """The next record; None: no further one comes."""
        with self._changed:
            while not self._waiting and not self._closing.is_set():
                self._changed.wait()
            if not self._waiting:
                return None
            record = self._waiting.popleft()
            self._weight -= record.weight
            return record

    def _drop_all(self) -> None:
        """Counts records until the run ends."""
        while self._next() is not None:
            with self._changed:
                self._num_lost += 1

    def _tried(self, call: Callable[[], None], *, tries: int | None = None) -> bool:
        """Calls the tracker, several times if it raises. Returns whether that worked."""
        for attempt in range(tries or self._limits.tries):
            if attempt:
                self._closing.wait(self._limits.pause_s * 4 ** (attempt - 1))
            self._calling_since = time.monotonic()
            try:
                call()
            except BaseException as error:  # also SystemExit, which would end this thread without a word
                self._note(error)
            else:
                return True
            finally:
                self._calling_since = None
        return False

    def _note(self, error: BaseException) -> None:
        if not self._has_failed_before:
            self._has_failed_before = True
            self._messages.append(
                f"{self._name} failed: {error_text(error)}. Training goes on; what it does not take is tried again, "
                "then dropped. Further failures are not shown."
            )

    def _send_metrics(self, metrics: StepMetrics, tracker: Tracker) -> None:
        """With the figures of this machine, if they are due."""
        figures = self._machine.due()
        tracker.log(replace(metrics, values={**metrics.values, **figures}) if figures else metrics)
