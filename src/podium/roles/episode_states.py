# SPDX-License-Identifier: Apache-2.0
"""Notes what the episodes of a runner wait for: generators, tools, or prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from podium.cluster import WorkerContext
from podium.cluster.deadlines import wall_s
from podium.observe.causes import FOR_GENERATION, FOR_PROMPTS, FOR_TOOLS
from podium.observe.timeline import TAIL

# A state that lasts less is part of the next one: episodes of many short turns would write a span for each.
_SHORTEST_S = 0.02
# A state that lasts longer is written in parts.
_LONGEST_S = 1.0


class EpisodeStates:
    """Used by the thread of the runner's event loop. A runner waits for generation as long as one episode does, and for
    tools (or another part of its environment) if all that run wait for those. The tail: it waits for generation, no
    episode is to begin, and at most half of the most that ran at once are left."""

    def __init__(self, context: WorkerContext, clock: Callable[[], float] = wall_s) -> None:
        self._context, self._clock = context, clock
        self._num_open = self._num_generating = self._most_open = 0
        self._state, self._since_s = FOR_PROMPTS, 0.0
        self._ended: list[tuple[str, float, float]] = []

    def begin_stream(self) -> None:
        """A stream begins, without episodes."""
        self._num_open = self._num_generating = self._most_open = 0
        self._state, self._since_s = FOR_PROMPTS, self._clock()

    def begin_episode(self) -> None:
        """An episode begins."""
        self._num_open += 1
        self._most_open = max(self._most_open, self._num_open)
        self._change()

    def end_episode(self) -> None:
        """An episode has ended."""
        self._num_open = max(0, self._num_open - 1)
        self._change()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """An episode waits for a generator."""
        self._num_generating += 1
        self._change()
        try:
            yield
        finally:
            self._num_generating -= 1
            self._change()

    def write(self) -> None:
        """Adds the spans that have ended. Call it where the span of the stream is open: outside of tasks."""
        now_s = self._clock()
        if now_s - self._since_s >= _LONGEST_S:
            self._ended.append((self._state, self._since_s, now_s))
            self._since_s = now_s
        for name, begin_s, end_s in self._ended:
            self._context.add_span(name, begin_s, end_s)
        self._ended.clear()

    def end_stream(self) -> None:
        """The stream is over."""
        now_s = self._clock()
        self._ended.append((self._state, self._since_s, now_s))
        self._since_s = now_s
        self.write()

    def _change(self) -> None:
        state = self._now()
        if state == self._state:
            return
        now_s = self._clock()
        if now_s - self._since_s >= _SHORTEST_S:
            self._ended.append((self._state, self._since_s, now_s))
            self._since_s = now_s
        self._state = state

    def _now(self) -> str:
        if not self._num_open:
            return FOR_PROMPTS
        if not self._num_generating:
            return FOR_TOOLS
        return TAIL if 2 * self._num_open <= self._most_open else FOR_GENERATION
