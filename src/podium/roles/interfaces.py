# SPDX-License-Identifier: Apache-2.0
"""What the controller knows of the roles that compute: how each is built, what may be called, what it answers.

Free of torch: only workers import the classes that do the work, which are named in `IMPLEMENTATIONS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.cluster import Computed, Metric, RowRefs
from podium.data.costs import SequenceCost
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock, TrajectoryIds, ValueColumns
from podium.models.cpu_settings import CpuSettings
from podium.recipe import AlgorithmSection, ModelSection, OnPolicyRecipe, RolloutSection
from podium.roles.carriers import (
    GradeShard,
    PromptShard,
    Residency,
    SamplingPlan,
    UpdatePlan,
    UpdateShard,
    ValueShard,
)
from podium.rollout.engine import Load, MemoryChange
from podium.rollout.requests import Completion, Request
from podium.weights.versions import WeightVersion
from podium.weights.weight_transfers import WeightTransfer

if TYPE_CHECKING:
    from podium.algorithms.corrections import EffectiveSampleSize
    from podium.algorithms.policy import PolicyStatistics
    from podium.algorithms.returns import Moments
    from podium.weights.canary import LogprobGap

# The learner's name as a role, by which others on the same worker find it.
POLICY = "policy"

# Most tokens of one forward where the recipe does not say.
MICRO_BATCH = {"cuda": 16_384, "cpu": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """How a learner is built."""

    recipe: OnPolicyRecipe
    folder: Path  # of the model
    checkpoints: Path
    resume_step: int | None
    cpu: CpuSettings | None = None  # of an earlier start, not measured again


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerFacts:
    """What the controller has to know of a learner."""

    architecture: str
    num_parameters: int
    dtype: str
    device: str
    cost: SequenceCost
    peak_flops: float
    max_tokens: int  # of one micro-batch
    optimizer_bytes: int  # that can leave the device
    device_bytes: int  # 0 on CPU
    cpu: CpuSettings | None
    trained_parameters: int | None = None  # of an adapter; None: all are trained


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateNote:
    """One rank's report of an update. Sums are of this rank; `losses` and the fields after it are of all ranks."""

    statistics: PolicyStatistics
    gap: LogprobGap  # engine against learner, before the first optimizer step
    sampling: EffectiveSampleSize | None
    entropy: tuple[float, float]  # sum and count
    kl_reference: tuple[float, float]
    advantages: Moments
    losses: tuple[float, ...]  # of each optimizer step
    grad_norms: tuple[float, ...]
    skipped: int
    num_tokens: int
    num_sequences: int
    seconds: float
    proximal_s: float


