# SPDX-License-Identifier: Apache-2.0
"""Interfaces of the roles that compute: how each is built, its methods, and their results.

Free of torch: only workers import the implementing classes, which are named in `IMPLEMENTATIONS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podium.cluster import Computed, Interruptible, Metric, RowRefs
from podium.data.costs import SequenceCost
from podium.data.prefixes import PrefixCost
from podium.data.routed_experts import RouterShape
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock, TrajectoryId, TrajectoryIds, ValueColumns
from podium.engine.checkpoint_files import SaveState
from podium.models.cpu_settings import CpuSettings
from podium.recipe import AlgorithmSection, ModelSection, OnPolicyRecipe, RolloutSection
from podium.recipe.judges import JudgeSection
from podium.roles.carriers import (
    GradeShard,
    PromptShard,
    Residency,
    SamplingPlan,
    UpdatePlan,
    UpdateShard,
    ValueShard,
)
from podium.rollout.engine import InFlight, Load, MemoryChange
from podium.rollout.requests import Completion, Request
from podium.weights.versions import WeightVersion
from podium.weights.weight_transfers import ByStore, WeightBucket, WeightTransfer

if TYPE_CHECKING:
    from podium.algorithms.behavior_check import BehaviorCheck
    from podium.algorithms.router_statistics import RouterStatistics
    from podium.algorithms.staleness import ByAge
    from podium.algorithms.statistics import EffectiveSampleSize, Moments, PolicyStatistics
    from podium.weights.canary import LogprobGap

# The learner's role name, by which other roles on the same worker find it.
POLICY = "policy"

# Default for the most tokens of one forward on one device.
MICRO_BATCH = {"cuda": 16_384, "cpu": 4096}


def micro_batch_tokens(recipe: OnPolicyRecipe, device: str) -> int:
    """The most tokens of one forward of a context group. `device`: its kind."""
    return recipe.micro_batch_tokens or MICRO_BATCH[device] * recipe.placement.mesh_sizes.context


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBegun:
    """A snapshot was begun."""

    copy_s: float  # for how long the one before it was copied


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSnapshot:
    """There are no snapshots."""

    reason: str


StateSource = Literal["memory", "checkpoint"]
"""Where a role's state is read from: a snapshot in host memory, or a checkpoint in the run folder."""


class Stateful(ABC):
    """A role that learns. Its state is kept in host memory too, for the worker that replaces it. All methods are
    collective if there are several ranks."""

    @abstractmethod
    def snapshot(self, step: int, values: Mapping[str, Any]) -> SnapshotBegun | NoSnapshot:
        """Begins to copy the state after this step to host memory; `values` come from the controller."""

    @abstractmethod
    def snapshots(self) -> tuple[int, ...]:
        """Steps of whole snapshots, ascending. Each worker can read its part of them."""

    @abstractmethod
    def restore(self, step: int, source: StateSource) -> Mapping[str, Any]:
        """Goes back to the state after this step. Returns the controller's values."""

    @abstractmethod
    def forget_snapshots(self) -> None:
        """Removes all snapshots: the run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """How a learner is built."""

    recipe: OnPolicyRecipe
    folder: Path  # of the model
    checkpoints: Path
    resume_step: int | None
    cpu: CpuSettings | None = None  # measured by an earlier start, and reused
    snapshots: Path | None = None  # folder in host memory; None: there are no snapshots
    collective_s: float = 600.0  # longest wait in a collective along an axis


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerFacts:
    """Facts about a learner that the controller needs."""

    architecture: str
    num_parameters: int
    dtype: str
    device: str
    cost: SequenceCost
    peak_flops: float
    max_tokens: int  # of one micro-batch
    optimizer_bytes: int  # that can be offloaded
    device_bytes: int  # 0 on CPU
    cpu: CpuSettings | None
    trained_parameters: int | None = None  # of an adapter; None: all are trained
    logprob_noise: float | None = None  # mean difference of two equal forwards; None: not measured
    routers: RouterShape | None = None  # of a mixture of experts
    router_problem: str | None = None  # why those of a mixture are not known
    prefixes: PrefixCost | None = None  # None: documents do not share prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateNote:
    """One rank's report of an update. Sums are of this rank; `losses` and the fields after it are of all ranks."""

    statistics: PolicyStatistics
    gap: LogprobGap  # engine against learner, before the first optimizer step
    sampling: EffectiveSampleSize | None
    kept_mass: tuple[float, float]  # that truncated sampling kept, over the tokens of `gap`: sum and count
    ages: ByAge  # empty if no token is stale
    behavior: BehaviorCheck
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
    routers: RouterStatistics | None = None  # of a mixture of experts, over all optimizer steps


