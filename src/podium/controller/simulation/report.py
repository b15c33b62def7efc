# SPDX-License-Identifier: Apache-2.0
"""What the devices did, second by second of the virtual clock, and what became of it. Torch-free."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from podium.controller.scheduling import GroupState
from podium.controller.simulation.costs import DeviceLayout
from podium.controller.simulation.generator import Generator, Occupation

IdleCause = Literal["generation", "tail", "grading", "update", "publish", "recompute", "switching"]
"""What an idle device waits for. generation: episodes of generators (learners). tail: episodes of other generators
(generators). grading: rewards. update: the learner. publish: new weights. recompute: the KV cache for them.
switching: the change between generating and learning."""

LearnerPhase = Literal["waiting", "switching", "updating"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Of the measured steps. Idle seconds are device-seconds; a device that generates with few lanes is not idle."""

    layout: DeviceLayout
    steps: int
    seconds: float
    trained_tokens: float
    generator_idle_s: Mapping[IdleCause, float]
    learner_idle_s: Mapping[IdleCause, float]
    lanes_in_use: float  # running lanes of a generator, mean over devices and time
    staleness_mean: float  # over trained tokens, in versions
    staleness_max: int
    in_flight_s: float  # from the admission of a group to its last reward, mean over groups
    queue_s: float  # from then until its step starts
    trained_groups: tuple[tuple[int, ...], ...]  # of all simulated steps, one tuple for each
    committed_s: tuple[float, ...]  # when each simulated step was committed
    num_admitted: int  # groups, over the whole simulation
    num_moved: int  # episodes that went on on another device, over the whole simulation
    num_lendings: int  # of the learner's devices, over the whole simulation
    num_events: int  # the scheduler was told, over the whole simulation
    counts: Mapping[GroupState, int]  # groups by state at the end, from the audit; empty without it

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps

    @property
    def tokens_s(self) -> float:
        """Trained tokens per second, of all devices together."""
        return self.trained_tokens / self.seconds

    @property
    def generator_idle_share(self) -> float:
        """Part of their time in which generators generate nothing."""
        return sum(self.generator_idle_s.values()) / (self.layout.num_generators * self.seconds)

    @property
    def learner_idle_share(self) -> float:
        """Part of their time in which learners learn nothing. Colocated: 0, their devices generate then or are idle as
        generators."""
        return sum(self.learner_idle_s.values()) / (self.layout.num_learners * self.seconds)

    @property
    def idle_share(self) -> float:
        """Part of the time of all devices in which they neither generate nor learn."""
        idle_s = sum(self.generator_idle_s.values()) + sum(self.learner_idle_s.values())
        return idle_s / (self.layout.devices * self.seconds)


@dataclass(slots=True, kw_only=True)
class Meter:
    """Adds up device-seconds between two events. The simulation keeps the public counts."""

    layout: DeviceLayout
    occupations: Counter[Occupation] = field(default_factory=Counter)  # generators
    lent: Counter[Occupation] = field(default_factory=Counter)  # generators on the learner's devices
    num_lanes: int = 0  # running lanes of generators that do not pause
    num_grading: int = 0  # groups
    learner: LearnerPhase = "waiting"
    now_s: float = 0.0
    began_s: float = 0.0
    lane_s: float = 0.0
    generator_idle_s: defaultdict[IdleCause, float] = field(default_factory=lambda: defaultdict(float))
    learner_idle_s: defaultdict[IdleCause, float] = field(default_factory=lambda: defaultdict(float))

    def count(self, generator: Generator, change: int) -> None:
        """Adds a generator as it is now, or takes it out."""
        occupations = self.lent if generator.is_lent else self.occupations
        occupations[generator.occupation] += change
        self.num_lanes += 0 if generator.pause else change * generator.num_running

    def restart(self) -> None:
        """Forgets what was measured so far."""
        self.began_s, self.lane_s = self.now_s, 0.0
        self.generator_idle_s.clear()
        self.learner_idle_s.clear()

    def advance(self, now_s: float) -> None:
        """Adds the time until now. Call it before every change."""
        seconds, self.now_s = now_s - self.now_s, now_s
        if seconds <= 0:
            return
        self.lane_s += seconds * self.num_lanes
        for occupation, count in self.occupations.items():
            if not count or occupation == "generating":
                continue
            cause = self._cause_of_empty() if occupation == "empty" else occupation
            if cause == "learning" or (cause == "update" and self.layout.is_colocated):
                if self.learner == "switching":
                    self.generator_idle_s["switching"] += seconds * count
            else:
                self.generator_idle_s[cause] += seconds * count
        if self.learner == "waiting" and not self.layout.is_colocated:
            num_idle = self.lent["empty"] if self.lent.total() else self.layout.num_learners
            self.learner_idle_s[self._cause_of_waiting()] += seconds * num_idle

    def _cause_of_empty(self) -> IdleCause:
        """Why a generator has no sequence: the bound admits none before the update, or the step is not complete."""
        if self.learner != "waiting":
            return "update"
        cause = self._cause_of_waiting()
        return "tail" if cause == "generation" else cause

    def _cause_of_waiting(self) -> IdleCause:
        """Why no step can start."""
        if self.occupations["generating"] or self.lent["generating"]:
            return "generation"
        if self.num_grading:
            return "grading"
        return "recompute" if self.occupations["recompute"] else "publish"
