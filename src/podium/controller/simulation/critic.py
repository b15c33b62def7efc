# SPDX-License-Identifier: Apache-2.0
"""The critic of a simulated run. The value of an episode's tokens is a number that follows from its weights, which are
a digest; advantages and returns are those of the real formula. Torch-free."""

# N episodes · T tokens of all of them · S trained tokens of all of them

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.algorithms.statistics import Moments, ValueStatistics
from podium.cluster import Computed, WorkerContext
from podium.controller.simulation.costs import RunCosts
from podium.controller.simulation.learned_state import LearnedState
from podium.controller.simulation.scoring import NO_CHANGE, digest_of, kl_distance, numbers
from podium.data.trajectories import Ints, TokenColumn, ValueColumns
from podium.engine.checkpoint_files import SaveState
from podium.recipe import AlgorithmSection
from podium.roles.blocks import empty_block
from podium.roles.carriers import Residency, ValueShard
from podium.roles.interfaces import Critic, CriticShard, CriticSpec, NoSnapshot, SnapshotBegun, StateSource
from podium.roles.placed_rewards import placed_rewards, trained_mask
from podium.roles.stages import CriticReport
from podium.rollout.engine import MemoryChange


class SimulatedCritic(Critic):
    """One rank of the critic."""

    def __init__(self, context: WorkerContext, spec: CriticSpec, costs: RunCosts) -> None:
        self._context, self._spec, self._costs = context, spec, costs
        self._state = LearnedState(context, costs, spec.checkpoints)
        if spec.resume_step is not None:
            self.restore(spec.resume_step, "checkpoint")

    async def estimate(  # type: ignore[override]
        self, shard: ValueShard, algorithm: AlgorithmSection, kl_coefficient: float
    ) -> Computed[ValueColumns]:
        """Values, generalised advantages and returns of the shard's trained tokens."""
        block = shard.rows.read() if len(shard.rows) else empty_block()
        await self._costs.work(self._context.worker, self._costs.model.score_token_s * len(block.tokens_T))
        trained_T = trained_mask(block)
        rewards_T = placed_rewards(block, trained_T, shard.rewards_N, shard.turn_rewards)
        kl, reference = algorithm.kl, shard.reference
        if kl is not None and kl.where == "reward" and reference is not None and len(reference):
            distance_T = kl_distance(block, reference.read(), kl.estimator or "k1")
            rewards_T -= np.where(trained_T, kl_coefficient * distance_T, 0).astype(np.float32)
        values_T = np.repeat(numbers(self._state.weights, block.ids), block.lengths_N).astype(np.float32)
        advantages_T, returns_T = gae(
            rewards_T, values_T, trained_T, block.offsets, gamma=algorithm.gamma, lam=algorithm.lam
        )
        columns = ValueColumns(
            ids=block.ids, offsets=block.offsets, values_T=values_T, advantages_T=advantages_T, returns_T=returns_T
        )
        seen_S = advantages_T[trained_T].astype(np.float64)
        return Computed(rows=columns, note=Moments(len(seen_S), float(seen_S.sum()), float((seen_S**2).sum())))

    async def update(self, shard: CriticShard, lr: float) -> Computed[TokenColumn]:  # type: ignore[override]
        """Waits for every optimizer step over this rank's tokens."""
        self._state.begin_update()
        lengths_N, model = shard.rows.lengths_N, self._costs.model
        cost = model.critic or model.update
        tokens_B = [float(sum(lengths_N[rows].sum() for rows in batch)) for batch in shard.batches]
        await self._costs.work(self._context.worker, sum(cost.update_s(tokens, devices=1) for tokens in tokens_B))
        episodes = shard.ids.array_N4[:, :2].tolist()
        self._state.train(lr, episodes, lengths_N.tolist(), digest_of(shard.columns), len(shard.batches))
        num_steps = len(shard.batches)
        note = CriticReport(statistics=_statistics(shard), losses=(0.0,) * num_steps, grad_norms=(0.0,) * num_steps)
        return Computed(done=shard.ids, note=note)

    def has_stepped(self) -> bool:
        """Whether the last update came to its end."""
        return self._state.has_stepped

    def hold(self, residency: Residency) -> MemoryChange:
        """Takes no time."""
        return NO_CHANGE

    async def save(self, step: int, values: Mapping[str, Any]) -> SaveState:  # type: ignore[override]
        """Writes a checkpoint without tensors."""
        await self._state.save(step, values, self._spec.beside)
        return "written"

    def finish_saving(self) -> SaveState:
        """Nothing is in flight."""
        return "idle"

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


def _statistics(shard: CriticShard) -> ValueStatistics:
    """Of one pass over the shard: its values never move, so that none is clipped."""
    if not len(shard.rows):
        return ValueStatistics(**dict.fromkeys(ValueStatistics.__dataclass_fields__, 0.0))
    block, columns = shard.rows.read(), shard.columns.read()
    trained_T = trained_mask(block)
    values_S, returns_S = (each[trained_T].astype(np.float64) for each in (columns.values_T, columns.returns_T))
    errors_S = returns_S - values_S
    return ValueStatistics(
        count=float(len(values_S)),
        sum_values=float(values_S.sum()),
        sum_returns=float(returns_S.sum()),
        sum_returns_squared=float((returns_S**2).sum()),
        sum_errors=float(errors_S.sum()),
        sum_errors_squared=float((errors_S**2).sum()),
        clipped=0.0,
    )


def gae(
    rewards_T: NDArray[np.float32], values_T: NDArray[np.float32], trained_T: NDArray[np.bool_], offsets: Ints,
    *, gamma: float, lam: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # fmt: skip
    """`algorithms.returns.gae` in NumPy: advantages and returns, 0 at tokens that are not trained."""
    episode_S = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))[trained_T]
    values_S = values_T[trained_T]
    sums_S = rewards_T[trained_T] + np.float32(gamma) * _following(values_S, episode_S, 1) - values_S
    longest, width = int(np.bincount(episode_S).max(initial=0)), 1
    while width < longest:  # the window that a sum covers doubles at each pass
        sums_S = sums_S + np.float32((gamma * lam) ** width) * _following(sums_S, episode_S, width)
        width *= 2
    advantages_T, returns_T = np.zeros_like(rewards_T), np.zeros_like(rewards_T)
    advantages_T[trained_T], returns_T[trained_T] = sums_S, sums_S + values_S
    return advantages_T, returns_T


def _following(values_S: NDArray[np.float32], episode_S: Ints, distance: int) -> NDArray[np.float32]:
    """The value so many trained tokens on in the same episode, or 0 past its end."""
    following_S = np.zeros_like(values_S)
    same = episode_S[distance:] == episode_S[:-distance]
    following_S[:-distance] = np.where(same, values_S[distance:], np.float32(0))
    return following_S