class Learner(Stateful):
    """The policy. All methods except `facts` are collective if there are several ranks."""

    @abstractmethod
    def facts(self) -> LearnerFacts:
        """Called once, at the start."""

    @abstractmethod
    def score(self, rows: RowRefs[TrajectoryBlock], temperature: float, base: bool = False) -> Computed[TokenColumn]:
        """Log-probs of the sampled tokens under the current weights, or with `base` without the adapter; and each
        episode's distance from the policy that sampled it."""

    @abstractmethod
    def update(self, shard: UpdateShard, plan: UpdatePlan) -> Computed[TokenColumn]:
        """All optimizer steps of one batch of rollouts; the note is an UpdateNote. `learner.LearnerRank` runs
        `policy_update.PolicyUpdate`; the loss is in `policy_objective`."""

    @abstractmethod
    def has_stepped(self) -> bool:
        """Whether the last `update` ran an optimizer step, even if it failed afterwards."""

    @abstractmethod
    def describe(self, number: int) -> WeightVersion:
        """The current weights as version `number`."""

    @abstractmethod
    def describe_base(self) -> WeightVersion:
        """The weights under an adapter. They have no version number, because they never change."""

    @abstractmethod
    def send(self, transfer: WeightTransfer) -> int:
        """Sends published weights to generators on other devices; returns the bytes that this rank sent."""

    @abstractmethod
    def store(self, transfer: ByStore) -> Iterator[Computed[WeightBucket]]:
        """Puts published weights into the object store: rank 0 yields the buckets."""

    @abstractmethod
    def hold(self, residency: Residency) -> MemoryChange:
        """Sets the residency. Offloaded: state that generation does not read (moments, masters, gradients) is in host
        memory."""

    @abstractmethod
    def save(self, step: int, values: Mapping[str, Any]) -> SaveState:
        """Begins to write a checkpoint; `values` come from the controller."""

    @abstractmethod
    def save_state(self) -> SaveState:
        """How far this rank is with the checkpoint in flight. Does not wait."""

    @abstractmethod
    def finish_saving(self, *, give_up: bool = False) -> SaveState:
        """Waits until the checkpoint in flight has ended. Returns a fault of the disk, and raises other errors.
        `give_up`: another rank has failed, so rank 0 does not wait for its part."""

    @abstractmethod
    def grade(self, step: int, loss: float) -> str | None:
        """Records the loss of a saved step; lower is better. Returns why it cannot be recorded now."""


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
    records_experts: bool = False  # which ones of a mixture tokens go to
    tensor: int = 1  # devices that hold its weights together
    parts: str | None = None  # role on these devices, each of which holds its part of the learner's weights


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorUsage:
    """What a generator has done since it was built; nothing of it decreases but parts of `load`."""

    load: Load
    idle_s: float  # without anything to answer, while it could have
    install_s: float  # in which weights were installed and nothing was answered
    version: int = 0  # of its weights


