# SPDX-License-Identifier: Apache-2.0
"""Runs reward functions: in a thread that makes one call after the other, or in an event loop in a thread.

Neither can be stopped from outside when user code hangs in it. It is abandoned as a daemon, and its late results are
dropped. In a run, all of this is in a process that can be killed: see hosted_grading.py."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from podium.environments.activity import Mark
from podium.environments.rewards import Reward, RewardResult, Sample
from podium.errors import PodiumError, what_raised

_CLOSING_S = 2.0


class Work:
    """The calls of one reward for one batch, and their results. A result is written once; late ones are dropped."""

    def __init__(
        self,
        reward: Reward,
        batches: Sequence[Sequence[Sample]],
        *,
        marks: Callable[[int], Mark] | None = None,
        on_settled: Callable[[int, list[RewardResult]], None] | None = None,
    ) -> None:
        """`marks` gives the context around each call, by position; `on_settled` gets each result, in any thread."""
        self.reward = reward
        self.batches = batches
        self.results: list[list[RewardResult] | None] = [None] * len(batches)
        self._marks, self._on_settled = marks, on_settled

    @property
    def is_done(self) -> bool:
        """Whether every call has a result."""
        return all(result is not None for result in self.results)

    def tell(self, position: int) -> None:
        """Reports a written result. May wait for the thread that awaits the grading, so it must not be called with a
        lock that this thread takes."""
        outcomes = self.results[position]
        if self._on_settled is not None and outcomes is not None:
            self._on_settled(position, outcomes)

    def fail(self, position: int, failure: str) -> None:
        """Sets a failure as the result of one call."""
        self.results[position] = [RewardResult(None, failure)] * len(self.batches[position])

    def only(self, position: int) -> Work:
        """A single call of this work; its result also counts for this work."""
        marks = self._marks

        def settled(_: int, outcomes: list[RewardResult]) -> None:
            self.results[position] = outcomes
            self.tell(position)

        return Work(
            self.reward,
            [self.batches[position]],
            marks=None if marks is None else lambda _: marks(position),
            on_settled=settled,
        )

    def fail_rest(self, failure: str) -> None:
        """Sets a failure as the result of every call that has none."""
        for position, result in enumerate(self.results):
            if result is None:
                self.fail(position, failure)

    def failed(self, position: int, error: BaseException) -> list[RewardResult]:
        """The outcomes of a call that raised."""
        return [RewardResult(None, _describe_error(error))] * len(self.batches[position])

    def called(self, position: int) -> list[RewardResult]:
        """Makes the call in this thread."""
        batch = self.batches[position]
        try:
            with contextlib.nullcontext() if self._marks is None else self._marks(position):
                returned = self.reward.call(batch)
                if inspect.isawaitable(returned):  # a plain function that hands on a coroutine
                    returned = asyncio.run(_awaited(returned))
                return self.reward.outcomes(returned, len(batch))
        except BaseException as error:  # user code: exit() must not end the grading either
            return self.failed(position, error)

    async def awaited(self, position: int) -> list[RewardResult]:
        """Calls an asynchronous reward function and awaits its outcomes."""
        batch = self.batches[position]
        try:
            called = self.reward.call(batch)
            returned = await (called if self._marks is None else self._marks(position).driven(called))
            return self.reward.outcomes(returned, len(batch))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # exit() would end the loop and every other call in it
            return self.failed(position, error)


class SyncLane:
    """A thread that makes calls in order, starting at a given one, until it is abandoned."""

    def __init__(self, work: Work, begin: int, home: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._position, self._since = begin, time.monotonic()
        self._home, self._done = home, asyncio.Event()
        self._left = False
        self._lock = threading.Lock()  # the current call, its start, and whether its result still counts
        self._thread = threading.Thread(target=self._run, name=f"reward {work.reward.name}", daemon=True)

    @property
    def num_stuck(self) -> int:
        """1 while the thread runs a call that was given up."""
        return int(self._thread.is_alive())

    async def run(self, timeout_s: float) -> int | None:
        """Waits until all calls are made, or one has taken longer than `timeout_s`: then the thread is abandoned, and
        the position of that call is returned."""
        self._thread.start()
        while not self._done.is_set():
            with self._lock:
                left_s = self._since + timeout_s - time.monotonic()
                if left_s <= 0:
                    if self._position == len(self._work.batches):  # all is done, and the news is on its way
                        return None
                    self._left = True
                    return self._position
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), left_s)
        return None

    def leave(self) -> None:
        """Abandons the thread, which ends after its current call."""
        with self._lock:
            self._left = True

    def _run(self) -> None:
        results, position = self._work.results, self._position
        while position < len(results):
            outcomes = self._work.called(position) if results[position] is None else None
            with self._lock:
                if self._left:
                    return
                if outcomes is not None:
                    results[position] = outcomes
                self._position, self._since = position + 1, time.monotonic()
            if outcomes is not None:
                self._work.tell(position)
            position += 1
        with contextlib.suppress(RuntimeError):  # the loop that waited is closed
            self._home.call_soon_threadsafe(self._done.set)


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Why a batch has to go on in another lane: a call blocks the event loop of this one.

    `culprits` are the calls of the batch that block it; none if another batch does. `is_unknown`: the batches of the
    lane are all suspects, so each should go on in a lane of its own."""

    culprits: list[int]
    is_unknown: bool = False