class Learner(ABC):
    """The policy. All methods but `facts` are collective where there are several ranks."""

    @abstractmethod
    def facts(self) -> LearnerFacts:
        """Answered once, at the start."""

    @abstractmethod
    def score(self, rows: RowRefs[TrajectoryBlock], temperature: float, base: bool = False) -> Computed[TokenColumn]:
        """Log-probs of the sampled tokens under the weights of this moment, or with `base` under those that its adapter
        adapts; and how far each episode's are from those of the policy that sampled them."""

    @abstractmethod
    def update(self, shard: UpdateShard, plan: UpdatePlan) -> Computed[TokenColumn]:
        """All optimizer steps of one batch of rollouts; the note is an UpdateNote. `learner.LearnerRank` runs
        `policy_update.PolicyUpdate`; the loss is in `policy_objective`."""

    @abstractmethod
    def describe(self, number: int) -> WeightVersion:
        """The weights of this moment as version `number`."""

    @abstractmethod
    def describe_base(self) -> WeightVersion:
        """What an adapter's base consists of; it has no number, because it never changes."""

    @abstractmethod
    def send(self, transfer: WeightTransfer) -> int:
        """Puts published weights on their way to generators elsewhere; returns the bytes that this rank sent."""

    @abstractmethod
    def hold(self, residency: Residency) -> MemoryChange:
        """Offloaded: what generation does not read (moments, masters, gradients) is in host memory."""

    @abstractmethod
    def save(self, step: int, values: Mapping[str, Any]) -> None:
        """Begins to write a checkpoint; `values` are the controller's own."""

    @abstractmethod
    def finish_saving(self) -> None:
        """Until the checkpoint in flight is whole; raises what went wrong in it."""

    @abstractmethod
    def grade(self, step: int, loss: float) -> None:
        """Notes how good a saved step is, the less the better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """How a generator is built."""

    model: ModelSection
    folder: Path
    rollout: RolloutSection
    max_length: int
    learner: str | None  # role on the same device whose weights it uses; None: it has its own
    cpu: CpuSettings | None = None
    deadline_s: float = 600.0  # without progress


class Generator(ABC):
    """One engine. `generate` works on the worker's work thread; control methods may come meanwhile."""

    @abstractmethod
    def generate(self, shard: PromptShard, plan: SamplingPlan) -> Iterator[Computed[TrajectoryBlock]]:
        """Answers every prompt of the shard; whole groups are yielded as they finish."""

    @abstractmethod
    def serve(self) -> tuple[Metric, ...]:
        """Answers what episode runners ask for with `exchange`, until `stop_serving`. Waits for them, a moment at a
        time."""

    @abstractmethod
    def begin_serving(self) -> None:
        """Before `serve`: runners may ask from now on."""

    @abstractmethod
    def stop_serving(self) -> None:
        """All episodes are over. For a control thread: `serve` keeps the other."""

    @abstractmethod
    def exchange(self, runner: str, requests: tuple[Request, ...], wait_s: float) -> list[Completion]:
        """Takes a runner's new requests and gives what is done of its earlier ones. For control threads."""

    @abstractmethod
    def forget(self, runner: str) -> None:
        """The runner is dead: what it asked for is not generated any further. For control threads."""

    @abstractmethod
    def install(self, transfer: WeightTransfer) -> int:
        """Takes published weights that travel; returns the bytes that came."""

    @abstractmethod
    def check_base(self, version: WeightVersion) -> None:
        """Raises unless the frozen weights that this engine has read are those of the learner."""

    @abstractmethod
    def share(self, number: int) -> str:
        """Takes the weights of the learner on this device as version `number`; returns their fingerprint. Collective
        where the learner is sharded."""

    @abstractmethod
    def hold(self, residency: Residency) -> MemoryChange:
        """Active: awake. Offloaded: the cache (and the copy of the weights, if there is one) is given back."""

    @abstractmethod
    def load(self) -> Load:
        """How busy the engine is. For control threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec:
    """How a critic is built."""

    recipe: OnPolicyRecipe
    folder: Path
    checkpoints: Path
    beside: Path  # checkpoints of the policy: a critic is kept as long as its policy
    resume_step: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class CriticShard:
    """One data rank's share of a critic's update."""

    rows: RowRefs[TrajectoryBlock]
    columns: RowRefs[ValueColumns]
    batches: tuple[tuple[Ints, ...], ...]

    @property
    def ids(self) -> TrajectoryIds:
        """Ids of the episodes to train on."""
        return self.rows.ids


class Critic(ABC):
    """PPO's value model. All methods are collective where there are several ranks."""

    @abstractmethod
    def estimate(self, shard: ValueShard, algorithm: AlgorithmSection, kl_coefficient: float) -> Computed[ValueColumns]:
        """Values of all trained tokens, generalised advantages (not whitened yet) and returns; the note has the
        advantages' moments."""

    @abstractmethod
    def update(self, shard: CriticShard, lr: float) -> Computed[TokenColumn]:
        """All optimizer steps over one batch; the note is a CriticReport of this rank."""

    @abstractmethod
    def hold(self, residency: Residency) -> MemoryChange:
        """Offloaded: optimizer state and weights are in host memory; nothing else reads them."""

    @abstractmethod
    def save(self, step: int, values: Mapping[str, Any]) -> None:
        """Begins to write a checkpoint; `values` are the controller's own."""

    @abstractmethod
    def finish_saving(self) -> None:
        """Until the checkpoint in flight is whole; raises what went wrong in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """How a scorer is built. `begin` is a folder of Podium's own to take the weights from, instead of the model's."""

    model: ModelSection
    folder: Path
    max_tokens: int
    seed: int  # where its weights are sampled
    policy: ModelSection | None = None  # whose tokens it scores; None: its own
    checkpoints: Path | None = None  # of a reference that is refreshed
    beside: Path | None = None  # checkpoints of the policy: it is kept as long as its policy
    begin: Path | None = None


class Scorer(ABC):
    """A frozen language model: a reference or a teacher. Sharded as the learner is; all methods are collective where
    there are several ranks."""

    @abstractmethod
    def score(self, rows: RowRefs[TrajectoryBlock], temperature: float) -> Computed[TokenColumn]:
        """Log-probs of the sampled tokens, and how far each episode's are from the policy's that sampled them."""

    @abstractmethod
    def copy_from(self, role: str) -> None:
        """Becomes a copy of a learner on the same devices, sharded alike: of its adapter, where it has one."""

    @abstractmethod
    def save(self, step: int) -> None:
        """Its weights, which are no other file's once it was refreshed."""

    @abstractmethod
    def hold(self, residency: Residency) -> MemoryChange:
        """Offloaded: its weights are in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSpec:
    """How a reward model is built. Its own folder has its tokenizer; a folder without one shares the policy's."""

    policy: ModelSection
    model: ModelSection
    folder: Path
    max_tokens: int
    tools: bool = False  # what is said between the policy's turns is said by tools, else by a user


class RewardModel(ABC):
    """Sharded as the learner is. All methods are collective where there are several ranks."""

    @abstractmethod
    def score(self, shard: GradeShard) -> Computed[TokenColumn]:
        """The note has one score for each row."""

    @abstractmethod
    def hold(self, residency: Residency) -> MemoryChange:
        """Offloaded: its weights are in host memory."""


IMPLEMENTATIONS: Mapping[type[Any], str] = {
    Learner: "podium.roles.learner:LearnerRank",
    Generator: "podium.roles.generator:GeneratorRank",
    Critic: "podium.roles.critic:CriticRank",
    Scorer: "podium.roles.scorer:ScorerRank",
    RewardModel: "podium.roles.reward_model:RewardModelRank",
}
