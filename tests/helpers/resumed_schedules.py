# SPDX-License-Identifier: Apache-2.0
"""Schedules that are saved, stopped, killed and resumed, and what must hold of their prompts in the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from helpers.schedules import World
from podium.controller.done_prompts import DonePrompts
from podium.controller.schedule_audit import ScheduleAudit
from podium.controller.scheduler import GroupScheduler
from podium.controller.scheduling import Action, Admit, Continue, Continued, StartStep, StepRequested, WorkerJoined


@dataclass(frozen=True, slots=True)
class Saved:
    """What a resumed run begins with. `trained` and `void` are the ledger's, of the steps until then."""

    step: int = 0
    version: int = 0
    data: Mapping[str, Any] = field(default_factory=lambda: {"next": 0})
    trained: tuple[tuple[int, ...], ...] = ()  # prompts, by step
    void: frozenset[int] = frozenset()


class CountedPrompts:
    """Prompts 0, 1, 2, ... from a saved state, which is that of a PromptSource."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.next, self._done = int(state["next"]), set(state.get("done", ()))

    @property
    def passed(self) -> set[int]:
        """Those before the next one, and later ones that are done."""
        return {*range(self.next), *self._done}

    def take(self) -> int:
        while self.next in self._done:
            self._done.remove(self.next)
            self.next += 1
        self.next += 1
        return self.next - 1

    def state(self) -> dict[str, Any]:
        return {"next": self.next, **({"done": sorted(self._done)} if self._done else {})}


@dataclass
class ResumedWorld(World):
    """A world whose groups have prompts. Commits are saved at random; what is stopped goes on from its last commit,
    and what is killed from the last save: with new workers, a new scheduler and the prompts that the save leaves."""

    make: Callable[..., GroupScheduler] = GroupScheduler
    make_done: Callable[[], DonePrompts] = DonePrompts
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    resumes: bool = False  # after stops
    save_share: float = 1.0  # of commits
    kills_s: tuple[float, ...] = ()  # seconds from a start to the end of its process, for as many starts
    resumed: list[Saved] = field(default_factory=list)  # what every start but the first began with
    trained: list[tuple[int, ...]] = field(default_factory=list)
    void: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._saved = self._last_commit = Saved()
        self._start_data()

    @property
    def left(self) -> set[int]:
        """Prompts that were taken, and that no step has collected."""
        return {prompt for prompt, _ in self._taken.values()}

    @property
    def passed(self) -> set[int]:
        """Prompts that no group will be made of any more."""
        return self._prompts.passed

    def _start_data(self) -> None:
        self._prompts, self._done = CountedPrompts(self._saved.data), self.make_done()
        self._taken: dict[int, tuple[int, dict[str, Any]]] = {}  # group -> its prompt, and the data's state before it
        self._claimed: tuple[tuple[int, ...], tuple[int, ...]] = (), ()  # by the step: trained, void

    def _begin(self) -> None:
        if len(self.resumed) < len(self.kills_s):
            self._after(self.kills_s[len(self.resumed)], "resume")
        super()._begin()

    def _note_live(self, actions: Iterable[Action]) -> None:
        super()._note_live(actions)
        for action in actions:
            if isinstance(action, Admit) and action.group not in self._taken:
                before = self._prompts.state()
                self._taken[action.group] = self._prompts.take(), before
            elif isinstance(action, StartStep):
                trained = tuple(self._taken.pop(group)[0] for group in action.groups)
                void = tuple(self._taken.pop(group)[0] for group in action.voided)
                self._claimed = trained, void
                self._done.add([*trained, *void])

    def _note_committed(self) -> None:
        trained, void = self._claimed
        self.trained.append(trained)
        self.void.update(void)
        self._last_commit = Saved(
            self.committed, self.version, self._done.state(self._taken.values(), self._prompts.state),
            tuple(self.trained), frozenset(self.void),
        )  # fmt: skip
        if self.chance.random() < self.save_share:
            self._saved = self._last_commit

    def _end(self) -> None:
        """A run that was stopped has been saved."""
        self.ended = self.committed >= self.settings.steps or not self.resumes
        if not self.ended:
            self._saved = self._last_commit
            self._queue.clear()
            self._after(0.0, "resume")

    def _resume(self) -> None:
        """Nothing of the process before is left but what it saved."""
        saved = self._last_commit = self._saved
        self.resumed.append(saved)
        self.scheduler = self.make(self.settings, step=saved.step, version=saved.version)
        self.audit = ScheduleAudit(self.settings, step=saved.step, version=saved.version)
        self.committed, self.version = saved.step, saved.version
        self.trained, self.void = list(saved.trained), set(saved.void)
        del self.steps[saved.step :]
        for each in (self._queue, self.engines, self.histories, self.admitted, self.stopped, self._live, self._begun):
            each.clear()
        self._goes_on = False
        if self.stop_after is not None:
            later = self.chance.randint(saved.step + 1, self.settings.steps)
            self.stop_after = self.chance.choice([None, later])
        self._start_data()
        self._begin()


def check_prompts(world: ResumedWorld) -> None:
    """Over all starts of a run, every prompt is trained once, void, or left by the stop; none is lost."""
    settings, trained = world.settings, [prompt for step in world.trained for prompt in step]
    assert len(trained) == len(set(trained)), "a prompt was trained twice"
    ends = [*trained, *world.void, *world.left]
    assert sorted(ends) == sorted(world.passed), "a prompt has no end, or two"
    if settings.staleness == 0:  # the groups of a step are the next prompts, without replaced ones
        assert trained == sorted(trained), "a synchronous run takes prompts in order"
    if not settings.replaces_uniform:
        assert [len(step) for step in world.trained] == [settings.groups_per_step] * len(world.trained)
        if len(world.trained) == settings.steps:
            assert sorted(trained) == list(range(settings.steps * settings.groups_per_step)), "a prompt was passed over"


def check_capacity(world: ResumedWorld) -> None:
    """What a resumed run may admit at its first request is what a new one may, until the steps that are left end."""
    settings = world.settings
    for saved in world.resumed:
        steps = min(settings.staleness + 1, settings.steps - saved.step)
        assert _capacity(world, saved) == steps * settings.groups_per_step, f"capacity after step {saved.step}"


def _capacity(world: ResumedWorld, saved: Saved) -> int:
    """Groups that are admitted where every worker is given one, and there are more workers than groups allowed."""
    settings = world.settings
    scheduler = world.make(settings, step=saved.step, version=saved.version)
    for number in range((settings.staleness + 1) * settings.groups_per_step + 3):
        scheduler.decide(WorkerJoined(worker=str(number), lanes=settings.samples, version=saved.version))
    actions = more = scheduler.decide(StepRequested())
    while more and isinstance(more[-1], Continue):
        more = scheduler.decide(Continued())
        actions = [*actions, *more]
    return len({action.group for action in actions if isinstance(action, Admit)})
