# SPDX-License-Identifier: Apache-2.0
"""Searches the configurations of a workload: layouts, their devices, staleness, lanes and graders, over any number of
devices. A quick look at all of them chooses which are simulated. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from podium.controller.simulation.costs import CostModel
from podium.planning.bounds import Lengths, lengths_of, quick_step_s
from podium.planning.prediction import Configuration, Prediction, Workload, predict

STALENESSES = (0, 1, 2, 4)
# Episodes of a step that are simulated, and its seeds.
_MOST_EPISODES, _SEEDS = 256, (1, 2)
# Configurations of one number of devices that are simulated where there are many numbers, beside the best on-policy.
_SIMULATED = 2
# Shares of the devices for generation are multiples of one of so many parts.
_PARTS = 8
# More graders have to gain so much.
_LEAST_GAIN = 0.03


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
    """By number of devices. `is_complete` is False where the time was over before all was looked at."""

    choices: tuple[DeviceChoice, ...]
    num_simulated: int
    seconds: float
    is_complete: bool

    @property
    def fastest(self) -> Prediction:
        """Of all numbers of devices."""
        return min((choice.best for choice in self.choices), key=lambda each: each.step_s)

    @property
    def cheapest(self) -> Prediction:
        """That with the fewest GPU-hours."""
        return min((choice.best for choice in self.choices), key=lambda each: each.gpu_hours)


def search(
    costs: CostModel, workload: Workload, base: Configuration, *, devices: Sequence[int],
    stalenesses: Sequence[int] = STALENESSES, budget_s: float = 45.0, clock: Callable[[], float] = time.monotonic,
) -> SearchResult:  # fmt: skip
    """The best configurations for each number of devices. `base` has the lanes of an engine, which memory limits, and
    the graders to begin with. With one number of devices the best of every layout and staleness is simulated, with
    several only the most promising ones. When the budget is over, it returns what it has."""
    began_s = clock()
    lengths = lengths_of(costs, workload)
    choices: list[DeviceChoice] = []
    count, is_complete = 0, True
    for number in devices:
        if choices and clock() - began_s > budget_s:
            is_complete = False
            break
        ranked = _ranked(costs, workload, base, number, stalenesses, lengths)
        chosen = ranked if len(devices) == 1 else _promising(ranked)
        found = [predicted(costs, workload, each) for each in chosen]
        count += len(found)
        choices.append(DeviceChoice(devices=number, predictions=tuple(sorted(found, key=lambda each: each.step_s))))
    return SearchResult(choices=tuple(choices), num_simulated=count, seconds=clock() - began_s, is_complete=is_complete)


def predicted(costs: CostModel, workload: Workload, configuration: Configuration) -> Prediction:
    """A prediction from so many steps that a pipeline which was full at the beginning says nothing of the speed."""
    steps = max(4, 2 * (configuration.staleness + 1))
    return predict(costs, workload, configuration, seeds=_SEEDS, steps=steps, most_episodes=_MOST_EPISODES)


def _promising(ranked: Sequence[Configuration]) -> list[Configuration]:
    fresh = [each for each in ranked if not each.staleness]
    return list(dict.fromkeys([*ranked[:_SIMULATED], *fresh[:1]]))


def _ranked(
    costs: CostModel, workload: Workload, base: Configuration, devices: int, stalenesses: Iterable[int],
    lengths: Lengths,
) -> list[Configuration]:  # fmt: skip
    """The best share of devices of every layout and staleness, at a quick look; the fastest first."""

    def quick_s(one: Configuration) -> float:
        return quick_step_s(costs, workload, one, lengths)

    found: list[Configuration] = []
    for layout in workload.layouts:
        for staleness in stalenesses:
            one = Configuration(
                layout=layout, devices=devices, staleness=staleness, lanes=base.lanes, graders=base.graders
            )
            if not workload.allows(one) or (layout == "colocated" and staleness):
                continue
            if layout == "colocated":
                shares = [one]
            else:
                shares = [replace(one, rollout_devices=share) for share in _shares(devices)]
            if costs.graders is not None:
                shares = [_with_graders(each, quick_s) for each in shares]
            if shares:
                found.append(min(shares, key=quick_s))
    if not found:
        found.append(Configuration(layout="colocated", devices=devices, lanes=base.lanes, graders=base.graders))
    return sorted(found, key=quick_s)


def _shares(devices: int) -> list[int]:
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
