# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an SPMD run in host memory for ranks that are started again: one after every step, or after some of them
where updates would wait too long for the copies of a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch

from podium.data.loader import LoaderState
from podium.engine.checkpoint_files import Extras
from podium.engine.memory_snapshots import KEPT, MemorySnapshots
from podium.engine.mesh import Mesh
from podium.engine.snapshot_pace import steps_between
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
        self._pace = WaitingPace(engine.mesh)
        if memory is not None:
            engine.before_update = self._wait_copied

    def begin(self, step: TrainStep) -> None:
        """Copies the tensors of a step that was just recorded, because the next one changes them. Collective."""
        if self._memory is None or not self._pace.is_due(step.number):
            return
        self._pace.begin(step.number, time.monotonic())
        extras = Future[Extras]()
        with self._watch.span("snapshot"):
            reason = self._memory.take(step.number, extras)
        if reason is None:
            self._unreported = extras, step, self._engine.optimizer.missed_updates()
            return
        self._memory = None
        self._console.note(f"no snapshots in memory: {reason}. A restart goes on from the last checkpoint")

    def _wait_copied(self) -> None:
        if self._memory is not None:  # else there turned out to be too little
            began_s = time.monotonic()
            self._memory.wait_copied()
            self._pace.waited(time.monotonic() - began_s)

    def complete(self, make_extras: MakeExtras) -> None:
        """Gives the last snapshot what is known since the report of its step was read."""
        if self._unreported is None:
            return
        (extras, step, missed_updates), self._unreported = self._unreported, None
        if self._engine.mesh.is_main:  # which completes it
            extras.set_result(make_extras(step.number, step.ready.state, missed_updates))


class WaitingPace:
    """After which steps there are snapshots: after as many as keep the waits of updates for them short. There is
    nothing else that a copy could slow down."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._num_begun, self._next = 0, 0
        self._step, self._began_s, self._waited_s = 0, 0.0, 0.0  # of the last snapshot

    def is_due(self, step: int) -> bool:
        """Whether there is one after this step; the same on all ranks."""
        return step >= self._next

    def waited(self, seconds: float) -> None:
        """An update waited for the last one."""
        self._waited_s += seconds

    def begin(self, step: int, now_s: float) -> None:
        """Notes that one begins, and which is the next, from what the last one cost. Collective."""
        between = 1
        if self._num_begun > KEPT:  # those before have created their files, which takes longer
            seconds = torch.tensor([self._waited_s, now_s - self._began_s], dtype=torch.float64)
            waited_s, elapsed_s = (self._mesh.sum(seconds) / self._mesh.world).tolist()
            step_s = max(elapsed_s - waited_s, 1e-6) / (step - self._step)
            between = steps_between(waited_s, step_s)
        self._num_begun += 1
        self._next = step + between
        self._step, self._began_s, self._waited_s = step, now_s, 0.0