class EpisodeSource(Interruptible):
    """A worker that runs episodes: a generator, or an episode runner. `stream` runs on the work thread; the other
    methods are for control threads."""

    def abandon(self) -> None:
        """Ends `stream` and what else waits for a controller that is gone."""
        self.finish_stream(abandon=True)

    def reset(self) -> None:
        """Forgets episodes of a stream that has ended, or has never begun."""

    @abstractmethod
    def stream(self, plan: SamplingPlan) -> Iterator[Computed[TrajectoryBlock]]:
        """Runs the episodes that `admit` brings and yields them as they end, until `finish_stream` was called and all
        are over. Waits for prompts in short intervals. The last block has the metrics."""

    @abstractmethod
    def admit(self, shard: PromptShard, plan: SamplingPlan) -> None:
        """Adds episodes to the stream, which has the same plan. It may begin a moment later."""

    @abstractmethod
    def finish_stream(self, abandon: bool) -> None:
        """No more prompts come for this stream. `abandon`: running episodes are given up."""

    @abstractmethod
    def give_back(self, ids: tuple[TrajectoryId, ...]) -> None:
        """Ends these episodes where they are, so that another worker can continue them: the stream yields them as
        cancelled. Those that have ended meanwhile are not."""

    @abstractmethod
    def lanes(self) -> int:
        """Number of episodes that run at the same time; further ones wait."""


class Generator(EpisodeSource):
    """One engine. `stream` and `serve` run on the worker's work thread; control methods may run at the same time."""

    @abstractmethod
    def serve(self) -> tuple[Metric, ...]:
        """Answers requests that episode runners send with `exchange`, until `stop_serving`. Waits for them in short
        intervals."""

    @abstractmethod
    def begin_serving(self, keeps_answers: bool = False) -> None:
        """Called before `serve`: runners may send requests from now on. Answers that no runner has fetched are
        forgotten, unless `keeps_answers`: runners whose streams have gone on since then wait for them."""

    @abstractmethod
    def stop_serving(self, give_back: bool = False) -> None:
        """Ends `serve` when all requests are answered; `give_back`: with the tokens that they have, so that another
        generator can continue them. Runs on a control thread, because `serve` occupies the work thread."""

    @abstractmethod
    def exchange(self, runner: str, requests: tuple[Request, ...], wait_s: float) -> list[Completion]:
        """Takes a runner's new requests and returns its finished ones. A generator that does not serve gives new ones
        back at once. For control threads."""

    @abstractmethod
    def forget(self, runner: str) -> None:
        """Cancels the requests of a dead runner. For control threads."""

    @abstractmethod
    def install(self, transfer: WeightTransfer, in_flight: InFlight = "recompute") -> int:
        """Receives and installs published weights; returns the bytes received. Weights from the object store can be
        installed by a control thread, while the engine answers prompts."""

    @abstractmethod
    def check_base(self, version: WeightVersion) -> None:
        """Raises an error unless the engine's frozen weights are the learner's."""

    @abstractmethod
    def share(self, number: int) -> str:
        """Takes the weights of the learner on this device as version `number`; returns their fingerprint. Collective if
        the learner is sharded."""

    @abstractmethod
    def hold(self, residency: Residency) -> MemoryChange:
        """Active: awake. Offloaded: the cache (and the engine's copy of the weights, if any) is freed."""

    @abstractmethod
    def usage(self) -> GeneratorUsage:
        """What the generator does and has done. For control threads."""


class GeneratorPart(Interruptible):
    """One device's part of a generator that several learners' devices hold together. The first of them has the engine;
    the others follow it on a thread of their own, while `accompany` keeps other calls from their devices."""

    @abstractmethod
    def refill(self, number: int) -> str:
        """Takes this rank's part of the learner's weights, which are version `number`; returns their fingerprint.
        Collective over the learners."""

    @abstractmethod
    def accompany(self) -> None:
        """Returns after `leave`."""

    @abstractmethod
    def leave(self) -> None:
        """Ends `accompany`. For control threads."""

    def abandon(self) -> None:
        """Ends `accompany`."""
        self.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec:
    """How a critic is built."""

    recipe: OnPolicyRecipe
    folder: Path
    checkpoints: Path
    beside: Path  # checkpoints of the policy: a critic is kept as long as its policy
    resume_step: int | None
    snapshots: Path | None = None  # folder in host memory; None: there are no snapshots


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


