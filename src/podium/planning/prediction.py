# SPDX-License-Identifier: Apache-2.0
"""What a configuration of a run would do: its step time by phase, its idle devices by cause, and what the run costs.
Everything is simulated with the real scheduler over a model of costs. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from podium.controller.scheduling import OnNewWeights, ScheduleSettings
from podium.controller.simulation.costs import CostModel, DeviceLayout, GroupCosts, LogNormal
from podium.controller.simulation.report import SimulationReport
from podium.controller.simulation.run import simulate

LayoutName = Literal["colocated", "split", "elastic"]
LAYOUTS: tuple[LayoutName, ...] = ("colocated", "split", "elastic")
# The controller gives an engine a quarter more episodes than it has lanes.
_AHEAD = 4
# What a part of a step has, at least: fewer say nothing of the mean.
_FEWEST_GROUPS, _FEWEST_LANES = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a plan may change. `graders` counts only where each grades one episode at a time."""

    layout: LayoutName
    devices: int
    rollout_devices: int | None = None  # None: colocated
    staleness: int = 0
    lanes: int = 64
    graders: int = 1
    micro_batch: int | None = None  # None: the default
    max_rollout_devices: int | None = None  # None: no more than `rollout_devices`

    @property
    def name(self) -> str:
        """Layout with its devices, and the staleness where there is any."""
        devices = f"{self.devices}" if self.rollout_devices is None else f"{self.rollout_devices}:{self.num_learners}"
        return f"{self.layout} {devices}" + (f", staleness {self.staleness}" if self.staleness else "")

    @property
    def num_learners(self) -> int:
        """Devices that learn."""
        return self.devices - (self.rollout_devices or 0)

    def changes_to(self, other: Configuration) -> dict[str, tuple[str, str]]:
        """Keys of the recipe that differ, each with its value here and there."""
        pairs = {
            "placement.devices": (self.devices, other.devices),
            "placement.layout": (self.layout, other.layout),
            "placement.rollout_devices": (self.rollout_devices, other.rollout_devices),
            "placement.max_rollout_devices": (self.max_rollout_devices, other.max_rollout_devices),
            "rollout.staleness": (self.staleness, other.staleness),
            "rollout.max_running": (self.lanes, other.lanes),
            "grading.workers": (self.graders, other.graders),
            "micro_batch_tokens": (self.micro_batch, other.micro_batch),
        }
        return {key: (_text(old), _text(new)) for key, (old, new) in pairs.items() if old != new}

    def placed(self, layout: LayoutName, *, devices: int | None = None, rollout_devices: int | None) -> Configuration:
        """On other devices, with the generators that may join only where there are as many."""
        most = self.max_rollout_devices
        kept = most is not None and rollout_devices is not None and most >= rollout_devices
        return replace(
            self, layout=layout, devices=devices or self.devices, rollout_devices=rollout_devices,
            max_rollout_devices=most if kept else None,
        )  # fmt: skip


