# SPDX-License-Identifier: Apache-2.0
"""The values of the group flow: a group on its way to a step, what workers are to be sent, and a step's episodes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from podium.cluster import RowRefs
from podium.cluster.objects import Stored
from podium.controller.grading_queue import GradedPart
from podium.controller.scheduling import ScheduleSettings
from podium.data.tasks import IndexedTask
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.observe.timeline import SlowEpisode
from podium.recipe import OnPolicyRecipe
from podium.roles.carriers import ScoreNote
from podium.roles.grading_handle import Rewarded
from podium.roles.stages import GradedRollouts, Rollouts

# Of a step that are named.
_NUM_SLOWEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEpisode:
    """When an episode was sent to its worker and came back, in seconds since 1970."""

    sample: int
    tokens: int
    begin_s: float
    end_s: float
    worker: str


@dataclass(slots=True, kw_only=True, eq=False)
class OpenGroup:
    """The episodes of a prompt that have ended, and their rewards so far."""

    prompt: IndexedTask
    before: Mapping[str, Any]  # state of the data before its prompt was taken
    episodes: list[Rollouts] = field(default_factory=list)  # one part for each block that had some
    graded: list[GradedPart] = field(default_factory=list)
    begun: dict[int, RowRefs[TrajectoryBlock]] = field(default_factory=dict)  # by sample: tokens of a returned episode
    scores: dict[int, ScoreNote] | None = None  # of reward models
    sent_s: dict[int, float] = field(default_factory=dict)  # by sample: when it was sent to a worker
    ended: list[EndedEpisode] = field(default_factory=list)

    @property
    def rollouts(self) -> Rollouts:
        """All episodes that have ended, ids ascending."""
        return Rollouts.join(self.episodes)

    @property
    def pieces(self) -> Iterator[Stored[TrajectoryBlock]]:
        """All stored objects that have rows of it."""
        for part in self.episodes:
            yield from part.rows.pieces
        for rows in self.begun.values():
            yield from rows.pieces

    @property
    def num_ended(self) -> int:
        """Episodes that have ended."""
        return sum(len(part) for part in self.episodes)

    @property
    def num_graded(self) -> int:
        """Episodes with results of all reward functions."""
        return sum(len(part.rollouts) for part in self.graded)

    def rewarded(self) -> Rewarded:
        """The results of reward functions in the order of `rollouts`."""
        order = TrajectoryIds.concatenate([part.rollouts.rows.ids for part in self.graded]).order
        return Rewarded.join([part.rewarded for part in self.graded]).take(order)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledStep:
    """The episodes of a step: all that were sampled for it, and those to train on."""

    sampled: GradedRollouts
    episodes: GradedRollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Episodes to start on a worker, or to continue."""

    worker: str
    prompts: tuple[IndexedTask, ...]
    samples: tuple[int, ...]
    attempt: int
    begun: RowRefs[TrajectoryBlock] | None  # tokens of those that continue


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBack:
    """Episodes that a worker is to give back."""

    worker: str
    ids: tuple[TrajectoryId, ...]


def schedule_settings(recipe: OnPolicyRecipe) -> ScheduleSettings:
    """What the recipe fixes for the scheduler."""
    rollout, algorithm = recipe.rollout, recipe.full_algorithm
    return ScheduleSettings(
        steps=recipe.steps,
        groups_per_step=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        staleness=rollout.staleness,
        on_new_weights=rollout.on_new_weights,
        replaces_uniform=algorithm.dynamic_sampling,
        max_replaced=algorithm.num_refills * rollout.prompts_per_step,
        lends=recipe.placement.layout == "elastic",
    )


def slowest_episodes(step: int, groups: Iterable[OpenGroup]) -> list[SlowEpisode]:
    """The episodes that ended last. Of those that came back together, the ones that took longest come first."""
    ended = [(group.prompt.prompt_index, each) for group in groups for each in group.ended]
    slowest = heapq.nsmallest(
        _NUM_SLOWEST, ended, key=lambda each: (-each[1].end_s, each[1].begin_s, -each[1].tokens, each[0])
    )
    return [
        SlowEpisode(
            step=step, group=index, sample=each.sample, tokens=each.tokens, begin_s=each.begin_s, end_s=each.end_s,
            worker=each.worker,
        )
        for index, each in slowest
    ]  # fmt: skip
