# SPDX-License-Identifier: Apache-2.0
"""The parts of a controlled run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from podium.cluster import Cluster, Workers
from podium.controller.layout import RoleNames
from podium.controller.ledger import Ledger
from podium.controller.prompts import PromptSource
from podium.controller.recovery import RecoveryPlan
from podium.controller.replacing import WorkerReplacements
from podium.controller.snapshots import Snapshots
from podium.data.tasks import Task
from podium.observe import Stopwatch
from podium.recipe import OnPolicyRecipe
from podium.roles.episode_stream import EpisodeWorkers
from podium.roles.grading_handle import GraderHandle, RewardModelHandle
from podium.roles.handles import CriticHandle, GeneratorHandle, LearnerHandle, ScorerHandle
from podium.roles.runner_handle import RunnerHandle
from podium.roles.state_handle import StateHandle
from podium.runs.folder import RunFolder
from podium.runs.log import RunLog

RewardModels = tuple[tuple[int, RewardModelHandle], ...]
"""Reward models with their positions among the recipe's rewards."""
RecipeT_co = TypeVar("RecipeT_co", bound=OnPolicyRecipe, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roles:
    """Handles of a run's roles. A role that the method does not use is None or empty."""

    policy: LearnerHandle
    generator: GeneratorHandle
    runner: RunnerHandle | None
    grader: GraderHandle
    lent: GeneratorHandle | None = None  # on the learner's devices, in layout elastic
    reward_models: RewardModels = ()
    critic: CriticHandle | None = None
    reference: ScorerHandle | None = None
    teachers: tuple[ScorerHandle, ...] = ()
    states: tuple[StateHandle, ...] = ()  # of the roles that learn; the policy's is the first

    @property
    def episode_workers(self) -> EpisodeWorkers:
        """Who runs episodes: generators, or runners if there is an environment."""
        return self.generator if self.runner is None else self.runner


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnPolicyParts(Generic[RecipeT_co]):
    """All parts of an on-policy run."""

    recipe: RecipeT_co
    folder: RunFolder
    cluster: Cluster
    workers: Workers
    roles: Roles
    names: RoleNames
    prompts: PromptSource
    heldout: Sequence[Task]
    ledger: Ledger
    log: RunLog
    snapshots: Snapshots
    recovery: RecoveryPlan
    replacements: WorkerReplacements  # of graders and episode runners, by the same plan
    watch: Stopwatch
    stop_requested: Callable[[], bool]  # once it is true, it stays true
    leaving: frozenset[str]  # roles that give up device memory while others work
    tokenizer: Any = None  # of the model, for the texts of kept episodes; None: they have none