def _text(value: object) -> str:
    """As YAML has it."""
    return "null" if value is None else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What stays as it is whatever the configuration: the batch, and what is not part of a step."""

    groups_per_step: int
    samples: int
    steps: int  # of the whole run
    on_new_weights: OnNewWeights = "keep"
    replaces_uniform: bool = False
    max_replaced: int = 0
    start_s: float = 0.0  # of the whole run
    outside_s: float = 0.0  # of checkpoints and evaluations, for each step
    layouts: tuple[LayoutName, ...] = LAYOUTS  # that the recipe allows
    most_staleness: int | None = None  # that the recipe allows; None: any
    most_devices: int | None = None

    @property
    def episodes(self) -> int:
        """Of one step."""
        return self.groups_per_step * self.samples

    def allows(self, configuration: Configuration) -> bool:
        """Whether the recipe can have it."""
        limits = (configuration.staleness, self.most_staleness), (configuration.devices, self.most_devices)
        return configuration.layout in self.layouts and all(most is None or value <= most for value, most in limits)

    def smaller(self, factor: int) -> Workload:
        """With so many times fewer groups."""
        return replace(
            self, groups_per_step=self.groups_per_step // factor, max_replaced=-(-self.max_replaced // factor)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCosts(CostModel):
    """Groups have the lengths of recorded ones: seed 0 repeats them in their order, others draw from them."""

    groups: tuple[tuple[float, ...], ...]

    def group(self, number: int, samples: int, seed: int) -> GroupCosts:
        """The lengths of a recorded group, with gradings of the distribution."""
        rng = Random((seed << 40) + number)
        drawn = rng.randrange(len(self.groups))
        lengths = self.groups[drawn if seed else number % len(self.groups)]
        return GroupCosts(
            tokens=tuple(max(1.0, lengths[sample % len(lengths)]) for sample in range(samples)),
            grading_s=tuple(self.grading_s.sample(rng) for _ in range(samples)),
            is_uniform=rng.random() < self.uniform_share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is simulated instead of a whole step of many episodes: every n-th group, on fewer devices as far as their
    numbers can be divided, and else with fewer lanes each. A lane then stands for several: a decoding step with as
    large a share of the lanes takes as long, and so does everything else of a step. The longest answer of a part is
    shorter than that of the whole, so that it is too fast where this one answer decides."""

    groups: int = 1  # of a step, so many times fewer
    devices: int = 1  # so many times fewer; divides `groups`

    @property
    def lanes(self) -> int:
        """How many lanes of a device one stands for."""
        return self.groups // self.devices

    def can_have(self, configuration: Configuration) -> bool:
        """Whether its devices can be divided."""
        return configuration.devices % self.devices == (configuration.rollout_devices or 0) % self.devices == 0


WHOLE = Part()


