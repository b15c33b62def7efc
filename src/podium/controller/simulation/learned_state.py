# SPDX-License-Identifier: Apache-2.0
"""What a simulated role has learned: a digest instead of weights, with snapshots and checkpoints. Torch-free."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.cluster import WorkerContext
from podium.controller.simulation.costs import KeptState, RunCosts
from podium.engine.checkpoint_files import (
    PARTIAL,
    Extras,
    SavedCheckpoint,
    complete,
    saved_steps,
    to_remove,
    write_json,
)
from podium.roles.interfaces import StateSource

WEIGHTS = "weights"  # in the values of a checkpoint: of every rank
# Snapshots that are kept.
_NUM_KEPT = 2


def digest(*parts: object) -> str:
    """A digest of these values, by what they look like."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def saved_weights(checkpoint: Path, rank: int) -> str:
    """The weights of a rank; of another one, if fewer have saved them."""
    weights = SavedCheckpoint(checkpoint).values[WEIGHTS]
    return str(weights[rank % len(weights)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Which checkpoints are kept: so many of the newest, the best, and the one that the run was resumed from."""

    newest: int
    best: bool
    resumed: int | None


class LearnedState:
    """One rank's weights: a digest of everything that they were trained on, so that two runs end with the same ones
    only if they had the same updates. Its checkpoints have no tensors."""

    def __init__(self, context: WorkerContext, costs: RunCosts, checkpoints: Path | None, weights: str = "") -> None:
        """`weights`: at the start."""
        self._context, self._costs, self._checkpoints = context, costs, checkpoints
        self._place = context.role, context.rank
        self.weights, self.has_stepped = weights, False

    @property
    def weights(self) -> str:
        """A digest of everything that this rank has trained on."""
        return self._costs.weights[self._place]

    @weights.setter
    def weights(self, weights: str) -> None:
        self._costs.weights[self._place] = weights

    def begin_update(self) -> None:
        """An update begins. It may fail before its first optimizer step."""
        self.has_stepped = False

    def train(self, *trained: object) -> None:
        """Optimizer steps on something."""
        self.weights, self.has_stepped = digest(self.weights, *trained), True

    def snapshot(self, step: int, values: Mapping[str, Any]) -> None:
        """Keeps the last two steps."""
        kept = self._costs.memory.setdefault(self._place, {})
        kept[step] = KeptState(weights=self.weights, values=values)
        for old in sorted(kept)[:-_NUM_KEPT]:
            del kept[old]

    def snapshots(self) -> tuple[int, ...]:
        """Steps of snapshots."""
        return tuple(sorted(self._costs.memory.get(self._place, {})))

    def forget_snapshots(self) -> None:
        """Removes all snapshots."""
        self._costs.memory.pop(self._place, None)

    def restore(self, step: int, source: StateSource) -> Mapping[str, Any]:
        """Goes back to the weights after this step. Returns its values."""
        self.has_stepped = False
        if source == "memory":
            kept = self._costs.memory[self._place]
            for later in [each for each in kept if each > step]:
                del kept[later]
            self.weights = kept[step].weights
            return kept[step].values
        assert self._checkpoints is not None, "a role without checkpoints begins where it began"
        folder = self._checkpoints / f"step-{step:08d}"
        self.weights = saved_weights(folder, self._context.rank)
        return SavedCheckpoint(folder).values

    async def save(self, step: int, values: Mapping[str, Any], kept: Kept | Path) -> None:
        """Writes a checkpoint without tensors, from which a simulation resumes. A worker that dies meanwhile leaves a
        partial one. Removes all but those that are `kept`; a folder: that one's steps are."""
        folder = self._checkpoints
        assert folder is not None, "a role that is saved has a folder"
        partial = folder / f"{PARTIAL}{step:08d}"
        partial.mkdir(parents=True, exist_ok=True)
        await self._costs.work(self._context.worker, self._costs.model.save_s)
        if self._context.rank:
            return
        write_json(partial / "rank-00000.json", {"pieces": {}, "files": {}})
        weights = [self._costs.weights[self._context.role, rank] for rank in range(self._context.world)]
        complete(folder, partial, step, Extras(values={**values, WEIGHTS: weights}, arrays={}), ranks=1)
        saved = saved_steps(folder)
        if isinstance(kept, Kept):
            superfluous = to_remove(saved, keep=kept.newest, keep_best=kept.best, resumed=kept.resumed)
        else:
            steps = {each.step for each in saved_steps(kept)} | {step}
            superfluous = [each for each in saved if each.step not in steps]
        for old in superfluous:
            shutil.rmtree(old.folder, ignore_errors=True)
