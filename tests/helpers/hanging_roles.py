# SPDX-License-Identifier: Apache-2.0
"""Roles that hang once: a worker that finds its file beside the model takes it away, and loops in its call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from podium.cluster import Computed, WorkerContext
from podium.data.trajectories import TokenColumn, TrajectoryBlock
from podium.roles.carriers import SamplingPlan, UpdatePlan, UpdateShard
from podium.roles.generator import GeneratorRank
from podium.roles.interfaces import Generator, GeneratorSpec, Learner, LearnerSpec
from podium.roles.learner import LearnerRank

HANGING = {
    Learner: f"{__name__}:HangingLearner",
    Generator: f"{__name__}:HangingGenerator",
}


def hang_file(model: Path, rank: str) -> Path:
    """The file that makes a rank of a role ("policy[1]") hang. Its successor finds none."""
    return model / f"hang-{rank}"


def endless_loop(file: Path) -> None:
    """Loops for ever, if the file is there."""
    if file.exists():
        file.unlink()
        while True:
            time.sleep(0.01)


class HangingLearner(LearnerRank):
    """Hangs in its third update, while its peers wait in a collective."""

    def __init__(self, context: WorkerContext, spec: LearnerSpec) -> None:
        super().__init__(context, spec)
        self._hang_file, self._num_updates = hang_file(spec.folder, _name(context)), 0

    def update(self, shard: UpdateShard, plan: UpdatePlan) -> Computed[TokenColumn]:
        """Hangs, or updates."""
        self._num_updates += 1
        if self._num_updates == 3:
            endless_loop(self._hang_file)
        return super().update(shard, plan)


class HangingGenerator(GeneratorRank):
    """Hangs in its third stream, after its first block."""

    def __init__(self, context: WorkerContext, spec: GeneratorSpec) -> None:
        super().__init__(context, spec)
        self._hang_file, self._num_streams = hang_file(spec.folder, _name(context)), 0

    def stream(self, plan: SamplingPlan) -> Iterator[Computed[TrajectoryBlock]]:
        """Hangs, or generates."""
        self._num_streams += 1
        for block in super().stream(plan):
            yield block
            if self._num_streams == 3:
                endless_loop(self._hang_file)


def _name(context: WorkerContext) -> str:
    return f"{context.role}[{context.rank}]"