def part_of(workload: Workload, configuration: Configuration, most_episodes: int) -> Part | None:
    """The largest part of a step that has no more episodes. None: the groups of a step have no such divisor, or the
    devices too few lanes."""
    least = -(-workload.episodes // most_episodes)
    most = workload.groups_per_step // _FEWEST_GROUPS
    groups = next((each for each in range(least, most + 1) if workload.groups_per_step % each == 0), None)
    if least <= 1 or groups is None:
        return WHOLE if least <= 1 else None
    parts = (Part(groups=groups, devices=devices) for devices in range(1, groups + 1) if groups % devices == 0)
    enough = (each for each in parts if each.can_have(configuration))
    return next((each for each in enough if configuration.lanes >= _FEWEST_LANES * each.lanes), None)


def _in_part(
    costs: CostModel, workload: Workload, configuration: Configuration, part: Part
) -> tuple[CostModel, Workload, Configuration]:
    """The same of a part: costs of a lane and of a token that each stand for several."""
    generation, rollout_devices = costs.generation, configuration.rollout_devices
    graders = max(1, configuration.graders // part.groups)
    costs = replace(
        _slower_grading(costs, graders * part.groups / configuration.graders),
        generation=replace(
            generation, lane_s=part.lanes * generation.lane_s, prefill_tokens_s=generation.prefill_tokens_s / part.lanes
        ),
        update=replace(costs.update, token_s=part.lanes * costs.update.token_s),
    )
    if isinstance(costs, RecordedCosts):  # those of a step stay those of this step
        costs = replace(costs, groups=costs.groups[:: part.groups])
    return costs, workload.smaller(part.groups), replace(
        configuration, devices=configuration.devices // part.devices, graders=graders,
        rollout_devices=None if rollout_devices is None else rollout_devices // part.devices,
        lanes=max(1, round(configuration.lanes / part.lanes)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one configuration: means over all simulated steps. Phases add up to `step_s`: those that the devices of a
    colocated layout go through, or else the update and what the learner waits for."""

    configuration: Configuration
    step_s: float
    spread_s: float  # standard deviation between seeds
    phases: Mapping[str, float]
    generator_idle: Mapping[str, float]  # cause -> share of the generators' time
    learner_idle: Mapping[str, float]
    idle: float  # share of the time of all devices
    tokens_s: float  # trained, of all devices
    staleness_mean: float
    gpu_hours: float  # of the whole run, with its start and what is between steps

    @property
    def largest_idle(self) -> tuple[str, str, float] | None:
        """Who waits most, for what, and for which share of its time; None if nobody does."""
        causes = [("generators", cause, share) for cause, share in self.generator_idle.items()]
        causes += [("learners", cause, share) for cause, share in self.learner_idle.items()]
        return max(causes, key=lambda each: each[2], default=None)


def predict(
    costs: CostModel, workload: Workload, configuration: Configuration, *,
    seeds: Sequence[int] = (1, 2, 3), steps: int = 6, most_episodes: int | None = None, part: Part = WHOLE,
) -> Prediction:  # fmt: skip
    """Simulates `steps` steps for every seed, after those that fill the pipeline. `most_episodes`: of one step; a
    larger batch is simulated as a part of it on the same part of the devices. Where there are too few devices for that,
    their time is linear in the groups of a step, and is extrapolated from smaller batches. `part`: of a step, instead;
    configurations that are compared need the same."""
    factor = 1 if most_episodes is None else _replica(workload, configuration, most_episodes)
    if most_episodes is not None and workload.episodes // factor > 2 * most_episodes:
        return _extrapolated(costs, workload, configuration, seeds, steps, most_episodes * factor)
    reports = [_simulated(costs, workload, configuration, seed, steps, factor, part) for seed in seeds]
    times = factor * part.groups
    seconds = [report.step_s for report in reports]
    step_s = statistics.fmean(seconds)
    idle_s = [_idle_by_cause(report) for report in reports]
    generator_idle, learner_idle = (_mean_shares([each[side] for each in idle_s]) for side in (0, 1))
    whole_s = workload.start_s + workload.steps * (step_s + workload.outside_s)
    return Prediction(
        configuration=configuration,
        step_s=step_s,
        spread_s=statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        phases=_phases(step_s, configuration, costs, times, reports, generator_idle, learner_idle),
        generator_idle=generator_idle,
        learner_idle=learner_idle,
        idle=statistics.fmean(report.idle_share for report in reports),
        tokens_s=times * statistics.fmean(report.tokens_s for report in reports),
        staleness_mean=statistics.fmean(report.staleness_mean for report in reports),
        gpu_hours=configuration.devices * whole_s / 3600,
    )


def _extrapolated(
    costs: CostModel, workload: Workload, configuration: Configuration, seeds: Sequence[int], steps: int, episodes: int
) -> Prediction:
    """From batches of so many episodes, and of half of them."""
    count = max(2, episodes // workload.samples)
    large, small = (
        predict(costs, replace(workload, groups_per_step=each), configuration, seeds=seeds, steps=steps)
        for each in (count, count // 2)
    )
    more = workload.groups_per_step - count
    step_s = large.step_s + more * max(0.0, large.step_s - small.step_s) / (count - count // 2)
    factor = step_s / large.step_s
    whole_s = workload.start_s + workload.steps * (step_s + workload.outside_s)
    return replace(
        large, step_s=step_s, spread_s=factor * large.spread_s,
        phases={phase: factor * seconds for phase, seconds in large.phases.items()},
        tokens_s=large.tokens_s * workload.groups_per_step / count / factor,
        gpu_hours=configuration.devices * whole_s / 3600,
    )  # fmt: skip


def simulated_report(
    costs: CostModel, workload: Workload, configuration: Configuration, *, seed: int, steps: int, warm_up: int,
    cool_down: int, part: Part = WHOLE,
) -> SimulationReport:  # fmt: skip
    """One simulation of a configuration: `steps` are measured after `warm_up`."""
    if part != WHOLE:
        costs, workload, configuration = _in_part(costs, workload, configuration, part)
    schedule = ScheduleSettings(
        steps=warm_up + steps + cool_down,
        groups_per_step=workload.groups_per_step,
        samples=workload.samples,
        staleness=configuration.staleness,
        on_new_weights=workload.on_new_weights if configuration.staleness else "recompute",
        replaces_uniform=workload.replaces_uniform,
        max_replaced=workload.max_replaced,
        lends=configuration.layout == "elastic",
    )
    lanes = configuration.lanes
    layout = DeviceLayout(
        devices=configuration.devices, rollout_devices=configuration.rollout_devices, lanes=lanes,
        ahead=-(-lanes // _AHEAD),
    )  # fmt: skip
    if costs.graders is not None:
        costs = replace(costs, graders=configuration.graders)
    return simulate(schedule, costs, layout, seed=seed, warm_up=warm_up, cool_down=cool_down, audited=False)


def _simulated(
    costs: CostModel, workload: Workload, configuration: Configuration, seed: int, steps: int, factor: int, part: Part
) -> SimulationReport:
    if factor > 1:
        graders = max(1, configuration.graders // factor)
        costs = _slower_grading(costs, graders * factor / configuration.graders)
        workload = workload.smaller(factor)
        rollout_devices = configuration.rollout_devices
        configuration = replace(
            configuration, devices=configuration.devices // factor, graders=graders,
            rollout_devices=None if rollout_devices is None else rollout_devices // factor,
        )  # fmt: skip
    staleness = configuration.staleness
    warm_up, cool_down = (staleness + 2, staleness + 1) if configuration.layout != "colocated" else (1, 1)
    return simulated_report(
        costs, workload, configuration, seed=seed, steps=steps, warm_up=warm_up, cool_down=cool_down, part=part
    )


def _replica(workload: Workload, configuration: Configuration, most_episodes: int) -> int:
    """How many times smaller a simulation may be: a power of two that divides devices and groups."""
    numbers = [workload.groups_per_step, configuration.devices]
    numbers += [] if configuration.rollout_devices is None else [configuration.rollout_devices]
    factor = 1
    while workload.episodes / factor > most_episodes and all(each % (2 * factor) == 0 for each in numbers):
        factor *= 2
    return factor


def _slower_grading(costs: CostModel, factor: float) -> CostModel:
    """Fewer graders than a part of them would be have to be faster: as many gradings a second stay."""
    if costs.graders is None or factor == 1:
        return costs
    grading = costs.grading_s
    slower = LogNormal(median=grading.median * factor, sigma=grading.sigma, cap=grading.cap * factor)
    return replace(costs, grading_s=slower)


def _idle_by_cause(report: SimulationReport) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of the time of generators and of learners."""
    layout, seconds = report.layout, report.seconds
    generators: dict[str, float] = {}
    learners: dict[str, float] = {}
    for cause, idle_s in report.generator_idle_s.items():
        generators[cause] = idle_s / (layout.num_generators * seconds)
    for cause, idle_s in report.learner_idle_s.items():
        learners[cause] = idle_s / (layout.num_learners * seconds)
    return generators, learners


def _mean_shares(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    causes = sorted({cause for each in shares for cause in each})
    means = {cause: statistics.fmean(each.get(cause, 0.0) for each in shares) for cause in causes}
    return {cause: share for cause, share in means.items() if share > 1e-9}


def _phases(
    step_s: float, configuration: Configuration, costs: CostModel, times: int, reports: Sequence[SimulationReport],
    generator_idle: Mapping[str, float], learner_idle: Mapping[str, float],
) -> dict[str, float]:  # fmt: skip
    """Seconds of a step. What a lent device of the learner generates is part of the wait for generation. `times`: how
    many times as many tokens a step has as the reports."""
    if configuration.rollout_devices is None:
        tokens = times * statistics.fmean(report.trained_tokens / report.steps for report in reports)
        update_s = costs.update.update_s(tokens, configuration.devices)
        waits = {cause: share * step_s for cause, share in generator_idle.items()}
        generation_s = max(0.0, step_s - update_s - sum(waits.values()))
        return {"generation": generation_s, **waits, "update": update_s}
    waits = {cause: share * step_s for cause, share in learner_idle.items() if cause != "generation"}
    if configuration.layout == "elastic":  # lent devices are idle only where they have nothing to generate
        tokens = times * statistics.fmean(report.trained_tokens / report.steps for report in reports)
        update_s = min(step_s, costs.update.update_s(tokens, configuration.num_learners))
        return {"generation": max(0.0, step_s - update_s - sum(waits.values())), **waits, "update": update_s}
    generation_s = learner_idle.get("generation", 0.0) * step_s
    return {"generation": generation_s, **waits, "update": step_s - generation_s - sum(waits.values())}
