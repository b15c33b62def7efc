# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an SPMD run in host memory, one after every step, for ranks that are started again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from podium.data.loader import LoaderState
from podium.engine.checkpoint_files import Extras
from podium.engine.memory_snapshots import MemorySnapshots
from podium.engine.train_step import TrainEngine
from podium.observe import Console, Stopwatch
from podium.spmd.steps import TrainStep

MakeExtras = Callable[[int, LoaderState, Mapping[str, int]], Extras]
"""Step, position in the data, updates that each tensor missed -> what is saved beside the tensors."""


class StepSnapshots:
    """One rank's part of the snapshots. A snapshot begins when its step is recorded, and is whole when the report of
    the step was read: the step's metrics are then written too."""

    def __init__(self, memory: MemorySnapshots | None, engine: TrainEngine, console: Console, watch: Stopwatch) -> None:
        """`memory`: takes them; None: no restart could use them, and there are none."""
        self._memory, self._engine, self._console, self._watch = memory, engine, console, watch
        self._unreported: tuple[Future[Extras], TrainStep, Mapping[str, int]] | None = None
        if memory is not None:
            engine.before_update = memory.wait_copied

    def begin(self, step: TrainStep) -> None:
        """Copies the tensors of a step that was just recorded, because the next one changes them. Collective."""
        if self._memory is None:
            return
        extras = Future[Extras]()
        with self._watch.span("snapshot"):
            reason = self._memory.take(step.number, extras)
        if reason is None:
            self._unreported = extras, step, self._engine.optimizer.missed_updates()
            return
        self._memory = None
        self._console.note(f"no snapshots in memory: {reason}. A restart goes on from the last checkpoint")

    def complete(self, make_extras: MakeExtras) -> None:
        """Gives the last snapshot what is known since the report of its step was read."""
        if self._unreported is None:
            return
        (extras, step, missed_updates), self._unreported = self._unreported, None
        if self._engine.mesh.is_main:  # which completes it
            extras.set_result(make_extras(step.number, step.ready.state, missed_updates))
