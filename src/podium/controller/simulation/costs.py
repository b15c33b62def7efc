# SPDX-License-Identifier: Apache-2.0
"""What generation, grading, updates and new weights cost, and which devices there are. Torch-free."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any

from podium.cluster import WorkerId
from podium.cluster.deadlines import now_s
from podium.errors import PlacementError


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A log-normal distribution that is cut at `cap`. With `sigma` 0 every value is the median."""

    median: float
    sigma: float = 0.0
    cap: float = math.inf

    def sample(self, rng: Random) -> float:
        """One value. It always takes one random number, so that two models see the same stream."""
        return min(self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0)), self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCost:
    """One decoding step of a device reads the weights once and the KV cache of every running lane."""

    weights_s: float  # of a step, however many lanes run
    lane_s: float = 0.0  # of a step, for each running lane
    prefill_tokens_s: float = math.inf  # tokens per second when a KV cache is recomputed

    def token_s(self, lanes: int) -> float:
        """Seconds until each of the running lanes has one more token."""
        return self.weights_s + self.lane_s * lanes

    def slower(self, factor: float) -> GenerationCost:
        """The cost of a device that is this many times slower."""
        return GenerationCost(
            weights_s=factor * self.weights_s,
            lane_s=factor * self.lane_s,
            prefill_tokens_s=self.prefill_tokens_s / factor,
        )

    def tokens_s(self, lanes: int) -> float:
        """Tokens per second of a device. It rises with the lanes and saturates at `1 / lane_s`."""
        return lanes / self.token_s(lanes)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """The tokens of an update are divided among the learner's devices."""

    token_s: float  # of one trained token on one device
    constant_s: float = 0.0  # of every update: optimizer, collectives, bookkeeping

    def update_s(self, tokens: float, devices: int) -> float:
        """Seconds of one update."""
        return self.constant_s + self.token_s * tokens / devices


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCost:
    """Episodes with an environment: how many answers they have, and what comes after each of them."""

    turns: LogNormal = LogNormal(median=1.0)  # answers of an episode, rounded, at least 1
    call_s: LogNormal = LogNormal(median=0.0)  # of a step of the environment, or of a tool, after every answer
    reply_tokens: LogNormal = LogNormal(median=0.0)  # of the environment, before every answer but the first


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeCosts:
    """What the turns of one episode cost, each with one answer."""

    answer_tokens: tuple[float, ...]
    calls_s: tuple[float, ...]
    reply_tokens: tuple[int, ...]

    @property
    def num_turns(self) -> int:
        """Answers until the environment ends the episode."""
        return len(self.answer_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCosts:
    """What the episodes of one group cost, by sample."""

    tokens: tuple[float, ...]
    grading_s: tuple[float, ...]
    is_uniform: bool  # all rewards are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """All costs of a simulated run. With `graders`, each of them grades one episode at a time, in the order in which
    they end, and the others wait."""

    generation: GenerationCost
    answer_tokens: LogNormal
    update: UpdateCost
    grading_s: LogNormal = LogNormal(median=0.0)  # of one episode
    publish_s: float = 0.0  # in which a generator pauses for new weights, if it has devices of its own
    switch_s: float = 0.0  # colocated: from generating to learning, and back
    save_s: float = 0.0  # of one checkpoint
    start_s: float = 0.0  # of a worker's process, also of one that replaces another
    uniform_share: float = 0.0  # groups whose rewards are all equal
    graders: int | None = None  # None: never short, an episode's grading begins when it ends
    # Of one token on one device: log-probs of a reference or teacher, values of a critic, scores of a reward model.
    score_token_s: float = 0.0
    critic: UpdateCost | None = None  # of a critic's optimizer step; None: as long as one of the policy
    environment: EnvironmentCost = EnvironmentCost()

    def group(self, number: int, samples: int, seed: int) -> GroupCosts:
        """The costs of a group, the same for a seed whatever the layout and the schedule."""
        rng = Random((seed << 40) + number)
        return GroupCosts(
            tokens=tuple(max(1.0, round(self.answer_tokens.sample(rng))) for _ in range(samples)),
            grading_s=tuple(self.grading_s.sample(rng) for _ in range(samples)),
            is_uniform=rng.random() < self.uniform_share,
        )

    def episode(self, number: int, sample: int, samples: int, seed: int) -> EpisodeCosts:
        """The costs of one of a group's episodes with an environment. Its first answer is the group's."""
        rng, environment = Random(f"{seed} {number} {sample}"), self.environment
        turns = max(1, round(environment.turns.sample(rng)))
        first = self.group(number, samples, seed).tokens[sample % samples]
        return EpisodeCosts(
            answer_tokens=(first, *(max(1.0, round(self.answer_tokens.sample(rng))) for _ in range(turns - 1))),
            calls_s=tuple(environment.call_s.sample(rng) for _ in range(turns)),
            reply_tokens=tuple(round(environment.reply_tokens.sample(rng)) for _ in range(turns)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """Which devices generate and which learn. Colocated: all do both, in turns."""

    devices: int
    rollout_devices: int | None = None  # None: colocated
    lanes: int  # episodes that a device generates at the same time, at most
    ahead: int = 0  # episodes that it is given beyond its lanes, so that a free lane waits for no message

    def __post_init__(self) -> None:
        if self.devices < 1 or self.lanes < 1:
            raise PlacementError(f"a simulation needs devices and lanes, and got {self.devices} and {self.lanes}.")
        if self.rollout_devices is not None and not 0 < self.rollout_devices < self.devices:
            raise PlacementError(
                f"rollout_devices is {self.rollout_devices} of {self.devices} devices. Both generators and learners "
                f"need at least one: set 1 to {self.devices - 1}, or leave it out for colocated."
            )

    @property
    def is_colocated(self) -> bool:
        """Whether generators and learners share all devices."""
        return self.rollout_devices is None

    @property
    def num_generators(self) -> int:
        """Devices that generate."""
        return self.devices if self.rollout_devices is None else self.rollout_devices

    @property
    def num_learners(self) -> int:
        """Devices that learn."""
        return self.devices if self.rollout_devices is None else self.devices - self.rollout_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """A snapshot of a simulated role that learns: its weights, which are a digest, and the controller's values."""

    weights: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSlowness:
    """A worker is `factor` times slower for a while: its generation, and its calls that begin meanwhile."""

    at_s: float
    pool: str
    slot: int
    seconds: float
    factor: float

    @property
    def end_s(self) -> float:
        """When it is as fast as before."""
        return self.at_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """What the roles of a simulated run know: the cost model, the lanes of a device, the seed of the run, and which
    workers are slow when; `weights`, where ranks see those of the others; and `memory`, where they keep what outlives
    them."""

    model: CostModel
    lanes: int
    samples: int  # episodes of a group
    seed: int = 0
    slowness: tuple[SimulatedSlowness, ...] = ()
    weights: dict[tuple[str, int], str] = field(default_factory=dict)  # of each role that learns, and of its ranks
    # Role and rank -> step -> state.
    memory: dict[tuple[str, int], dict[int, KeptState]] = field(default_factory=dict)

    def group(self, prompt_index: int) -> GroupCosts:
        """The costs of a prompt's group."""
        return _group(self.model, prompt_index, self.samples, self.seed)

    def episode(self, prompt_index: int, sample: int) -> EpisodeCosts:
        """The costs of an episode with an environment."""
        return _episode(self.model, prompt_index, sample, self.samples, self.seed)

    def reward(self, prompt_index: int, sample: int) -> float:
        """Every second sample of a group is right, unless the group is uniform: then all are."""
        return 1.0 if self.group(prompt_index).is_uniform else float(sample % 2)

    def slowness_of(self, worker: WorkerId) -> list[SimulatedSlowness]:
        """When this worker, and each that replaces it, is slow."""
        return [each for each in self.slowness if (each.pool, each.slot) == (worker.pool, worker.index)]

    def factor(self, worker: WorkerId) -> float:
        """How many times slower this worker is now."""
        at_s = now_s()
        return math.prod(each.factor for each in self.slowness_of(worker) if each.at_s <= at_s < each.end_s)

    async def work(self, worker: WorkerId, seconds: float) -> None:
        """Waits for as long as the worker takes now for what takes it so many seconds."""
        await asyncio.sleep(seconds * self.factor(worker))


@lru_cache(maxsize=4096)
def _group(model: CostModel, number: int, samples: int, seed: int) -> GroupCosts:
    """Generators and graders ask for every episode."""
    return model.group(number, samples, seed)


@lru_cache(maxsize=4096)
def _episode(model: CostModel, number: int, sample: int, samples: int, seed: int) -> EpisodeCosts:
    """Runners and generators ask at every turn."""
    return model.episode(number, sample, samples, seed)
