# SPDX-License-Identifier: Apache-2.0
"""Decides what is done about workers that died; pure. How it is done is up to the executors and `rewinding`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, assert_never

Part = Literal["grader", "runner", "generator", "learner", "cluster"]
"""What died. generator: one on a device of its own, else it is a learner's. cluster: Ray itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Workers are gone, or their pool cannot go on without one that is."""

    part: Part
    cause: str
    serves_runners: bool = False  # a generator whose requests are in episodes of runners


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Start the process again and repeat its call."""


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


Remedy = Retry | Respawn | Rewind | Abort


class RecoveryPlan:
    """Deaths since the last committed step, and what is done about the next one. A run that makes progress may lose
    workers for as long as it lasts; one that loses them without progress ends."""

    def __init__(self, most: int) -> None:
        """`most`: deaths of one part that are answered before a step must be committed."""
        self._most = most
        self._num_deaths: Counter[Part] = Counter()
        self.num_recoveries = 0  # over the whole run

    def note_progress(self) -> None:
        """A step was committed."""
        self._num_deaths.clear()

    def decide(self, death: Death) -> Remedy:
        """What to do about a death."""
        self._num_deaths[death.part] += 1
        if death.part != "cluster" and self._num_deaths[death.part] > self._most:
            return Abort(reason=self._too_often(death.part))
        self.num_recoveries += death.part != "cluster"
        match death.part:
            case "grader":
                return Retry()
            case "runner":
                return Respawn()
            case "generator":
                return Rewind() if death.serves_runners else Respawn()
            case "learner":
                return Rewind()
            case "cluster":
                return Abort(reason="Ray itself is gone, and all workers with it")
            case other:
                assert_never(other)

    def _too_often(self, part: Part) -> str:
        if self._most == 0:
            return "placement.restarts is 0"
        times = "once" if self._most == 1 else f"{self._most} times"
        return f"the {part} was replaced {times} since the last committed step, as often as placement.restarts allows"