class AsyncLane:
    """An event loop in a thread, for any number of batches at a time, which share the limit of calls in flight. It is
    kept from batch to batch: clients that a function opened in it stay open.

    `run`, `stop` and `close` belong to the thread that grades, the other methods to the loop's thread."""

    def __init__(self, most_at_once: int) -> None:
        """`most_at_once`: calls in flight, over all batches."""
        self._most_at_once = most_at_once
        self._loop = asyncio.new_event_loop()
        self._overdue: list[asyncio.Task[list[RewardResult]]] = []
        self._batches: list[_OpenCalls] = []
        self._waiting: deque[_OpenCalls] = deque()  # batches with calls that have not begun, in order of arrival
        self._num_open = self._num_settled = self._num_beats = 0
        self._thread = threading.Thread(target=self._run, name="reward event loop", daemon=True)
        self._thread.start()
        self._blocked = False

    @property
    def num_stuck(self) -> int:
        """Calls that were given up and still run."""
        return sum(not task.done() for task in list(self._overdue)) + int(self._blocked and self._thread.is_alive())

    async def run(self, work: Work, timeout_s: float, too_slow: str) -> Abandoned | None:
        """Waits until all open calls of the work have a result. A call that takes longer than `timeout_s` is cancelled
        and fails. When the loop stays in a single call for that long, the call blocks it: the lane is abandoned by all
        of its batches, and a new one must be used for what is left."""
        batch = _OpenCalls(self, self._loop, work, timeout_s, too_slow)
        self._batches.append(batch)
        self._loop.call_soon_threadsafe(self._begin, batch)
        seen, since = self._glimpse(), time.monotonic()
        try:
            while not batch.is_over:
                await _set_within(batch.news, timeout_s / 4)
                batch.news.clear()
                if (now := self._glimpse()) != seen:
                    seen, since = now, time.monotonic()
                elif not batch.is_over and time.monotonic() - since >= timeout_s:
                    self._abandon()
                with contextlib.suppress(RuntimeError):  # the loop was abandoned, and is closed
                    self._loop.call_soon_threadsafe(self._beat)
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(batch.cancel)
            raise
        finally:
            self._batches.remove(batch)
        return batch.abandoned

    def stop(self) -> None:
        """Ends the loop's thread as soon as user code lets it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._loop.stop)

    def close(self) -> None:
        """Ends the loop's thread; waits for it, but not for user code that does not end."""
        self.stop()
        self._thread.join(_CLOSING_S)
        self._blocked = self._thread.is_alive()
        self._overdue.clear()  # what would not be cancelled lies still now

    def add_overdue(self, task: asyncio.Task[list[RewardResult]]) -> None:
        """Adds a call that was given up, and still runs."""
        self._overdue[:] = [each for each in self._overdue if not each.done()]
        self._overdue.append(task)

    def go_on(self) -> None:
        """A call is over: its place is given to the next one."""
        self._num_open -= 1
        self._num_settled += 1
        self._fill()

    def _begin(self, batch: _OpenCalls) -> None:
        self._waiting.append(batch)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self._num_open < self._most_at_once:
            if self._waiting[0].begin_next():
                self._num_open += 1
            else:
                self._waiting.popleft()

    def _beat(self) -> None:
        self._num_beats += 1

    def _glimpse(self) -> tuple[asyncio.Task[Any] | None, int, int]:
        """The task that the loop runs now, the number of finished calls, and the number of loop iterations since
        counting began. While the loop runs, one of them changes."""
        return asyncio.current_task(self._loop), self._num_settled, self._num_beats

    def _abandon(self) -> None:
        """Leaves the loop to the call that blocks it: no batch gets a result from it any more."""
        self._blocked = True
        running = asyncio.current_task(self._loop)
        open_calls = {batch: batch.leave() for batch in self._batches}
        culprits = {batch: [calls[running]] for batch, calls in open_calls.items() if running and running in calls}
        is_known = bool(culprits) or running in self._overdue  # a call that was given up has its result: a failure
        if not is_known and len(open_calls) == 1:
            culprits = {batch: list(calls.values()) for batch, calls in open_calls.items()}
            is_known = True
        for batch in self._batches:
            batch.abandoned = Abandoned(culprits.get(batch, []), is_unknown=not is_known)
            batch.news.set()
        self.stop()  # when the call returns after all, the others must not go on here too

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        with contextlib.suppress(Exception):
            open_tasks = asyncio.all_tasks(self._loop)
            for task in open_tasks:
                task.cancel()
            if open_tasks:
                self._loop.run_until_complete(asyncio.wait(open_tasks, timeout=_CLOSING_S / 2))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class _OpenCalls:
    """The calls of one batch in a lane. Methods run in the loop's thread unless they say otherwise."""

    def __init__(
        self, lane: AsyncLane, loop: asyncio.AbstractEventLoop, work: Work, timeout_s: float, too_slow: str
    ) -> None:
        self._lane, self._loop, self._work = lane, loop, work
        self._timeout_s, self._too_slow = timeout_s, too_slow
        waiting = [position for position, result in enumerate(work.results) if result is None]
        self._waiting, self._num_left = iter(waiting), len(waiting)
        self._open: dict[asyncio.Task[Any], int] = {}
        self._left = False
        self._lock = threading.Lock()  # between the loop's thread and `leave`
        self._home = asyncio.get_running_loop()
        # For the loop that waits:
        self.news = asyncio.Event()
        self.abandoned: Abandoned | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for. From any thread."""
        return self._work.is_done or self.abandoned is not None

    def begin_next(self) -> bool:
        """Begins the next call. False if there is none."""
        position = None if self._left else next(self._waiting, None)
        if position is None:
            return False
        task = self._loop.create_task(self._timed(position))
        with self._lock:
            self._open[task] = position
        task.add_done_callback(self._finished)
        return True

    def cancel(self) -> None:
        """Ends all calls; their results are dropped."""
        self._left = True
        for task in self._open:
            task.cancel()

    def leave(self) -> dict[asyncio.Task[Any], int]:
        """Writes nothing from here on. Returns the open calls. From any thread."""
        with self._lock:
            self._left = True
            return dict(self._open)

    async def _timed(self, position: int) -> list[RewardResult]:
        # The deadline counts from here and not from the task's creation: other tasks may have run in between.
        task = asyncio.current_task()
        assert task is not None
        timer = self._loop.call_later(self._timeout_s, self._late, task)
        try:
            return await self._work.awaited(position)
        finally:
            timer.cancel()

    def _finished(self, task: asyncio.Task[list[RewardResult]]) -> None:
        with self._lock:
            position, counts = self._open.pop(task, None), not self._left
            if position is None:
                return  # it was given up before
            if counts and task.cancelled():
                self._work.fail(position, "cancelled itself")
            elif counts:
                self._work.results[position] = task.result()
        self._go_on(position, counts)

    def _late(self, task: asyncio.Task[list[RewardResult]]) -> None:
        with self._lock:
            position, counts = self._open.pop(task, None), not self._left
            if position is None:
                return
            if counts:
                self._work.fail(position, self._too_slow)
        self._lane.add_overdue(task)
        task.cancel()
        self._go_on(position, counts)

    def _go_on(self, position: int, counts: bool) -> None:
        if counts:
            self._work.tell(position)
            self._num_left -= 1
            if not self._num_left:
                with contextlib.suppress(RuntimeError):  # the loop that waited is closed
                    self._home.call_soon_threadsafe(self.news.set)
        self._lane.go_on()


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


async def _set_within(event: asyncio.Event, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()


def _describe_error(error: BaseException) -> str:
    """Podium's own errors keep their text."""
    return f"cannot tell: {error}" if isinstance(error, PodiumError) else what_raised(error)
