# SPDX-License-Identifier: Apache-2.0
"""Scorers and reward models of a simulated run: they wait for their forwards, and have no tensors. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from podium.cluster import Computed, RowRefs, WorkerContext
from podium.controller.simulation.costs import RunCosts
from podium.controller.simulation.learned_state import LearnedState, saved_weights
from podium.controller.simulation.learner import SimulatedLearner
from podium.controller.simulation.scoring import BASE, NO_CHANGE, scored
from podium.data.trajectories import TokenColumn, TrajectoryBlock
from podium.engine.checkpoint_files import SaveState
from podium.roles.carriers import GradeShard, Residency, ScoreNote
from podium.roles.interfaces import (
    NoSnapshot,
    RewardModel,
    RewardModelSpec,
    Scorer,
    ScorerSpec,
    SnapshotBegun,
    StateSource,
)
from podium.rollout.engine import MemoryChange


class SimulatedScorer(Scorer):
    """One rank of a reference or a teacher."""

    def __init__(self, context: WorkerContext, spec: ScorerSpec, costs: RunCosts) -> None:
        self._context, self._spec, self._costs = context, spec, costs
        begin = BASE if spec.policy is None else context.role
        if spec.begin is not None:
            begin = saved_weights(spec.begin, context.rank)
        self._state = LearnedState(context, costs, spec.checkpoints, begin)

    async def score(self, rows: RowRefs[TrajectoryBlock], temperature: float) -> Computed[TokenColumn]:  # type: ignore[override]
        """Waits for a forward of this rank's tokens."""
        return await scored(rows, self._state.weights, self._costs, self._context)

    def copy_from(self, role: str) -> None:
        """Copies the digest of the colocated learner."""
        self._state.weights = self._context.colocated_role(role, SimulatedLearner).state.weights

    async def save(self, step: int) -> SaveState:  # type: ignore[override]
        """Writes a checkpoint without tensors."""
        assert self._spec.beside is not None, "a reference is saved beside its policy"
        await self._state.save(step, {}, self._spec.beside)
        return "written"

    def snapshot(self, step: int, values: Mapping[str, Any]) -> SnapshotBegun | NoSnapshot:
        """Keeps the weights of the last two steps."""
        self._state.snapshot(step, values)
        return SnapshotBegun(copy_s=0.0)

    def snapshots(self) -> tuple[int, ...]:
        """Steps of snapshots."""
        return self._state.snapshots()

    def forget_snapshots(self) -> None:
        """Removes all snapshots."""
        self._state.forget_snapshots()

    def restore(self, step: int, source: StateSource) -> Mapping[str, Any]:
        """Goes back to the weights after this step."""
        return self._state.restore(step, source)

    def hold(self, residency: Residency) -> MemoryChange:
        """Takes no time."""
        return NO_CHANGE


class SimulatedRewardModel(RewardModel):
    """One rank of a reward model. Rewards are those of the costs."""

    def __init__(self, context: WorkerContext, spec: RewardModelSpec, costs: RunCosts) -> None:
        self._context, self._costs = context, costs

    async def score(self, shard: GradeShard) -> Computed[TokenColumn]:  # type: ignore[override]
        """Waits for a forward of this rank's tokens."""
        tokens = float(shard.rows.lengths_N.sum())
        await self._costs.work(self._context.worker, self._costs.model.score_token_s * tokens)
        rewards = [self._costs.reward(id.prompt_index, id.sample) for id in shard.ids]
        return Computed(done=shard.ids, note=ScoreNote(values_N=np.array(rewards, np.float64)))

    def hold(self, residency: Residency) -> MemoryChange:
        """Takes no time."""
        return NO_CHANGE
