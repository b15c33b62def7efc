# SPDX-License-Identifier: Apache-2.0
"""Decides what is done about workers that died; pure. How it is done is up to the executors and `rewinding`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Part = Literal["learner", "generator", "runner", "controller"]
"""What died. generator: one on a device of its own, else it is a learner's; controller: that, or the Ray that it has
started. A grader is replaced by its handle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Workers are gone, or their pool cannot go on without one that is."""

    part: Part
    cause: str
    others_go_on: bool = False  # whether its work is such that other workers can take it over


@dataclass(frozen=True, slots=True, kw_only=True)
class Respawn:
    """Start another worker in its place while the others work. Its running episodes are run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """Start the workers again, bring all roles back to the last committed step, and go on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End the run."""

    reason: str


Remedy = Respawn | Rewind | Abort


class RecoveryPlan:
    """Deaths since the last committed step, and what is done about the next one. A run that makes progress may lose
    workers for as long as it lasts; one that loses them without progress ends."""

    def __init__(self, most: int, *, on_progress: Callable[[], object] = lambda: None) -> None:
        """`most`: deaths of one part that are answered before a step must be committed."""
        self._most, self._on_progress = most, on_progress
        self._num_deaths: Counter[Part] = Counter()

    def note_progress(self) -> None:
        """A step was committed."""
        self._num_deaths.clear()
        self._on_progress()

    def decide(self, death: Death) -> Remedy:
        """What to do about a death."""
        self._num_deaths[death.part] += 1
        if self._num_deaths[death.part] > self._most:
            return Abort(reason=self._too_often(death.part))
        return Respawn() if death.others_go_on else Rewind()

    def _too_often(self, part: Part) -> str:
        if self._most == 0:
            return "placement.restarts is 0"
        times = "once" if self._most == 1 else f"{self._most} times"
        return f"the {part} was replaced {times} since the last committed step, as often as placement.restarts allows"
