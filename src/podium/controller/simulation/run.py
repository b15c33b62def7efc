# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule on a virtual clock: the real scheduler decides, its audit checks, and the cost model says how long
everything takes. Deterministic from the seed. Torch-free.

A group has the same lengths, gradings and uniformity for a seed, whatever the layout and the bound, so that two
simulations differ in their schedules only. With `ScheduleSettings.lends` the learner's devices generate while it
waits: changing sides costs `switch_s` each way, and a sequence that moves a prefill of its tokens."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from podium.controller.lending import LOOK_AGAIN
from podium.controller.schedule_audit import ScheduleAudit
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
    Void,
    WeightsInstalled,
    WorkerJoined,
    WorkerLeft,
)
from podium.controller.simulation.costs import CostModel, DeviceLayout, GroupCosts
from podium.controller.simulation.generator import EndedSequence, Episode, Generator, Pause, Sequence
from podium.controller.simulation.report import Meter, SimulationReport
from podium.errors import ClusterError


def simulate(
    schedule: ScheduleSettings, costs: CostModel, layout: DeviceLayout, *,
    seed: int = 0, warm_up: int = 0, cool_down: int = 0, audited: bool = True,
) -> SimulationReport:  # fmt: skip
    """Simulates a run and reports its steps. The first `warm_up` steps are not measured. The last `cool_down` ones are
    not simulated: the scheduler admits less when it sees the end, and measured steps should not know of it."""
    return _Simulation(schedule, costs, layout, seed, warm_up, schedule.steps - cool_down, audited).run()


@dataclass(slots=True, kw_only=True)
class _Group:
    """Of a group that is not trained yet."""

    costs: GroupCosts
    admitted_s: float
    graded_s: float = 0.0  # when its last reward is known, as far as its episodes have ended
    version_sum: float = 0.0  # over its tokens, of the versions that sampled them
    oldest: int | None = None
    begun: dict[int, EndedSequence] = field(default_factory=dict)  # by sample: tokens of other devices
    # Where graders are counted: episodes that have ended and are not graded, and whether none is to come.
    num_ungraded: int = 0
    is_whole: bool = False