class Critic(Stateful):
    """PPO's value model. All methods are collective if there are several ranks."""

    @abstractmethod
    def estimate(self, shard: ValueShard, algorithm: AlgorithmSection, kl_coefficient: float) -> Computed[ValueColumns]:
        """Values of all trained tokens, generalised advantages (not yet whitened) and returns. The note has the moments
        of the advantages."""

    @abstractmethod
    def update(self, shard: CriticShard, lr: float) -> Computed[TokenColumn]:
        """All optimizer steps over one batch; the note is a CriticReport of this rank."""

    @abstractmethod
    def has_stepped(self) -> bool:
        """Whether the last `update` ran an optimizer step, even if it failed afterwards."""

    @abstractmethod
    def hold(self, residency: Residency) -> MemoryChange:
        """Sets the residency. Offloaded: optimizer state and weights are in host memory; no other role reads them."""

    @abstractmethod
    def save(self, step: int, values: Mapping[str, Any]) -> SaveState:
        """Begins to write a checkpoint; `values` come from the controller."""

    @abstractmethod
    def finish_saving(self) -> SaveState:
        """Waits until the checkpoint in flight has ended. Returns a fault of the disk, and raises other errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """How a scorer is built. `begin` is a folder written by Podium whose weights replace the model's."""

    model: ModelSection
    folder: Path
    max_tokens: int
    seed: int  # where its weights are sampled
    policy: ModelSection | None = None  # whose tokens it scores; None: its own
    checkpoints: Path | None = None  # folder of a reference that is refreshed
    beside: Path | None = None  # checkpoints of the policy: it is kept as long as its policy
    begin: Path | None = None
    snapshots: Path | None = None  # of a reference that is refreshed: folder in host memory


class Scorer(Stateful):
    """A frozen language model: a reference or a teacher. It is sharded like the learner. All methods are collective if
    there are several ranks."""

    @abstractmethod
    def score(self, rows: RowRefs[TrajectoryBlock], temperature: float) -> Computed[TokenColumn]:
        """Log-probs of the sampled tokens, and each episode's distance from the policy that sampled it."""

    @abstractmethod
    def copy_from(self, role: str) -> None:
        """Copies the weights of a learner on the same devices with the same sharding, or its adapter if it has one."""

    @abstractmethod
    def save(self, step: int) -> SaveState:
        """Writes its weights. After a refresh no other file holds them. Returns a fault of the disk."""

    @abstractmethod
    def hold(self, residency: Residency) -> MemoryChange:
        """Sets the residency. Offloaded: its weights are in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSpec:
    """How a reward model is built. Its folder has its tokenizer; without one it uses the policy's."""

    policy: ModelSection
    model: ModelSection
    folder: Path
    max_tokens: int
    tools: bool = False  # turns between the policy's are tool results, else user messages


class RewardModel(ABC):
    """A reward model, sharded like the learner. All methods are collective if there are several ranks."""

    @abstractmethod
    def score(self, shard: GradeShard) -> Computed[TokenColumn]:
        """Scores episodes; the note is a ScoreNote."""

    @abstractmethod
    def hold(self, residency: Residency) -> MemoryChange:
        """Sets the residency. Offloaded: its weights are in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeModelSpec:
    """How a judge in the run is built. `model`, `folder`: its checkpoint; with `generator` those of the policy."""

    section: JudgeSection
    key: str  # of the recipe, for errors
    policy: ModelSection
    model: ModelSection
    folder: Path
    generator: str | None  # role on the same device whose engine it uses; None: it has its own
    seed: int
    tools: bool = False  # turns between the policy's are tool results, else user messages
    cache: Path | None = None  # folder of judgements


class JudgeModel(RewardModel):
    """A judge: each rank has the whole model and an engine, and judges whole groups."""


IMPLEMENTATIONS: Mapping[type[Any], str] = {
    Learner: "podium.roles.learner:LearnerRank",
    Generator: "podium.roles.generator:GeneratorRank",
    GeneratorPart: "podium.roles.generator_part:GeneratorPartRank",
    Critic: "podium.roles.critic:CriticRank",
    Scorer: "podium.roles.scorer:ScorerRank",
    RewardModel: "podium.roles.reward_model:RewardModelRank",
    JudgeModel: "podium.roles.judge_model:JudgeModelRank",
}
