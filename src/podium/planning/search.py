# SPDX-License-Identifier: Apache-2.0
"""Searches the configurations of a workload: layouts, their devices, staleness, graders, lanes, and before a run
micro-batches and the sharding of the learner, over any number of devices. A quick look at all of them chooses which are
simulated. Torch-free."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from podium.controller.simulation.costs import CostModel
from podium.errors import RecipeError
from podium.planning.bounds import Lengths, lengths_of, quick_step_s
from podium.planning.prediction import Configuration, Prediction, Workload, predict

STALENESSES = (0, 1, 2, 4)
# Episodes of a step that are simulated, and its seeds.
_MOST_EPISODES, _SEEDS = 256, (1, 2)
# Configurations of one number of devices that are simulated where there are many numbers, beside the best on-policy.
_SIMULATED = 2
# Shares of the devices for generation are multiples of one of so many parts.
_PARTS = 8
# More graders, other lanes and micro-batches have to gain so much.
_LEAST_GAIN = 0.03
# Twice as many lanes as a run had, so many times.
_LANE_DOUBLINGS = 4


class Choices(Protocol):
    """What a configuration costs, and which others there are of its layout, devices and staleness."""

    def costs(self, one: Configuration) -> CostModel:
        """Of this configuration."""

    def running(self, one: Configuration) -> Configuration:
        """The configuration as it is simulated: with the lanes that really run."""

    def variants(self, one: Configuration) -> Sequence[Configuration]:
        """The configuration and others like it that fit, its own lanes and micro-batch first; empty: none fits."""


@dataclass(frozen=True, slots=True)
class MeasuredChoices:
    """Costs of a run, or of several of different layouts. Their records do not say what fits the memory, and not what
    another micro-batch would take."""

    measured: Callable[[Configuration], CostModel]
    workload: Workload | None = None
    """With it other lanes are looked at: the run has told what a lane costs."""

    def costs(self, one: Configuration) -> CostModel:
        """The measured ones."""
        return self.measured(one)

    def running(self, one: Configuration) -> Configuration:
        """As it is."""
        return one

    def variants(self, one: Configuration) -> Sequence[Configuration]:
        """With half as many lanes, and twice as many while all answers that there can be at a time do not run."""
        if self.workload is None:
            return (one,)
        found, generators = [one], one.devices if one.rollout_devices is None else one.rollout_devices
        needed = math.ceil(self.workload.episodes * (1 + one.staleness) / generators)
        lanes = one.lanes
        while lanes < needed and lanes < one.lanes << _LANE_DOUBLINGS:
            lanes *= 2
            found.append(replace(one, lanes=lanes))
        found += [replace(one, lanes=one.lanes >> halving) for halving in (1, 2) if one.lanes >> halving]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """The best of one number of devices, and the best of every layout and staleness with it, the fastest first."""

    devices: int
    predictions: tuple[Prediction, ...]

    @property
    def best(self) -> Prediction:
        """The fastest."""
        return self.predictions[0]

    @property
    def on_policy(self) -> Prediction:
        """The fastest without staleness."""
        fresh = [each for each in self.predictions if not each.configuration.staleness]
        return fresh[0] if fresh else self.predictions[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """By number of devices. `is_complete` is False where the time was over before all was looked at. `impossible`:
    numbers of devices on which the recipe can have no layout, or none that fits."""

    choices: tuple[DeviceChoice, ...]
    num_simulated: int
    seconds: float
    is_complete: bool
    impossible: tuple[int, ...] = ()

    @property
    def fastest(self) -> Prediction:
        """Of all numbers of devices."""
        return min((choice.best for choice in self.choices), key=lambda each: each.step_s)

    @property
    def cheapest(self) -> Prediction:
        """That with the fewest GPU-hours."""
        return min((choice.best for choice in self.choices), key=lambda each: each.gpu_hours)


def search(
    costs: CostModel | Choices, workload: Workload, base: Configuration, *, devices: Sequence[int],
    stalenesses: Sequence[int] = STALENESSES, budget_s: float = 45.0, clock: Callable[[], float] = time.monotonic,
) -> SearchResult:  # fmt: skip
    """The best configurations for each number of devices. `base` has the lanes, the micro-batch and the graders to
    begin with. With one number of devices the best of every layout and staleness is simulated, with several only the
    most promising ones. When the budget is over, it returns what it has. Raises a RecipeError if nothing is
    possible."""
    began_s = clock()
    options = MeasuredChoices(lambda _: costs) if isinstance(costs, CostModel) else costs
    lengths = lengths_of(options.costs(base), workload)
    choices: list[DeviceChoice] = []
    impossible: list[int] = []
    count, is_complete = 0, True
    for number in devices:
        if choices and clock() - began_s > budget_s:
            is_complete = False
            break
        ranked = _ranked(options, workload, base, number, stalenesses, lengths)
        chosen = ranked if len(devices) == 1 else _promising(ranked)
        found = [predicted(options, workload, each) for each in chosen]
        count += len(found)
        if found:
            choices.append(DeviceChoice(devices=number, predictions=tuple(sorted(found, key=lambda each: each.step_s))))
        else:
            impossible.append(number)
    if not choices:
        raise RecipeError(
            f"--devices: with {', '.join(map(str, impossible))} no layout and staleness that were asked for are "
            "possible for this recipe, or none fits the memory. Give more devices, or another --staleness."
        )
    return SearchResult(
        choices=tuple(choices), num_simulated=count, seconds=clock() - began_s, is_complete=is_complete,
        impossible=tuple(impossible),
    )  # fmt: skip


def predicted(costs: CostModel | Choices, workload: Workload, configuration: Configuration) -> Prediction:
    """A prediction from so many steps that a pipeline which was full at the beginning says nothing of the speed."""
    options = MeasuredChoices(lambda _: costs) if isinstance(costs, CostModel) else costs
    steps, one = max(4, 2 * (configuration.staleness + 1)), options.running(configuration)
    found = predict(options.costs(one), workload, one, seeds=_SEEDS, steps=steps, most_episodes=_MOST_EPISODES)
    return replace(found, configuration=configuration)


def _promising(ranked: Sequence[Configuration]) -> list[Configuration]:
    fresh = [each for each in ranked if not each.staleness]
    return list(dict.fromkeys([*ranked[:_SIMULATED], *fresh[:1]]))


def _ranked(
    options: Choices, workload: Workload, base: Configuration, devices: int, stalenesses: Iterable[int],
    lengths: Lengths,
) -> list[Configuration]:  # fmt: skip
    """The best share of devices of every layout and staleness, at a quick look; the fastest first."""

    def quick_s(one: Configuration) -> float:
        running = options.running(one)
        return quick_step_s(options.costs(running), workload, running, lengths)

    found: list[Configuration] = []
    for layout in workload.layouts:
        for staleness in stalenesses:
            one = replace(base, staleness=staleness)
            if not workload.allows(replace(one, layout=layout, devices=devices)) or (
                layout == "colocated" and staleness
            ):
                continue
            shares = [None] if layout == "colocated" else _shares(devices)
            placed = [one.placed(layout, devices=devices, rollout_devices=share) for share in shares]
            best = [_best_variant(options.variants(each), quick_s) for each in placed]
            fitting = [each for each in best if each is not None]
            if options.costs(base).graders is not None:
                fitting = [_with_graders(each, quick_s) for each in fitting]
            if fitting:
                found.append(min(fitting, key=quick_s))
    return sorted(found, key=quick_s)


def _best_variant(variants: Sequence[Configuration], quick_s: Callable[[Configuration], float]) -> Configuration | None:
    """The first one, unless another gains enough; then the first of those that are about as fast as the fastest."""
    if len(variants) < 2:
        return variants[0] if variants else None
    times = {each: quick_s(each) for each in variants}
    fastest = min(times.values())
    if fastest > times[variants[0]] * (1 - _LEAST_GAIN):
        return variants[0]
    return next(each for each in variants if times[each] <= fastest * (1 + _LEAST_GAIN / 3))


def _shares(devices: int) -> list[int | None]:
    """Numbers of devices that may generate."""
    step = max(1, devices // _PARTS)
    return list(range(step, devices, step))


def _with_graders(one: Configuration, quick_s: Callable[[Configuration], float]) -> Configuration:
    """With twice as many graders while that gains enough."""
    while True:
        more = replace(one, graders=2 * one.graders)
        if quick_s(more) > quick_s(one) * (1 - _LEAST_GAIN):
            return one
        one = more


def why(winner: Prediction, other: Prediction) -> str:
    """The faster configuration, and why it is faster than another, by what their devices wait for."""
    if winner.configuration == other.configuration:
        return f"{winner.configuration.name}. Nothing that was looked at is faster: {idle_text(winner)}."
    ratio = other.step_s / winner.step_s
    text = (
        f"{winner.configuration.name}, {ratio:.2f} times as fast as {other.configuration.name}, where "
        f"{idle_text(other)}; here {idle_text(winner)}."
    )
    if winner.configuration.staleness > other.configuration.staleness:
        text += (
            " Generation goes on during updates, with weights that are "
            f"{winner.staleness_mean:.1f} versions old on average: training is off-policy by that much."
        )
    return text


def idle_text(prediction: Prediction) -> str:
    """How much of the device time is idle, and who waits for what most."""
    largest = prediction.largest_idle
    if largest is None or largest[2] < 0.01:
        return "devices are hardly ever idle"
    who, cause, share = largest
    return f"{prediction.idle:.0%} of the device time is idle, most where {who} wait for {WAITS[cause]} ({share:.0%})"


WAITS = {
    "generation": "generation", "tail": "the longest answers", "grading": "grading", "update": "the update",
    "publish": "new weights", "recompute": "KV caches", "switching": "devices that change sides",
}  # fmt: skip
