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
    lends: bool = False  # whether the learner's devices generate while it waits: layout elastic


# --- events: what happened ---


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker can run episodes now, with weights of `version`. `lanes`: episodes that it runs at the same time."""

    worker: str
    lanes: int
    version: int
    is_lent: bool = False  # it is on a device of the learner


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
class ReturnedEpisode:
    """An episode that did not end. `oldest` and `newest` are the versions of its tokens so far; -1: it has none."""

    group: int
    attempt: int
    sample: int
    oldest: int
    newest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesReturned:
    """A worker has given episodes back, with their tokens. They continue wherever they are admitted next."""

    worker: str
    episodes: tuple[ReturnedEpisode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeaving:
    """A worker still works and will be gone soon."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    """A worker takes no more episodes. It has ended or given back those that it had."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerIdle:
    """The learner's devices have nothing to do until the next step. Measured so far: episodes that ended per second in
    the last step (0: none yet); how long the learner waited for it, and how long of that for rewards alone; what it
    cost to lend devices and to recall them, and to recall them (0: not known yet)."""

    episodes_per_s: float
    waited_s: float
    switch_s: float
    recall_s: float = 0.0
    graded_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerWaits:
    """The learner's devices still have no step, `waited_s` after LearnerIdle. Told from time to time: the scheduler has
    no clock."""

    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesLent:
    """The learner's devices generate with its weights, which are those of `version`. Their workers have joined."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesReturned:
    """The learner has its devices again. Their workers have left."""


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
    """The run ends with the step in progress: the one that is started, or else the one that the program waits for. If
    there is neither, it ends now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The actions up to a `Continue` are taken note of, and the scheduler may go on."""


Event = (
    WorkerJoined
    | WorkerLost
    | WorkerLeaving
    | WorkerLeft
    | EpisodeEnded
    | EpisodesReturned
    | GroupGraded
    | LearnerIdle
    | LearnerWaits
    | DevicesLent
    | DevicesReturned
    | StepRequested
    | StepCommitted
    | WeightsInstalled
    | StopRequested
    | Continued
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
class Lend:
    """Let the learner's devices generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Take the learner's devices back. What is running there is given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """Let a worker give back these (group, sample, attempt): a worker with less to do continues them."""

    worker: str
    episodes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """Let a worker give back all that it runs, and end it. Other workers continue its episodes."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Void:
    """A group leaves untrained."""

    group: int
    reason: VoidReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """There is no further step for the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """There may be more to do than one decision should take. Tell the scheduler `Continued`; other events may come
    before it."""


Action = Admit | GradeGroup | StartStep | Publish | Lend | Recall | GiveBack | Retire | Void | EndRun | Continue
