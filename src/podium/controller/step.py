# SPDX-License-Identifier: Apache-2.0
"""A step of an on-policy run as a value."""

# N episodes

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from podium.cluster import ObjectScope, RowRefs
from podium.data.trajectories import Ints, RowsT
from podium.errors import ProgramError
from podium.roles.carriers import Floats
from podium.roles.stages import (
    Advantages,
    AnyAdvantages,
    GradedRollouts,
    ReferenceLogprobs,
    Rollouts,
    TeacherAdvantages,
    TokenAdvantages,
    TrainBatch,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """All data of one step: generated and graded episodes, and everything needed to compute with them. Immutable:
    `keep` and `add` return a new step. Nothing else holds a step, so several can be in progress."""

    number: int  # 1, 2, ... recipe.steps
    lr: float
    kl_coefficient: float
    sampled: GradedRollouts  # every episode of the step
    episodes: GradedRollouts  # the episodes to train on: all of them, unless the program keeps fewer
    objects: ObjectScope  # the step's references in the object store

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def rollouts(self) -> Rollouts:
        """Tokens, log-probs and finish reasons of the episodes to train on, by reference."""
        return self.episodes.rollouts

    @property
    def rewards_N(self) -> Floats:
        """Total reward of each episode to train on."""
        return self.episodes.rewards_N

    @property
    def group_N(self) -> Ints:
        """Group of each episode: episodes with the same number answer the same prompt."""
        return self.episodes.group_N

    def rewards_less_kl(self, reference: ReferenceLogprobs | None) -> Floats:
        """Rewards minus the KL penalty, which is 0 unless the recipe has the KL in the reward."""
        if reference is None:
            return self.rewards_N
        if len(reference.penalty_N) != len(self):
            raise ProgramError(
                f"the reference scored {len(reference.penalty_N)} episodes and step {self.number} has {len(self)}. "
                "Call step.keep before run.reference.logprobs."
            )
        return self.rewards_N - reference.penalty_N

    def keep(self, which: NDArray[np.bool_] | Ints) -> Step:
        """Returns a step that trains only on these episodes, given as a mask or as positions. Metrics and ledger keep
        the others."""
        return replace(self, episodes=self.episodes.take(_positions(which, len(self))))

    def add(self, more: GradedRollouts, which: NDArray[np.bool_]) -> Step:
        """Returns a step with further episodes, of which those in `which` are trained on."""
        return replace(
            self,
            sampled=GradedRollouts.join([self.sampled, more]),
            episodes=GradedRollouts.join([self.episodes, more.take(_positions(which, len(more)))]),
        )

    def hold(self, rows: RowRefs[RowsT]) -> RowRefs[RowsT]:
        """Registers rows to be freed when the step is committed."""
        return self.objects.hold(rows)

    def batch(
        self,
        advantages: AnyAdvantages | ArrayLike,
        *,
        reference: ReferenceLogprobs | None = None,
        mask_truncated: bool = False,
    ) -> TrainBatch:
        """The batch that the policy trains on. `advantages` is one number for each episode, or the result of an
        estimator, a critic or teachers. `mask_truncated` leaves out truncated episodes."""
        if not isinstance(advantages, Advantages | TokenAdvantages | TeacherAdvantages):
            advantages = Advantages(values_N=_one_each(advantages, len(self)))
        for count in _episodes_of(advantages, reference):
            if count != len(self):
                raise ProgramError(
                    f"step.batch was given values of {count} episodes, and the step has {len(self)} episodes. Call "
                    "step.keep before the reference, critic, teachers or estimator, or index the estimator's values_N "
                    "as the episodes."
                )
        batch = TrainBatch(
            step=self.number,
            lr=self.lr,
            kl_coefficient=self.kl_coefficient,
            graded=self.episodes,
            advantages=advantages,
            reference=reference,
        )
        return batch.without_truncated() if mask_truncated else batch


def _episodes_of(advantages: AnyAdvantages, reference: ReferenceLogprobs | None) -> Iterator[int]:
    """Number of episodes that each of them was computed for."""
    match advantages:
        case TokenAdvantages(columns=columns):
            yield len(columns.ids)
        case TeacherAdvantages(logprobs=logprobs):
            yield from (len(each.ids) for each in logprobs)
        case Advantages(values_N=values_N) if values_N is not None:
            yield len(values_N)
    if reference is not None:
        yield len(reference.logprobs.ids)


def _positions(which: ArrayLike, count: int) -> Ints:
    """Positions from a mask with a bool for each episode, or from distinct positions."""
    given = np.asarray(which)
    if given.dtype == bool and given.shape == (count,):
        return np.flatnonzero(given)
    is_empty = given.shape == (0,)
    if is_empty or (given.dtype.kind in "iu" and given.ndim == 1):
        positions = given.astype(np.int64)
        if len(np.unique(positions)) == len(positions) and ((positions >= 0) & (positions < count)).all():
            return positions
    raise ProgramError(
        f"episodes are chosen by a bool for each of the step's {count} episodes, or by distinct positions below "
        f"{count}; got {given.dtype} of shape {given.shape}."
    )


def _one_each(advantages: ArrayLike, count: int) -> Floats:
    values_N = np.asarray(advantages, np.float64)
    if values_N.shape != (count,) or not np.isfinite(values_N).all():
        raise ProgramError(
            f"step.batch needs one finite advantage for each of the step's {count} episodes, and got an array of shape "
            f"{values_N.shape}{'' if np.isfinite(values_N).all() else ' with values that are not finite'}."
        )
    return values_N
