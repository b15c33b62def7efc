# SPDX-License-Identifier: Apache-2.0
"""Sums up the steps of an engine about once a second, as spans of its generator."""

from __future__ import annotations

from collections.abc import Callable

from podium.cluster import WorkerContext
from podium.cluster.deadlines import wall_s
from podium.observe.timeline import STEPS, TAIL
from podium.rollout.engine import Load

# Of one span. A change to or from the tail ends it earlier.
_LONGEST_S = 1.0
_SHORTEST_S = 0.05
# Between two looks at the engine.
_LOOK_EVERY_S = 0.005


class EngineSummaries:
    """Used by the thread that iterates over the engine's results. The tail begins when no sequence waits and at most
    half of the most sequences of this stream run."""

    def __init__(self, context: WorkerContext, load: Callable[[], Load], clock: Callable[[], float] = wall_s) -> None:
        self._context, self._load, self._clock = context, load, clock
        self.is_open = False  # whether the engine has work
        self._is_tail = False
        self._most_running = 0
        self._before: Load | None = None
        self._began_s = self._looked_s = 0.0

    def begin_stream(self) -> None:
        """Another stream begins."""
        self._most_running, self.is_open = 0, False

    def begin(self) -> None:
        """The engine has work from now on."""
        self._before, self._began_s = self._load(), self._clock()
        self._looked_s, self.is_open, self._is_tail = self._began_s, True, False

    def look(self) -> None:
        """Call it often. It looks at the engine every few milliseconds."""
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s, load = now_s, self._load()
        self._most_running = max(self._most_running, load.running)
        is_tail = not load.waiting and 0 < 2 * load.running <= self._most_running
        length_s = now_s - self._began_s
        if length_s >= (_SHORTEST_S if is_tail != self._is_tail else _LONGEST_S):
            self._write(now_s, load)
            self._is_tail = is_tail

    def end(self) -> None:
        """The engine has nothing to do now."""
        if self.is_open:
            self._write(self._clock(), self._load())
        self.is_open = False

    def _write(self, now_s: float, load: Load) -> None:
        before, self._before = self._before, load
        assert before is not None, "begin was called"
        steps = load.steps - before.steps
        values = {
            "steps": steps,
            "lanes": (load.lane_steps - before.lane_steps) / max(1, steps),
            "generated_tokens": load.generated_tokens - before.generated_tokens,
            "prefilled_tokens": load.prefilled_tokens - before.prefilled_tokens,
            "prefill_s": load.prefill_s - before.prefill_s,
        }
        self._context.add_span(TAIL if self._is_tail else STEPS, self._began_s, now_s, values)
        self._began_s = now_s
