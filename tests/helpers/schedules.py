# SPDX-License-Identifier: Apache-2.0
"""A small world for schedules: workers with lanes, lengths, graders and a learner, on a virtual clock and from a seed.
It answers the scheduler's actions with events, as a cluster would, but at once."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

from podium.controller.schedule_audit import GroupHistory, ScheduleAudit
from podium.controller.scheduler import GroupScheduler
from podium.controller.scheduling import (
    Action,
    Admit,
    Continue,
    Continued,
    DevicesLent,
    DevicesReturned,
    EndRun,
    EpisodeEnded,
    EpisodesReturned,
    Event,
    GiveBack,
    GradeGroup,
    GroupGraded,
    LearnerIdle,
    LearnerWaits,
    Lend,
    Publish,
    Recall,
    Retire,
    ReturnedEpisode,
    ScheduleSettings,
    StartStep,
    StepCommitted,
    StepRequested,
    StopRequested,
    Void,
    WeightsInstalled,
    WorkerJoined,
    WorkerLeaving,
    WorkerLeft,
    WorkerLost,
)


@dataclass(eq=False)
class Sequence:
    group: int
    attempt: int
    sample: int
    oldest: int = -1
    newest: int = -1


@dataclass
class Engine:
    """A worker: sequences beyond its lanes wait. A new version reaches running sequences in flight."""

    name: str
    lanes: int
    version: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)


@dataclass
class Costs:
    """Seconds, as functions of nothing but the random stream."""

    rng: random.Random
    length_s: float = 1.0
    spread: float = 1.0  # sigma of the log-normal lengths
    grade_s: float = 0.2
    update_s: float = 1.0
    publish_s: float = 0.1
    switch_s: float = 0.1  # to lend or recall the learner's devices
    acknowledge_s: float = 0.05  # until the controller knows that a version is installed
    uniform_share: float = 0.0
    skipped_share: float = 0.0  # steps that leave the weights as they were
    loss_every_s: float = 0.0  # mean time between two losses of a worker; 0: none
    leave_every_s: float = 0.0  # mean time between two workers that leave; 0: none. One or two join later
    grace_s: float = 0.0  # until a worker that leaves has given back what it runs; a tenth of them die before

    def length(self) -> float:
        return self.length_s * self.rng.lognormvariate(0.0, self.spread)


@dataclass
class World:
    """Runs a scheduler to its end and keeps what it did. `stop_after`: steps before the user stops it."""

    settings: ScheduleSettings
    costs: Costs
    lanes: tuple[int, ...]
    scheduler: GroupScheduler
    audit: ScheduleAudit | None
    version: int = 0
    stop_after: int | None = None
    stop_at_s: float | None = None  # the user stops it then, during an update or while the program waits
    learner_lanes: tuple[int, ...] = ()  # of the learner's devices, when they are lent
    now_s: float = 0.0
    engines: dict[str, Engine] = field(default_factory=dict)
    steps: list[StartStep] = field(default_factory=list)
    histories: list[GroupHistory] = field(default_factory=list)
    admitted: list[Admit] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)  # groups that were void because the run stopped
    committed: int = 0
    num_lent: int = 0  # how often devices were lent
    lent_for: list[int] = field(default_factory=list)  # committed steps, each time they were
    num_early: int = 0  # how often they were recalled before the next step was complete
    num_moved: int = 0  # episodes that came back
    interrupts: bool = False  # whether other events come between an event and what follows from it
    num_finished: int = 0
    ended: bool = False
    num_events: int = 0
    max_live: int = 0
    last: int | None = None  # the step in progress when the user stopped it at a time
    late: list[Admit] = field(default_factory=list)  # admitted when that step had begun

    def __post_init__(self) -> None:
        self._queue: list[tuple[float, int, str, tuple[object, ...]]] = []
        self._tick = itertools.count()
        self._names = itertools.count()
        self._live: set[int] = set()
        self._requested_s = self._waited_s = 0.0
        self._goes_on = False  # whether the scheduler has more to do
        self._begun: dict[tuple[int, int], tuple[int, int]] = {}  # (group, sample) -> versions of its tokens

    def run(self, *, most_events: int = 1_000_000) -> Self:
        if self.stop_at_s is not None:
            self._after(self.stop_at_s, "stop")
        self._begin()
        while self._queue and not self.ended:
            self.now_s, _, kind, arguments = heapq.heappop(self._queue)
            getattr(self, f"_{kind}")(*arguments)
            assert self.num_events < most_events, "it comes to no end"
        assert self.ended, f"it hangs after step {self.committed}"
        return self

    def _begin(self) -> None:
        for lanes in self.lanes:
            self._join(lanes)
        if self.costs.loss_every_s:
            self._after(self.costs.rng.expovariate(1 / self.costs.loss_every_s), "lose")
        if self.costs.leave_every_s:
            self._after(self.costs.rng.expovariate(1 / self.costs.leave_every_s), "leave")
        self._request()

    def _after(self, seconds: float, kind: str, *arguments: object) -> None:
        heapq.heappush(self._queue, (self.now_s + seconds, next(self._tick), kind, arguments))

    def _tell(self, event: Event) -> None:
        self.num_events += 1
        actions = self.scheduler.decide(event)
        self._note_live(actions)
        if self.audit is not None:
            self.audit.observe(event, actions)
            self.histories += self.audit.take_finished()
        for action in actions:
            self._carry_out(action)
        if self._goes_on:
            self._goes_on = False
            if self.interrupts and not self.stopped and self.costs.rng.random() < 0.5:
                self._after(0.2 * self.costs.rng.random(), "goes_on_later")
            else:
                self._tell(Continued())

    def _goes_on_later(self) -> None:
        self._tell(Continued())

    def _note_live(self, actions: Iterable[Action]) -> None:
        """Live groups were admitted, and are neither claimed by a step nor void."""
        for action in actions:
            match action:
                case Admit():
                    self._live.add(action.group)
                case StartStep():
                    self._live -= set(action.groups)
                case Void():
                    self._live.discard(action.group)
                case _:
                    pass
        self.max_live = max(self.max_live, len(self._live))

    def _carry_out(self, action: Action) -> None:
        costs, rng = self.costs, self.costs.rng
        match action:
            case Admit():
                self.admitted.append(action)
                if self.last is not None and len(self.steps) >= self.last:
                    self.late.append(action)
                engine = self.engines[action.worker]
                engine.waiting.extend(
                    Sequence(action.group, action.attempt, sample, *self._begun.get((action.group, sample), (-1, -1)))
                    for sample in action.samples
                )
                self._fill(engine)
            case GradeGroup():
                self._after(costs.grade_s * rng.random() * 2, "graded", action.group)
            case StartStep():
                self.steps.append(action)
                self._waited_s = self.now_s - self._requested_s
                self._after(costs.update_s * (0.5 + rng.random()), "committed_", action.step)
            case Publish():
                self._after(costs.publish_s * rng.random() * 2, "installed", action.worker, action.version)
            case Lend():
                self._after(costs.switch_s * rng.random() * 2, "lent")
            case Recall():
                self.num_early += not self.scheduler.lacks_only_devices
                self._after(costs.switch_s * rng.random() * 2, "recalled")
            case GiveBack():
                self._after(costs.acknowledge_s * rng.random(), "gives_back", action.worker, set(action.episodes))
            case Retire():
                self._after(costs.grace_s * rng.random(), "retired", action.worker)
            case Void():
                if action.reason == "stopped":
                    self.stopped.append(action.group)
            case Continue():
                self._goes_on = True
            case EndRun():
                self._end()

    def _end(self) -> None:
        self.ended = True

    def _fill(self, engine: Engine) -> None:
        while engine.waiting and len(engine.running) < engine.lanes:
            sequence = engine.waiting.popleft()
            sequence.oldest = engine.version if sequence.oldest < 0 else min(sequence.oldest, engine.version)
            engine.running.append(sequence)
            self._after(self.costs.length(), "sampled", engine.name, sequence)

    # --- what comes true later ---

    def _join(self, lanes: int) -> None:
        name = f"engine-{next(self._names)}"
        self.engines[name] = Engine(name, lanes, self.version)
        self._tell(WorkerJoined(worker=name, lanes=lanes, version=self.version))

    def _stop(self) -> None:
        self.last = self.committed + 1
        self._tell(StopRequested())

    def _lose(self) -> None:
        if sum(not name.startswith("lent") for name in self.engines) > 1:
            name = self.costs.rng.choice(sorted(each for each in self.engines if not each.startswith("lent")))
            engine = self.engines.pop(name)
            self._tell(WorkerLost(worker=name))
            self._after(self.costs.rng.random(), "join", engine.lanes)
        self._after(self.costs.rng.expovariate(1 / self.costs.loss_every_s), "lose")

    def _leave(self) -> None:
        """Any worker but lent ones, also the last."""
        rng, names = self.costs.rng, sorted(each for each in self.engines if not each.startswith("lent"))
        if names:
            name = rng.choice(names)
            for _ in range(rng.randint(1, 2)):
                self._after(self.costs.grace_s + 2 * rng.random(), "join", self.engines[name].lanes)
            self._tell(WorkerLeaving(worker=name))
        self._after(rng.expovariate(1 / self.costs.leave_every_s), "leave")

    def _retired(self, name: str) -> None:
        engine = self.engines.get(name)
        if engine is None:
            return  # it was lost before
        if self.costs.rng.random() < 0.1:
            del self.engines[name]
            self._tell(WorkerLost(worker=name))
            return
        self._give_back(engine, [*engine.running, *engine.waiting], keeps=self.settings.on_new_weights != "finish")
        del self.engines[name]
        self._tell(WorkerLeft(worker=name))

    def _sampled(self, name: str, sequence: Sequence) -> None:
        engine = self.engines.get(name)
        if engine is None or sequence not in engine.running:
            return  # it was given back
        engine.running.remove(sequence)
        self.num_finished += 1
        self._fill(engine)
        ended = EpisodeEnded(
            group=sequence.group, attempt=sequence.attempt, sample=sequence.sample, worker=name,
            oldest=sequence.oldest, newest=max(sequence.newest, engine.version),
        )  # fmt: skip
        self._tell(ended)

    def _request(self) -> None:
        """The program waits for its next step, and the learner's devices are idle."""
        if self.settings.lends:
            rate = self.num_finished / self.now_s if self.now_s else 0.0
            switch_s = self.costs.switch_s
            self._requested_s = self.now_s
            self._after((0.1 + switch_s) * self.costs.rng.random(), "waits", self.committed)
            self._tell(
                LearnerIdle(
                    episodes_per_s=rate, waited_s=self._waited_s, switch_s=switch_s, recall_s=switch_s / 2,
                    graded_s=self.costs.rng.choice([0.0, 1.0]),
                )
            )  # fmt: skip
        if not self.ended:
            self._tell(StepRequested())

    def _waits(self, committed: int) -> None:
        """From time to time, until the next step begins."""
        if committed == self.committed and len(self.steps) == committed:
            waited_s = self.now_s - self._requested_s
            self._after(0.1 + waited_s * self.costs.rng.random(), "waits", committed)
            self._tell(LearnerWaits(waited_s=waited_s))

    def _lent(self) -> None:
        self.num_lent += 1
        self.lent_for.append(self.committed)
        for number, lanes in enumerate(self.learner_lanes):
            name = f"lent-{number}"
            self.engines[name] = Engine(name, lanes, self.version)
            self._tell(WorkerJoined(worker=name, lanes=lanes, version=self.version, is_lent=True))
        self._tell(DevicesLent(version=self.version))

    def _recalled(self) -> None:
        for number in range(len(self.learner_lanes)):
            name = f"lent-{number}"
            engine = self.engines[name]
            self._give_back(engine, [*engine.running, *engine.waiting])
            del self.engines[name]
            self._tell(WorkerLeft(worker=name))
        self._tell(DevicesReturned())

    def _gives_back(self, name: str, episodes: set[tuple[int, int, int]]) -> None:
        engine = self.engines.get(name)
        if engine is not None:
            all_there = [*engine.running, *engine.waiting]
            self._give_back(engine, [each for each in all_there if (each.group, each.sample, each.attempt) in episodes])

    def _give_back(self, engine: Engine, sequences: list[Sequence], *, keeps: bool = True) -> None:
        """`keeps`: they keep their tokens."""
        returned = []
        for each in sequences:
            if not keeps:
                (engine.running if each in engine.running else engine.waiting).remove(each)
                each.oldest = each.newest = -1
            elif each in engine.running:
                each.newest = max(each.newest, engine.version)
                self._begun[each.group, each.sample] = each.oldest, each.newest
                engine.running.remove(each)
            else:
                engine.waiting.remove(each)
            returned.append(
                ReturnedEpisode(
                    group=each.group, attempt=each.attempt, sample=each.sample, oldest=each.oldest, newest=each.newest
                )
            )
        self.num_moved += len(returned)
        self._fill(engine)
        if returned:
            self._tell(EpisodesReturned(worker=engine.name, episodes=tuple(returned)))

    def _graded(self, group: int) -> None:
        self._tell(GroupGraded(group=group, is_uniform=self.costs.rng.random() < self.costs.uniform_share))

    def _committed_(self, step: int) -> None:
        is_skipped = self.costs.rng.random() < self.costs.skipped_share
        if not is_skipped:
            self.version = step
        self.committed = step
        self._tell(StepCommitted(step=step, version=None if is_skipped else step))
        self._note_committed()
        if self.stop_after is not None and step >= self.stop_after:
            self._tell(StopRequested())
        self._request()

    def _note_committed(self) -> None:
        """A step is committed, and may be saved."""

    def _installed(self, name: str, version: int) -> None:
        engine = self.engines.get(name)
        if engine is None:
            return
        engine.version = version  # tokens may arrive before the acknowledgement does
        self._after(self.costs.acknowledge_s * self.costs.rng.random(), "acknowledged", name, version)

    def _acknowledged(self, name: str, version: int) -> None:
        self._tell(WeightsInstalled(worker=name, version=version))


def world_of(
    settings: ScheduleSettings, costs: Costs, lanes: tuple[int, ...], *,
    scheduler: Callable[[ScheduleSettings], GroupScheduler] = GroupScheduler,
    audited: bool = True, stop_after: int | None = None, learner_lanes: tuple[int, ...] = (),
) -> World:  # fmt: skip
    """A world at the beginning of a run."""
    return World(
        settings, costs, lanes, scheduler(settings), ScheduleAudit(settings) if audited else None,
        stop_after=stop_after, learner_lanes=learner_lanes,
    )  # fmt: skip