class _Simulation:
    def __init__(
        self, schedule: ScheduleSettings, costs: CostModel, layout: DeviceLayout, seed: int, warm_up: int, last: int,
        audited: bool,
    ) -> None:  # fmt: skip
        self._schedule, self._costs, self._layout = schedule, costs, layout
        self._seed, self._warm_up, self._last = seed, warm_up, last
        self._scheduler = GroupScheduler(schedule)
        self._audit = ScheduleAudit(schedule) if audited else None
        self._meter = Meter(layout=layout)
        self._later: list[tuple[float, int, Callable[[], None]]] = []  # a heap by time
        self._ticks = itertools.count()  # equal times: in the order in which they were planned
        self._now_s = 0.0
        self._generators: dict[str, Generator] = {}
        self._groups: dict[int, _Group] = {}
        self._free_graders = costs.graders or 0
        self._ungraded: list[tuple[int, int, _Group, float]] = []  # a heap: the oldest group is graded first
        self._version = 0  # of the learner: the number of updates
        self._switched_s = 0.0  # colocated: when the devices generate again
        self._trained: list[tuple[int, ...]] = []
        self._committed_s: list[float] = []
        self._trained_tokens = self._age_sum = 0.0
        self._in_flight: list[float] = []  # seconds of trained groups
        self._queued: list[float] = []
        self._oldest_age = self._num_admitted = self._num_events = self._num_ended = self._num_moved = 0
        self._requested = 0.0, 0  # when a step was requested last, and how many episodes had ended
        self._waited_s = 0.0  # for the last step
        self._num_waits = self._num_lendings = 0
        self._lacks_since_s: float | None = None  # since when the next step lacks rewards alone
        self._lacked_s = self._graded_s = 0.0  # for how long it did before, and the last one did
        self._has_ended = False

    def run(self) -> SimulationReport:
        for number in range(self._layout.num_generators):
            self._join(f"generator-{number}")
        self._request_step()
        while not self._has_ended:
            if not self._later:
                raise ClusterError(
                    f"the simulation stands still after {len(self._trained)} steps: nothing is left that could happen. "
                    "This is a deadlock of the scheduler."
                )
            self._now_s, _, happen = heapq.heappop(self._later)
            self._meter.advance(self._now_s)
            happen()
        return self._report()

    def _report(self) -> SimulationReport:
        meter, num_groups = self._meter, max(1, len(self._queued))
        seconds = meter.now_s - meter.began_s
        return SimulationReport(
            layout=self._layout,
            steps=self._last - self._warm_up,
            seconds=seconds,
            trained_tokens=self._trained_tokens,
            generator_idle_s=dict(meter.generator_idle_s),
            learner_idle_s=dict(meter.learner_idle_s),
            lanes_in_use=meter.lane_s / (seconds * self._layout.num_generators),
            staleness_mean=self._age_sum / max(1.0, self._trained_tokens),
            staleness_max=self._oldest_age,
            in_flight_s=sum(self._in_flight) / num_groups,
            queue_s=sum(self._queued) / num_groups,
            trained_groups=tuple(self._trained),
            committed_s=tuple(self._committed_s),
            num_admitted=self._num_admitted,
            num_moved=self._num_moved,
            num_lendings=self._num_lendings,
            num_events=self._num_events,
            counts={} if self._audit is None else dict(self._audit.counts),
        )

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time_s, next(self._ticks), happen))

    # --- the scheduler ---

    def _tell(self, event: Event) -> None:
        actions = self._decide(event)
        while actions and isinstance(actions[-1], Continue):
            actions = self._decide(Continued())

    def _decide(self, event: Event) -> list[Action]:
        self._num_events += 1
        actions = self._scheduler.decide(event)
        if self._schedule.lends:
            self._note_lacking()
        if self._audit is not None:
            self._audit.observe(event, actions)
            self._audit.take_finished()
        for action in actions:
            self._carry_out(action)
        return actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case Admit():
                self._admit(action)
            case GradeGroup():
                self._meter.num_grading += 1
                self._finish_grading(action.group)
            case StartStep():
                self._start_step(action)
            case Publish():
                self._publish(self._generators[action.worker], action.version)
            case Void():
                del self._groups[action.group]
            case EndRun():
                self._has_ended = True
            case Lend():
                self._num_lendings += 1
                self._at(self._now_s + self._costs.switch_s, self._lend)
            case Recall():
                self._recall()
            case GiveBack():
                self._give_back(self._generators[action.worker], set(action.episodes))
            case Retire():
                generator = self._generators.pop(action.worker)
                self._give_back(generator, None)
                self._meter.count(generator, -1)
                self._tell(WorkerLeft(worker=generator.name))
            case Continue():
                pass
            case other:
                assert_never(other)

    # --- generators ---

    def _join(self, name: str, *, is_lent: bool = False) -> None:
        cost, lanes = self._costs.generation, self._layout.lanes
        generator = Generator(name=name, lanes=lanes, cost=cost, version=self._version, is_lent=is_lent)
        self._generators[name] = generator
        self._meter.count(generator, 1)
        lanes = generator.lanes + self._layout.ahead
        self._tell(WorkerJoined(worker=name, lanes=lanes, version=generator.version, is_lent=is_lent))

    @contextmanager
    def _changing(self, generator: Generator) -> Iterator[None]:
        """Around every change of a generator: what it did until now counts, and its next end is planned anew."""
        generator.advance(self._now_s)
        self._meter.count(generator, -1)
        yield
        self._meter.count(generator, 1)
        generator.plan += 1
        ends_s = generator.next_end_s()
        if ends_s is not None:
            self._at(ends_s, partial(self._end_sequence, generator, generator.plan))

    def _admit(self, action: Admit) -> None:
        group = self._groups.get(action.group)
        if group is None:
            group = self._groups[action.group] = self._new_group(action.group)
            self._num_admitted += 1
        begun = {sample: group.begun[sample].sequence.tokens for sample in action.samples if sample in group.begun}
        sequences = [
            Sequence(
                group=action.group, attempt=action.attempt, sample=sample,
                tokens=group.costs.tokens[sample] - begun.get(sample, 0.0),
            )
            for sample in action.samples
        ]  # fmt: skip
        generator = self._generators[action.worker]
        with self._changing(generator):
            generator.add(sequences)
        if sum(begun.values()) and generator.pause is None:
            prefill_s = sum(begun.values()) / self._costs.generation.prefill_tokens_s
            self._pause(generator, "recompute", self._now_s + prefill_s)

    def _new_group(self, number: int) -> _Group:
        return _Group(costs=self._costs.group(number, self._schedule.samples, self._seed), admitted_s=self._now_s)

    def _end_sequence(self, generator: Generator, plan: int) -> None:
        if plan != generator.plan:
            return  # something has changed since, and there is another plan
        with self._changing(generator):
            ended = generator.end_next()
        sequence, self._num_ended = ended.sequence, self._num_ended + 1
        group = self._groups[sequence.group]
        ended = ended.after(group.begun.pop(sequence.sample, None))
        group.version_sum += ended.version_sum
        group.oldest = ended.oldest if group.oldest is None else min(group.oldest, ended.oldest)
        self._grade(sequence.group, group, group.costs.grading_s[sequence.sample])
        event = EpisodeEnded(
            group=sequence.group, attempt=sequence.attempt, sample=sequence.sample, worker=generator.name,
            oldest=ended.oldest, newest=ended.newest,
        )  # fmt: skip
        self._tell(event)

    # --- the learner's devices ---

    def _request_step(self) -> None:
        """The program waits for its next step."""
        self._num_waits += 1
        if self._schedule.lends:
            since_s, num_ended = self._now_s - self._requested[0], self._num_ended - self._requested[1]
            self._requested = self._now_s, self._num_ended
            rate = num_ended / since_s if since_s else 0.0
            switch_s = self._costs.switch_s
            self._tell(
                LearnerIdle(
                    episodes_per_s=rate, waited_s=self._waited_s, switch_s=2 * switch_s, recall_s=switch_s,
                    graded_s=self._graded_s,
                )
            )  # fmt: skip
            if switch_s:
                self._at(self._now_s + 2 * switch_s, partial(self._tell_waits, self._num_waits))
        self._tell(StepRequested())

    def _tell_waits(self, wait: int) -> None:
        """The learner still waits. Told rarer and rarer, and no more when nothing else is left that could happen."""
        if wait != self._num_waits or self._meter.learner != "waiting":
            return
        waited_s = self._now_s - self._requested[0]
        if self._later:
            self._at(self._requested[0] + LOOK_AGAIN * waited_s, partial(self._tell_waits, wait))
        self._tell(LearnerWaits(waited_s=waited_s))

    def _note_lacking(self) -> None:
        lacks = self._scheduler.lacks_only_rewards and self._meter.learner == "waiting"
        if lacks and self._lacks_since_s is None:
            self._lacks_since_s = self._now_s
        elif not lacks and self._lacks_since_s is not None:
            self._lacked_s += self._now_s - self._lacks_since_s
            self._lacks_since_s = None

    def _lend(self) -> None:
        for number in range(self._layout.num_learners):
            self._join(f"lent-{number}", is_lent=True)
        self._tell(DevicesLent(version=self._version))

    def _recall(self) -> None:
        """Sequences go on elsewhere at once; the devices learn when they have changed sides."""
        for generator in [each for each in self._generators.values() if each.is_lent]:
            self._give_back(generator, None)
            self._meter.count(generator, -1)
            del self._generators[generator.name]
            self._tell(WorkerLeft(worker=generator.name))
        self._at(self._now_s + self._costs.switch_s, partial(self._tell, DevicesReturned()))

    def _give_back(self, generator: Generator, episodes: set[Episode] | None) -> None:
        with self._changing(generator):
            taken = generator.take_out(episodes)
        returned = []
        for each in taken:
            group, sequence = self._groups[each.sequence.group], each.sequence
            begun = each.after(group.begun.get(sequence.sample))
            if begun.oldest >= 0:
                group.begun[sequence.sample] = begun
            returned.append(
                ReturnedEpisode(
                    group=sequence.group, attempt=sequence.attempt, sample=sequence.sample, oldest=begun.oldest,
                    newest=begun.newest,
                )
            )  # fmt: skip
        self._num_moved += len(returned)
        if returned:
            self._tell(EpisodesReturned(worker=generator.name, episodes=tuple(returned)))

    def _pause(self, generator: Generator, cause: Pause, until_s: float | None = None) -> None:
        """Pauses a generator until then; None: until another pause begins."""
        with self._changing(generator):
            generator.pause = cause
            generator.num_pauses += 1
        if until_s is not None:
            self._at(until_s, partial(self._resume, generator, generator.num_pauses))

    def _resume(self, generator: Generator, pause: int) -> None:
        if pause == generator.num_pauses:
            with self._changing(generator):
                generator.pause = None

    def _publish(self, generator: Generator, version: int) -> None:
        """Colocated, generators use the learner's weights: they have them as soon as they generate again."""
        if self._layout.is_colocated:
            self._at(max(self._now_s, self._switched_s), partial(self._install, generator, version))
            return
        installed_s = self._now_s + self._costs.publish_s
        self._pause(generator, "publish", installed_s)
        self._at(installed_s, partial(self._install, generator, version))

    def _install(self, generator: Generator, version: int) -> None:
        with self._changing(generator):
            generator.version = version
        recompute_s = generator.recompute_s if self._schedule.on_new_weights == "recompute" else 0.0
        if recompute_s and generator.pause != "learning":
            self._pause(generator, "recompute", self._now_s + recompute_s)
        self._tell(WeightsInstalled(worker=generator.name, version=version))

    # --- graders and the learner ---

    def _grade(self, number: int, group: _Group, seconds: float) -> None:
        """Grades an episode that has ended: at once, or on the next free grader if they are counted."""
        if self._costs.graders is None:
            group.graded_s = max(group.graded_s, self._now_s + seconds)
            return
        group.num_ungraded += 1
        heapq.heappush(self._ungraded, (number, next(self._ticks), group, seconds))
        self._send_to_graders()

    def _send_to_graders(self) -> None:
        while self._free_graders and self._ungraded:
            number, _, group, seconds = heapq.heappop(self._ungraded)
            self._free_graders -= 1
            self._at(self._now_s + seconds, partial(self._end_grading, number, group))

    def _end_grading(self, number: int, group: _Group) -> None:
        self._free_graders += 1
        group.num_ungraded -= 1
        if group.is_whole and not group.num_ungraded and self._groups.get(number) is group:
            self._graded(number)
        self._send_to_graders()

    def _finish_grading(self, number: int) -> None:
        """All episodes of a group have ended: it is graded when the last of their rewards is known."""
        group = self._groups[number]
        group.is_whole = True
        if not group.num_ungraded:
            self._at(max(self._now_s, group.graded_s), partial(self._graded, number))

    def _graded(self, number: int) -> None:
        self._meter.num_grading -= 1
        self._tell(GroupGraded(group=number, is_uniform=self._groups[number].costs.is_uniform))

    def _start_step(self, action: StartStep) -> None:
        self._trained.append(action.groups)
        self._waited_s = self._now_s - self._requested[0]
        self._graded_s, self._lacked_s, self._lacks_since_s = self._lacked_s, 0.0, None
        groups = [self._groups.pop(number) for number in action.groups]
        tokens = sum(sum(group.costs.tokens) for group in groups)
        if self._warm_up < action.step <= self._last:
            self._trained_tokens += tokens
            self._age_sum += self._version * tokens - sum(group.version_sum for group in groups)
            ages = [self._version - group.oldest for group in groups if group.oldest is not None]
            self._oldest_age = max([self._oldest_age, *ages])
            self._in_flight += [group.graded_s - group.admitted_s for group in groups]
            self._queued += [self._now_s - group.graded_s for group in groups]
        updates_s = self._now_s
        if self._layout.is_colocated:
            updates_s += self._costs.switch_s
            for generator in self._generators.values():
                self._pause(generator, "learning")
        self._meter.learner = "switching"
        self._at(updates_s, partial(self._update, action.step, tokens))

    def _update(self, step: int, tokens: float) -> None:
        self._meter.learner = "updating"
        update_s = self._costs.update.update_s(tokens, self._layout.num_learners)
        self._at(self._now_s + update_s, partial(self._commit, step, tokens > 0))

    def _commit(self, step: int, has_updated: bool) -> None:
        """A step whose groups were all uniform has nothing to learn from and leaves the weights as they were."""
        self._meter.learner = "waiting"
        self._committed_s.append(self._now_s)
        self._version += has_updated
        if step == self._warm_up:
            self._meter.restart()
        if self._layout.is_colocated:
            self._switched_s = self._now_s + self._costs.switch_s
            for generator in self._generators.values():
                self._pause(generator, "switching", self._switched_s)
        self._tell(StepCommitted(step=step, version=self._version if has_updated else None))
        self._request_step()
        if step == self._last:
            self._has_ended = True
