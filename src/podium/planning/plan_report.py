# SPDX-License-Identifier: Apache-2.0
"""A plan as lines of text and as values for JSON. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from podium.observe.formats import table
from podium.planning.devices import Device
from podium.planning.memory import MemoryPlan
from podium.planning.prediction import Prediction
from podium.planning.search import SearchResult, idle_text, why


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What there is to say: facts, predictions for configurations, and why the best one is the best."""

    title: str
    facts: tuple[str, ...]
    base: Prediction | None  # None: there is none, or the recipe as it is does not fit
    found: SearchResult | None
    notes: tuple[str, ...]
    values: Mapping[str, Any]  # of the facts, for JSON
    changes: Mapping[str, str] = field(default_factory=dict)  # keys of the recipe that lead to the best one
    reasons: tuple[str, ...] = ()  # for its lanes, micro-batch and sharding

    @property
    def best(self) -> Prediction | None:
        """The fastest one; the recipe's own, if nothing that was looked at is faster."""
        if self.found is None:
            return None
        fastest = self.found.fastest
        return fastest if self.base is None else min(fastest, self.base, key=lambda each: each.step_s)

    def lines(self) -> list[str]:
        """Readable text."""
        lines = [self.title, *(f"  {fact}" for fact in self.facts)]
        if self.found is not None and self.best is not None:
            against = self.base or self.best
            lines += ["", *table([_HEADER, *(_row(each, against) for each in self._shown())])]
            lines += ["", *self._reasons(self.found, self.best)]
        return [*lines, *self.notes]

    def as_json(self) -> dict[str, Any]:
        """Values of the same."""
        shown = [prediction_values(each) for each in self._shown()]
        best = None if self.found is None else prediction_values(self.found.fastest)
        return {
            "title": self.title, **self.values, "predictions": shown, "best": best, "set": dict(self.changes),
            "reasons": list(self.reasons), "notes": list(self.notes),
        }  # fmt: skip

    def _shown(self) -> list[Prediction]:
        """One number of devices: every layout. Several: the best of each, and the best on-policy."""
        if self.found is None:
            return []
        choices = self.found.choices
        shown = [] if self.base is None else [self.base]
        for choice in choices:
            some = choice.predictions if len(choices) == 1 else (choice.best, choice.on_policy)
            for each in some:
                if all(each.configuration != other.configuration for other in shown):
                    shown.append(each)
        return shown

    def _reasons(self, found: SearchResult, best: Prediction) -> list[str]:
        if self.base is not None:
            lines = [f"best: {why(best, self.base)}"]
        else:
            lines = [f"best: {best.configuration.name}, where {idle_text(best)}. The recipe as it is does not fit."]
        if self.changes:
            lines.append("  set " + ", ".join(f"{key}: {new}" for key, new in self.changes.items()))
        lines += [f"  {reason}." for reason in self.reasons]
        fresh = min(
            [choice.on_policy for choice in found.choices if not choice.on_policy.configuration.staleness],
            key=lambda each: each.step_s,
            default=None,
        )
        if best.configuration.staleness and fresh is not None:
            lines.append(f"best on-policy: {fresh.configuration.name}, {seconds_text(fresh.step_s)} a step")
        if len(found.choices) > 1:
            cheap = found.cheapest
            lines.append(f"cheapest: {cheap.configuration.name}, {cheap.gpu_hours:.3g} device-hours")
        if found.impossible:
            numbers = ", ".join(map(str, found.impossible))
            lines.append(f"with {numbers} devices no layout is possible, or none fits the memory")
        if not found.is_complete:
            lines.append(f"after {found.seconds:.0f} s the search ended before all numbers of devices were looked at")
        return lines


_HEADER = ("configuration", "s/step", "±", "of now", "trained tokens/s", "device-hours", "idle", "most of it", "age")


def _row(each: Prediction, base: Prediction) -> tuple[str, ...]:
    largest = each.largest_idle
    cause = f"{largest[0]} {largest[2]:.0%} for {largest[1]}" if largest is not None and largest[2] >= 0.01 else "-"
    one, first = each.configuration, base.configuration
    name = one.name + (f", {one.graders} graders" if one.graders != first.graders else "")
    name += f", {one.lanes} lanes" if one.lanes != first.lanes else ""
    name += f", micro-batch {one.micro_batch}" if one.micro_batch != first.micro_batch else ""
    return (
        name, _number(each.step_s), _number(each.spread_s), f"{each.step_s / base.step_s:.2f}",
        f"{each.tokens_s:,.0f}", f"{each.gpu_hours:.3g}", f"{each.idle:.0%}", cause, f"{abs(each.staleness_mean):.1f}",
    )  # fmt: skip


def prediction_values(each: Prediction) -> dict[str, Any]:
    """Of one configuration, for JSON."""
    one = each.configuration
    return {
        "layout": one.layout, "devices": one.devices, "rollout_devices": one.rollout_devices,
        "staleness": one.staleness, "lanes": one.lanes, "graders": one.graders,
        "micro_batch_tokens": one.micro_batch, "step_s": each.step_s,
        "spread_s": each.spread_s, "phases_s": dict(each.phases), "generator_idle": dict(each.generator_idle),
        "learner_idle": dict(each.learner_idle), "idle": each.idle, "tokens_per_s": each.tokens_s,
        "staleness_mean": each.staleness_mean, "gpu_hours": each.gpu_hours,
    }  # fmt: skip


def listed(parts: Mapping[str, float]) -> str:
    """Seconds with their names; without those that are none."""
    return ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds > 0)


def device_notes(device: Device) -> list[str]:
    """Where the speeds of a device are from."""
    if device.is_measured:
        return []
    if device.kind == "cpu":
        return ["speeds of a CPU core are a guess; podium plan --calibrate measures this machine's."]
    return [
        "speeds of the device are its datasheet's, with the shares that were reached on one H200. On a machine that "
        "has it, podium plan --calibrate measures them."
    ]


def memory_values(memory: MemoryPlan) -> list[dict[str, Any]]:
    """Of all phases, for JSON."""
    return [
        {
            "phase": phase.phase, "place": phase.place, "bytes": phase.num_bytes,
            "terms": {term.name: term.num_bytes for term in phase.terms},
            "kept": {term.name: term.num_bytes for term in phase.kept}, "held_bytes": phase.held_bytes,
        }
        for phase in memory.phases
    ]  # fmt: skip


def number_of_devices(number: int) -> str:
    """As a text."""
    return f"{number} device" if number == 1 else f"{number} devices"


def _number(value: float) -> str:
    if 0 < value < 1e-3:
        return f"{value:.1g}" if value >= 5e-5 else "0"
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def seconds_text(seconds: float) -> str:
    """With a unit that suits them."""
    if seconds == 0 or math.isnan(seconds):
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{_number(seconds)} s"
