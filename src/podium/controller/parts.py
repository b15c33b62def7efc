# SPDX-License-Identifier: Apache-2.0
"""What a controlled run is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from podium.cluster import Cluster, Workers
from podium.controller.layout import RoleNames
from podium.controller.ledger import Ledger
from podium.controller.prompts import PromptSource
from podium.data.tasks import Task
from podium.observe import Console, Logger, MetricsFile, Stopwatch
from podium.recipe import OnPolicyRecipe
from podium.roles.grading_handle import GraderHandle, RewardModelHandle
from podium.roles.handles import CriticHandle, GeneratorHandle, LearnerHandle, ScorerHandle
from podium.roles.runner_handle import RunnerHandle
from podium.spmd.folder import RunFolder

RecipeT_co = TypeVar("RecipeT_co", bound=OnPolicyRecipe, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roles:
    """The handles of a run; None and empty where its method has no such role."""

    policy: LearnerHandle
    generator: GeneratorHandle
    runner: RunnerHandle | None
    grader: GraderHandle
    reward_models: tuple[tuple[int, RewardModelHandle], ...] = ()
    critic: CriticHandle | None = None
    reference: ScorerHandle | None = None
    teachers: tuple[ScorerHandle, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts(Generic[RecipeT_co]):
    """Everything a run is made of."""

    recipe: RecipeT_co
    folder: RunFolder
    cluster: Cluster
    workers: Workers
    roles: Roles
    names: RoleNames
    prompts: PromptSource
    heldout: Sequence[Task]
    ledger: Ledger
    console: Console
    metrics: MetricsFile
    loggers: Sequence[Logger]
    watch: Stopwatch
    stop_requested: Callable[[], bool]
    leaving: frozenset[str]  # roles that give up device memory while others work


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run begins: at step 0, or after the steps of a checkpoint."""

    step: int = 0
    kl_coefficient: float | None = None
    skipped_in_a_row: int = 0
    version: int | None = None  # of the weights; None: as many as steps
