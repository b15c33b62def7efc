# SPDX-License-Identifier: Apache-2.0
"""The values of the scheduler: what a recipe fixes, events that it is told, and actions that it decides. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OnNewWeights = Literal["finish", "keep", "recompute"]
"""What running sequences do when new weights arrive: finish with the old ones first, go on with the old KV cache, or go
on with a cache that is recomputed under the new weights."""

GroupState = Literal["offered", "running", "complete", "graded", "claimed", "trained", "void"]
"""offered: it waits for a worker. running: a worker generates its episodes. complete: all episodes have ended. graded:
all have a reward. claimed: an update uses it. trained: that update is committed. void: it leaves untrained."""

VoidReason = Literal["uniform", "stopped"]
"""uniform: all rewards are equal, and dynamic sampling replaces it. stopped: the run ends before its turn; when it is
resumed, it offers the prompt again. Being slow is no reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """What the recipe fixes for the whole run."""

    steps: int
    groups_per_step: int
    samples: int  # episodes of a group
    staleness: int = 0  # most versions between a token's weights and those that an update starts from
    on_new_weights: OnNewWeights = "recompute"
    replaces_uniform: bool = False  # dynamic sampling
    max_replaced: int = 0  # groups of one step that dynamic sampling replaces, at most


# --- events: what happened ---


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker can run episodes now, with weights of `version`. `lanes`: episodes that it runs at the same time."""

    worker: str
    lanes: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker is gone, and with it the tokens of its running episodes."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnded:
    """An episode has ended. `oldest` and `newest` are the versions that its worker stamped on its tokens."""

    group: int
    attempt: int
    sample: int
    worker: str
    oldest: int
    newest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGraded:
    """All episodes of a group have their rewards. `is_uniform`: the rewards are equal."""

    group: int
    is_uniform: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequested:
    """The program waits for its next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """The program has committed a step. `version`: of the weights it produced; None if it left them as they were."""

    step: int
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInstalled:
    """A worker has acknowledged the fingerprint of a version and samples from it."""

    worker: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The run ends with the step in progress."""


Event = (
    WorkerJoined
    | WorkerLost
    | EpisodeEnded
    | GroupGraded
    | StepRequested
    | StepCommitted
    | WeightsInstalled
    | StopRequested
)


# --- actions: what to do ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Start these samples of a group on a worker. Groups are numbered in the order of the prompts: a number that comes
    for the first time takes the next prompt of the data."""

    group: int
    attempt: int
    samples: tuple[int, ...]
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeGroup:
    """All episodes of a group have ended."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStep:
    """Give the program its next step. `groups` are to be trained on; `voided` were replaced since the last step."""

    step: int
    groups: tuple[int, ...]
    voided: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Install this version on a worker."""

    version: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Void:
    """A group leaves untrained."""

    group: int
    reason: VoidReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """There is no further step for the program."""


Action = Admit | GradeGroup | StartStep | Publish | Void | EndRun
