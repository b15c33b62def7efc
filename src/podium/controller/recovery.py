# SPDX-License-Identifier: Apache-2.0
"""Decides what is done about workers that died; pure. How it is done is up to the executors, `replacing` and
`rewinding`. Which slots of a pool are filled again is a fact of the cluster: `podium.cluster.health.remedy`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, assert_never

Part = Literal["learner", "generator", "grader", "runner", "controller"]
"""What died. generator: one on a device of its own, else it is a learner's; controller: that, or the Ray that it has
started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Workers are gone, or their pool cannot go on without one that is."""

    part: Part
    cause: str
    slots: tuple[int, ...] = ()  # of the part's workers that died, where each is started alone
    others_go_on: bool = False  # whether only its own work is done again, while the others work
    # Of a grader whose batch was lost: how often that has happened to the same batch, and how often without an answer.
    failures: int = 0
    hangs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Start another worker in its place, and give it the same work again, under the same ids. The others go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Start another worker in its place, and do without the work, which has ended several: its episodes have no
    reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Respawn:
    """Let the others take over its running episodes, and start another worker when there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """Start the learners again, all that meet in collectives, with the state of the last committed step. The others go
    back to that step with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """Go back to the last committed step with the learners that live, and replace what died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End the run."""

    reason: str


Remedy = Retry | GiveUp | Respawn | Rebuild | Rewind | Abort


class RecoveryPlan:
    """Deaths since the last committed step, and what is done about the next one. A run that makes progress may lose
    workers for as long as it lasts; one in which the same worker dies again and again without progress ends. Learners
    count as one worker, because they are replaced together; every generator, runner and grader counts alone, so that a
    node may die with any number of them."""

    def __init__(self, most: int, *, goes_back: bool = True, on_progress: Callable[[], object] = lambda: None) -> None:
        """`most`: deaths of one worker that are answered before a step must be committed. `goes_back`: whether the run
        can go on from an earlier step."""
        self._most, self._goes_back, self._on_progress = most, goes_back, on_progress
        self._num_deaths: Counter[tuple[Part, int | None]] = Counter()  # by part and slot
        self._end: Abort | None = None

    def note_progress(self) -> None:
        """A step was committed."""
        self._num_deaths.clear()
        self._on_progress()

    def note_work_done(self, part: Part, slot: int) -> None:
        """A worker has done some of its work, so whatever ended those before it does not end every one."""
        self._num_deaths.pop((part, slot), None)

    def decide(self, death: Death) -> Remedy:
        """What to do about a death. Once the run is to end, that does not change: the error of that death is noticed
        at several places."""
        remedy = self._end or self._decide(death)
        if isinstance(remedy, Abort):
            self._end = remedy
        return remedy

    def _decide(self, death: Death) -> Remedy:
        if self._most == 0:
            return Abort(reason="placement.restarts is 0")
        if death.failures:
            # The next worker may not answer either, and each of them takes as long as the deadline of a batch.
            return Retry() if death.failures <= self._most and death.hangs <= 1 else GiveUp()
        for slot in death.slots or (None,):
            self._num_deaths[death.part, slot] += 1
            if self._num_deaths[death.part, slot] > self._most:
                return Abort(reason=self._too_often(death.part, slot))
        match death.part:
            case "grader" | "runner" if death.others_go_on:
                return Retry()
            case "generator" if death.others_go_on:
                return Respawn()
            case "learner":
                return self._going_back(Rebuild())
            case "grader" | "runner" | "generator" | "controller":
                return self._going_back(Rewind())
            case other:
                assert_never(other)

    def _going_back(self, remedy: Rebuild | Rewind) -> Remedy:
        return remedy if self._goes_back else Abort(reason="this run cannot go back to an earlier step")

    def _too_often(self, part: Part, slot: int | None) -> str:
        times = "once" if self._most == 1 else f"{self._most} times"
        who = f"the {part}" if slot is None else f"{part} {slot}"
        and_more = ", without an episode that ended" if part == "runner" else ""
        return (
            f"{who} was replaced {times} since the last committed step{and_more}, as often as placement.restarts allows"
        )
