# SPDX-License-Identifier: Apache-2.0
"""A batch of episodes on its way through a step: a new frozen type per stage, all by reference.

prompts -> Rollouts -> GradedRollouts -> TrainBatch -> UpdateReport -> a new version"""

# N episodes · R rewards of the recipe

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from podium.algorithms.advantages import RELATIVE_SPREAD
from podium.algorithms.behavior_check import BehaviorCheck
from podium.algorithms.router_statistics import RouterStatistics
from podium.algorithms.staleness import ByAge
from podium.algorithms.statistics import EffectiveSampleSize, Moments, PolicyStatistics, ValueStatistics
from podium.cluster.objects import RowRefs
from podium.cluster.results import ShardResult, stored_rows
from podium.data.tasks import Task
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock, TrajectoryId, TrajectoryIds, ValueColumns
from podium.recipe.solving import Solving
from podium.roles.carriers import TRUNCATED, DistanceNote, EpisodeNote, Floats, TurnRewards
from podium.weights.canary import LogprobGap


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollouts:
    """Finished episodes. Their tokens are in the object store."""

    step: int
    version: int  # newest version of the weights when they were requested
    rows: RowRefs[TrajectoryBlock]
    note: EpisodeNote  # in the order of the rows
    tasks: Mapping[int, Task]  # by prompt index
    metrics: Mapping[str, float]

    @classmethod
    def of(
        cls, blocks: Sequence[ShardResult[TrajectoryBlock]], tasks: Mapping[int, Task], *, step: int, version: int,
        metrics: Mapping[str, float],
    ) -> Rollouts:  # fmt: skip
        """Joins blocks from generators, in ascending order of id."""
        order = TrajectoryIds.concatenate([block.ids for block in blocks]).order
        return cls(
            step=step,
            version=version,
            rows=stored_rows([block for block in blocks if len(block.ids)]),
            note=EpisodeNote.in_order([block.note for block in blocks], order),
            tasks=tasks,
            metrics=metrics,
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def group_N(self) -> Ints:
        """The prompt index of each episode: episodes of one prompt are a group."""
        return self.rows.ids.array_N4[:, 0]

    @property
    def truncated_N(self) -> NDArray[np.bool_]:
        """Whether each episode was cut off by a limit."""
        return np.isin(self.note.finish_N, TRUNCATED)

    def take(self, positions: Ints) -> Rollouts:
        """The episodes at these positions, with their tasks."""
        rows = self.rows.take(positions)
        prompt_indices = set(rows.ids.array_N4[:, 0].tolist())
        return replace(
            self,
            rows=rows,
            note=self.note.take(positions),
            tasks={prompt_index: task for prompt_index, task in self.tasks.items() if prompt_index in prompt_indices},
        )

    @classmethod
    def join(cls, parts: Sequence[Rollouts]) -> Rollouts:
        """Joins several batches of one step into one, ids ascending."""
        if len(parts) == 1:
            return parts[0]
        order = TrajectoryIds.concatenate([part.rows.ids for part in parts]).order
        tasks = {prompt_index: task for part in parts for prompt_index, task in part.tasks.items()}
        totals: dict[str, float] = {}
        for part in parts:
            for name, value in part.metrics.items():
                totals[name] = (
                    max(totals.get(name, 0.0), value) if name == "cache_used" else totals.get(name, 0.0) + value
                )
        return replace(
            parts[0],
            rows=RowRefs.join([part.rows for part in parts]),
            note=EpisodeNote.in_order([part.note for part in parts], order),
            tasks=tasks,
            metrics=totals,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class GradedRollouts:
    """Rollouts with one reward each. Episodes that could not be graded are removed, or count as the recipe says."""

    rollouts: Rollouts
    rewards_N: Floats  # the weighted sum of all rewards, the environment's and what shaping adds
    values_NR: Floats  # each reward of the recipe by itself; NaN: does not apply
    shaping_N: Floats
    names: tuple[str, ...]
    num_failed: int  # episodes without a reward
    num_dropped: int  # episodes that were left out, with their groups
    first_error: str | None
    extras: Mapping[str, tuple[float, float]]  # further numbers of reward functions: sum and count
    left_out: tuple[Rollouts, ...] = ()  # episodes that were dropped with their groups
    failed: frozenset[TrajectoryId] = frozenset()

    def __len__(self) -> int:
        return len(self.rollouts)

    @property
    def group_N(self) -> Ints:
        """Episodes with the same number answer the same prompt."""
        return self.rollouts.group_N

    def take(self, positions: Ints) -> GradedRollouts:
        """The episodes at these positions, with their rewards."""
        return replace(
            self,
            rollouts=self.rollouts.take(positions),
            rewards_N=self.rewards_N[positions],
            values_NR=self.values_NR[positions],
            shaping_N=self.shaping_N[positions],
        )

    @classmethod
    def join(cls, parts: Sequence[GradedRollouts]) -> GradedRollouts:
        """Joins the episodes of several rounds into one batch, ordered by id."""
        if len(parts) == 1:
            return parts[0]
        order = TrajectoryIds.concatenate([part.rollouts.rows.ids for part in parts]).order
        extras: dict[str, tuple[float, float]] = {}
        for part in parts:
            for name, (total, count) in part.extras.items():
                before = extras.get(name, (0.0, 0.0))
                extras[name] = (before[0] + total, before[1] + count)
        return replace(
            parts[0],
            rollouts=Rollouts.join([part.rollouts for part in parts]),
            rewards_N=np.concatenate([part.rewards_N for part in parts])[order],
            values_NR=np.concatenate([part.values_NR for part in parts])[order],
            shaping_N=np.concatenate([part.shaping_N for part in parts])[order],
            num_failed=sum(part.num_failed for part in parts),
            num_dropped=sum(part.num_dropped for part in parts),
            first_error=next((part.first_error for part in parts if part.first_error), None),
            extras=extras,
            left_out=tuple(rollouts for part in parts for rollouts in part.left_out),
            failed=frozenset().union(*(part.failed for part in parts)),
        )

    def solved_N(self, solving: Solving) -> NDArray[np.bool_]:
        """Mask of solved episodes. A reward that does not apply counts as 0."""
        values_N = self.rewards_N if solving.reward is None else np.nan_to_num(self.values_NR[:, solving.reward])
        solved: NDArray[np.bool_] = values_N >= solving.at
        return solved

    @property
    def token_turn_rewards(self) -> TurnRewards:
        """Rewards of turns that belong to single tokens. Turns of agents may branch, and no order of their tokens is
        one of time: there are none, and each episode has its whole reward at its last token."""
        turns = self.rollouts.note.turn_rewards
        return TurnRewards.none() if turns.is_tree else turns

    @property
    def last_token_rewards_N(self) -> Floats:
        """The part of the rewards that belongs to an episode's last token, without the rewards of turns."""
        turns = self.token_turn_rewards
        return self.rewards_N - np.bincount(turns.row_K, turns.reward_K, minlength=len(self.rewards_N))

    @cached_property
    def uniform_N(self) -> NDArray[np.bool_]:
        """Mask of episodes whose group has one reward throughout: a comparison within the group gives no signal."""
        _, group = np.unique(self.group_N, return_inverse=True)
        low = np.full(int(group.max(initial=-1)) + 1, np.inf)
        high = -low
        np.minimum.at(low, group, self.rewards_N)
        np.maximum.at(high, group, self.rewards_N)
        # As in the estimators: a difference by rounding alone gives no advantage.
        close = high - low <= RELATIVE_SPREAD * np.maximum(np.abs(low), np.abs(high))
        uniform: NDArray[np.bool_] = close[group]
        return uniform


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceLogprobs:
    """The reference's log-probs of the sampled tokens, by reference, and how far the policy is from it."""

    logprobs: RowRefs[TokenColumn]
    distance: DistanceNote
    penalty_N: Floats  # what the KL subtracts from each episode's reward; 0 unless the recipe has the KL in the reward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherAdvantages:
    """On-policy distillation: the teachers' log-probs of the sampled tokens, by reference. The learner subtracts its
    own log-probs, which gives an advantage for every token. The weights sum to 1."""

    logprobs: tuple[RowRefs[TokenColumn], ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenAdvantages:
    """The critic's advantages and returns of every token, by reference; advantages are whitened by (shift, scale)."""

    columns: RowRefs[ValueColumns]
    whitening: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """One advantage for each episode, or for each turn, or neither if the learner computes returns of each token from
    the rewards. `whiten`: over all tokens of the step."""

    values_N: Floats | None
    whiten: bool = False
    turns: TurnRewards | None = None


AnyAdvantages = Advantages | TokenAdvantages | TeacherAdvantages


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainBatch:
    """Episodes of one step with their training signal: an advantage for each episode, or for each token by reference
    (from a critic or teachers), or the rewards that returns are computed from."""

    step: int
    lr: float
    kl_coefficient: float
    graded: GradedRollouts
    advantages: AnyAdvantages
    reference: ReferenceLogprobs | None = None

    @property
    def rollouts(self) -> Rollouts:
        """The episodes without rewards and advantages."""
        return self.graded.rollouts

    def __len__(self) -> int:
        return len(self.graded)

    def take(self, positions: Ints) -> TrainBatch:
        """Some of the episodes. Columns by reference are cut when they are sent."""
        advantages = self.advantages
        if isinstance(advantages, Advantages) and advantages.values_N is not None:
            advantages = replace(advantages, values_N=advantages.values_N[positions])
        elif isinstance(advantages, Advantages) and advantages.turns is not None:
            advantages = replace(advantages, turns=advantages.turns.take(positions))
        return replace(self, graded=self.graded.take(positions), advantages=advantages)

    def without_truncated(self) -> TrainBatch:
        """The batch without episodes that ended at a limit of tokens or turns instead of at a stop token."""
        return self.take(np.flatnonzero(~self.rollouts.truncated_N))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """Results of a policy update, over all ranks."""

    statistics: PolicyStatistics
    gap: LogprobGap
    sampling: EffectiveSampleSize | None
    kept_mass: float | None  # mean; None: nothing was truncated, or no token can be compared
    ages: ByAge  # empty if no token is stale
    behavior: BehaviorCheck
    entropy: float
    kl_reference: float | None
    advantages: Moments
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    skipped: int
    num_tokens: int
    num_sequences: int
    imbalance: float
    micro_steps: int
    seconds: float
    proximal_s: float
    flops: float
    routers: RouterStatistics | None = None  # of a mixture of experts


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticReport:
    """Results of a critic update, over all ranks."""

    statistics: ValueStatistics
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
