# SPDX-License-Identifier: Apache-2.0
"""Decides which prompts are generated where, which groups a step trains on, and who gets new weights when.

The scheduler is told events and returns actions. It awaits nothing, reads no clock and has no random numbers: the same
events give the same actions, on a real cluster and in a simulation. `schedule_audit` checks its decisions.

Staleness is bounded by admission. A group that starts on the newest weights after step k must be trained by step
k + S + 1: that is its deadline. It is admitted only if, for every deadline from its own on, the steps until then have
room for all groups that are due by then. A step takes graded groups with the nearest deadlines, as soon as the steps
after it have room for what it leaves. So no finished group is too old, and none is dropped for being slow. With S = 0 a
step waits for all groups that were admitted for it: that is the synchronous program.

With layout elastic the learner's devices generate while it waits: `lending` says when that is worth it. Episodes of a
device that is recalled come back with their tokens, and continue on another one. So do those of a worker that leaves.
Workers may join and leave at any time: those that are there share what may run.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from podium.controller.lending import Lending, to_give_back
from podium.controller.scheduling import (
    Action,
    Admit,
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
    Lend,
    Publish,
    Recall,
    Retire,
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


@dataclass(slots=True, kw_only=True)
class _Group:
    """All episodes of one prompt, until a step is committed that trains on them."""

    number: int
    deadline: int  # the last step that may train on it
    missing: set[int]  # samples that have not ended
    waiting: set[int]  # of them, those that no worker runs
    attempts: Counter[int] = field(default_factory=Counter)  # by sample: how often a worker was lost with it
    newest: dict[str, int] = field(default_factory=dict)  # worker -> newest version among the tokens it sampled


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A generator, or an episode runner."""

    name: str
    lanes: int
    version: int  # acknowledged
    sent: int  # the last version that it was told to install
    is_lent: bool
    is_leaving: bool = False  # it is given nothing more
    running: set[tuple[int, int]] = field(default_factory=set)  # (group, sample)
    share: int = 0  # most episodes that it is given: its lanes, or its part of all that may run

    @property
    def load(self) -> float:
        """Its episodes as part of its share. Below 1 it gets a further group; what exceeds its lanes waits there."""
        return len(self.running) / self.share


class GroupScheduler:
    """The state of a schedule, and `decide`, which advances it. Groups are numbered from 0 at every start of a run."""

    def __init__(self, settings: ScheduleSettings, *, step: int = 0, version: int = 0) -> None:
        self._settings = settings
        self._groups: dict[int, _Group] = {}  # those that no step has claimed, without void ones
        self._workers: dict[str, _Worker] = {}
        self._started = self._committed = step
        self._updates = {version: 0}  # version -> number of updates before it
        self._version = version  # of the learner
        self._next_group = 0
        self._offered: list[int] = []  # a heap: groups with episodes that wait for another worker
        self._due: Counter[int] = Counter()  # deadline -> groups
        self._rooms: dict[int, bool] = {}  # deadline -> whether there is room; while groups are admitted
        self._graded: defaultdict[int, list[int]] = defaultdict(list)  # deadline -> heap of graded groups
        self._num_graded = 0
        self._free: list[tuple[float, str]] = []  # a heap of (load, worker); entries may be outdated
        self._share = 0  # most episodes of a worker, if it has that many lanes
        self._to_publish: dict[str, None] = {}  # workers that may be behind, in order
        self._voided: list[int] = []  # since the last step
        self._num_replaced = 0  # of them
        self._num_short = 0  # uniform groups that were not replaced: the next step has fewer groups
        self._has_begun = self._is_requested = self._is_stopping = self._has_ended = False
        self._lending = Lending()

    def decide(self, event: Event) -> list[Action]:
        """Advances the state by one event and returns what to do now."""
        actions: list[Action] = []
        match event:
            case WorkerJoined():
                self._join(event)
            case WorkerLost():
                self._lose(event)
            case WorkerLeaving():
                actions += self._retire(event)
            case WorkerLeft():
                self._workers.pop(event.worker, None)
                self._deal_shares()
            case EpisodeEnded():
                actions += self._end_episode(event)
            case EpisodesReturned():
                self._take_back(event)
            case LearnerIdle():
                actions += self._lend(event)
            case DevicesLent():
                self._lending.state = "lent"
            case DevicesReturned():
                self._lending.state = "home"
            case GroupGraded():
                actions += self._end_grading(event)
            case StepRequested():
                self._has_begun = self._is_requested = True
            case StepCommitted():
                self._commit(event)
            case WeightsInstalled():
                self._install(event)
            case StopRequested():
                self._is_stopping = True
            case other:
                assert_never(other)
        actions += self._publish()
        actions += self._start_step()
        actions += self._admit()
        if isinstance(event, DevicesLent):
            actions += self._spread()
        return actions

    # --- events ---

    def _join(self, event: WorkerJoined) -> None:
        worker = _Worker(
            name=event.worker, lanes=event.lanes, version=event.version, sent=event.version, is_lent=event.is_lent
        )
        self._workers[event.worker] = worker
        self._to_publish[event.worker] = None
        self._deal_shares(worker)

    def _lose(self, event: WorkerLost) -> None:
        """Its running episodes wait for another worker. Those that have ended stay."""
        worker = self._workers.pop(event.worker, None)
        for number, sample in sorted(worker.running) if worker is not None else ():
            self._groups[number].attempts[sample] += 1
            self._offer(number, sample)
        self._deal_shares()

    def _retire(self, event: WorkerLeaving) -> Iterator[Action]:
        """It gets nothing more, and what it runs moves."""
        worker = self._workers.get(event.worker)
        if worker is not None and not worker.is_leaving:
            worker.is_leaving = True
            self._deal_shares()
            yield Retire(worker=worker.name)

    def _take_back(self, event: EpisodesReturned) -> None:
        """They wait for another worker, with the tokens that they have."""
        worker = self._workers.get(event.worker)
        if worker is None:
            return  # it was lost meanwhile, and its episodes are offered already
        for each in event.episodes:
            if (each.group, each.sample) in worker.running:
                worker.running.discard((each.group, each.sample))
                self._note_newest(self._groups[each.group], worker, each.newest)
                self._offer(each.group, each.sample)
        self._may_take(worker)

    def _end_episode(self, event: EpisodeEnded) -> Iterator[Action]:
        worker, group = self._workers.get(event.worker), self._groups.get(event.group)
        if worker is None or group is None or event.attempt != group.attempts[event.sample]:
            return  # the worker was lost meanwhile, and the episode runs elsewhere
        worker.running.discard((event.group, event.sample))
        group.missing.discard(event.sample)
        self._note_newest(group, worker, event.newest)
        self._may_take(worker)
        if not worker.running:
            self._to_publish[worker.name] = None  # for `finish`
        if not group.missing:
            yield GradeGroup(group=group.number)

    def _end_grading(self, event: GroupGraded) -> Iterator[Action]:
        group = self._groups[event.group]
        if event.is_uniform and self._settings.replaces_uniform:
            is_replaced = self._num_replaced < self._settings.max_replaced
            self._num_replaced += is_replaced
            self._num_short += not is_replaced
            self._release([group.number])
            self._voided.append(group.number)
            yield Void(group=event.group, reason="uniform")
            return
        heapq.heappush(self._graded[group.deadline], group.number)
        self._num_graded += 1

    def _commit(self, event: StepCommitted) -> None:
        self._committed = event.step
        if event.version is not None:
            self._updates[event.version] = self._updates[self._version] + 1
            self._version = event.version
        for worker in self._workers.values():
            self._to_publish[worker.name] = None
            self._may_take(worker)

    def _install(self, event: WeightsInstalled) -> None:
        worker = self._workers.get(event.worker)
        if worker is not None:
            worker.version, worker.sent = event.version, max(worker.sent, event.version)
            self._to_publish[worker.name] = None  # there may be a newer one by now
            self._may_take(worker)

    # --- decisions ---

    @property
    def _is_over(self) -> bool:
        return self._committed >= self._settings.steps or (self._is_stopping and self._started == self._committed)

    def _publish(self) -> Iterator[Action]:
        """Sends the newest version to workers that have acknowledged the one before. With `finish`, a worker gets it
        when its running sequences have ended."""
        waiting, self._to_publish = self._to_publish, {}
        for worker in (self._workers[name] for name in waiting if name in self._workers):
            if worker.sent != worker.version or worker.version == self._version or self._is_over or worker.is_leaving:
                continue
            if self._settings.on_new_weights == "finish" and worker.running:
                continue
            worker.sent = self._version
            yield Publish(version=self._version, worker=worker.name)

    def _start_step(self) -> Iterator[Action]:
        """Starts the program's next step when enough groups are graded, and among them those that later steps could not
        train in time."""
        if not self._is_requested or self._started > self._committed or self._has_ended:
            return
        if self._is_over:
            self._has_ended = True
            yield from (Void(group=number, reason="stopped") for number in sorted(self._groups))
            self._groups.clear()
            yield EndRun()
            return
        step, num_most = self._started + 1, self._settings.groups_per_step
        if self._num_graded < num_most - self._num_short or not self._leaves_room(step):
            return
        numbers = self._nearest(num_most)
        if not all(self._is_acknowledged(self._groups[number]) for number in numbers):
            return  # the worker's acknowledgement is on its way
        if self._lending.state != "home":
            if self._lending.state == "lent":
                self._lending.state = "returning"
                yield Recall()
            return  # the step needs the devices
        self._release(numbers)
        self._num_graded -= len(numbers)
        voided, self._voided = tuple(sorted(self._voided)), []
        self._started, self._is_requested = step, False
        self._num_replaced = self._num_short = 0
        yield StartStep(step=step, groups=tuple(sorted(numbers)), voided=voided)

    def _admit(self) -> Iterator[Action]:
        """Gives groups to the workers with the lowest load, while they have lanes and the deadlines have room. Nothing
        is given out before the first step is requested: the workers that are there at the start all get a part."""
        if self._is_over or self._is_stopping or not self._has_begun:
            return
        self._rooms.clear()
        while self._free and self._has_group():
            load, name = heapq.heappop(self._free)
            worker = self._workers.get(name)
            if worker is None or load != worker.load or load >= 1 or worker.is_leaving:
                continue  # an outdated entry
            if worker.is_lent and self._lending.state == "returning":
                continue
            group = self._group_for(worker)
            if group is None:
                continue  # its weights are too old: it comes back when it has newer ones
            worker.running.update((group.number, sample) for sample in group.waiting)
            self._may_take(worker)
            for attempt in sorted({group.attempts[sample] for sample in group.waiting}):
                samples = tuple(sample for sample in sorted(group.waiting) if group.attempts[sample] == attempt)
                yield Admit(group=group.number, attempt=attempt, samples=samples, worker=name)
            group.waiting.clear()

    def _lend(self, event: LearnerIdle) -> Iterator[Action]:
        """Lends the learner's devices if the next step waits for long enough."""
        if not self._settings.lends or self._lending.state != "home" or self._is_over or self._is_stopping:
            return
        if self._lending.is_worth_it(self._num_missing(), event):
            self._lending.state = "leaving"
            yield Lend()

    def _spread(self) -> Iterator[Action]:
        """Gives devices that were lent an even part of what is running, if no new groups could be admitted to them."""
        running = {worker.name: tuple(worker.running) for worker in self._workers.values() if not worker.is_leaving}
        lent = [worker.name for worker in self._workers.values() if worker.is_lent]
        for name, episodes in to_give_back(running, lent):
            attempts = [(number, sample, self._groups[number].attempts[sample]) for number, sample in episodes]
            yield GiveBack(worker=name, episodes=tuple(attempts))

    # --- parts of decisions ---

    def _offer(self, number: int, sample: int) -> None:
        """An episode waits for a worker again."""
        group = self._groups[number]
        if not group.waiting:
            heapq.heappush(self._offered, number)
        group.waiting.add(sample)

    def _num_missing(self) -> int:
        """Episodes that the next step waits for: of groups that it still needs, those with the nearest deadlines."""
        settings, step = self._settings, self._started + 1
        graded = {number for numbers in self._graded.values() for number in numbers}
        missing = [group for number, group in self._groups.items() if number not in graded]
        missing.sort(key=lambda group: (group.deadline, group.number))
        num_due = sum(1 for group in missing if group.deadline <= step)
        num_needed = max(settings.groups_per_step - self._num_short - len(graded), num_due)
        num_unknown = max(0, num_needed - len(missing))  # not admitted yet
        return sum(len(group.missing) for group in missing[:num_needed]) + num_unknown * settings.samples

    def _note_newest(self, group: _Group, worker: _Worker, newest: int) -> None:
        """Newer tokens than the worker was sent weights for are of another one, which had the episode before."""
        newest = min(newest, worker.sent)
        group.newest[worker.name] = max(newest, group.newest.get(worker.name, newest))

    def _deal_shares(self, joined: _Worker | None = None) -> None:
        """Workers get new weights one after the other. The first one must not take all groups that have room then."""
        settings, num_workers = self._settings, sum(not worker.is_leaving for worker in self._workers.values())
        most_groups = settings.groups_per_step * (settings.staleness + 1)
        share = -(-most_groups // max(1, num_workers)) * settings.samples
        if share != self._share:
            self._share = share
            for worker in self._workers.values():
                worker.share = min(worker.lanes, share)
            self._collect_free()
        elif joined is not None:
            joined.share = min(joined.lanes, share)
            self._may_take(joined)

    def _may_take(self, worker: _Worker) -> None:
        """Puts a worker among those that may get a group."""
        if worker.load < 1 and not worker.is_leaving:
            heapq.heappush(self._free, (worker.load, worker.name))
        if len(self._free) > 4 * len(self._workers) + 64:  # most are outdated
            self._collect_free()

    def _collect_free(self) -> None:
        """Finds all workers that may get a group."""
        self._free = [
            (len(each.running) / each.share, each.name)  # its load, without a call for each of a thousand
            for each in self._workers.values()
            if len(each.running) < each.share and not each.is_leaving
        ]
        heapq.heapify(self._free)

    def _deadline(self, version: int) -> int:
        """The last step that may train on tokens of this version, if every step from now on updates the weights."""
        behind = self._updates[self._version] - self._updates[version]
        return self._committed + self._settings.staleness - behind + 1

    def _has_room(self, deadline: int) -> bool:
        """Whether the steps have room for one more group with this deadline."""
        if deadline not in self._rooms:
            self._rooms[deadline] = self._find_room(deadline)
        return self._rooms[deadline]

    def _find_room(self, deadline: int) -> bool:
        if deadline <= self._started:
            return False
        later = sorted({deadline, *(each for each, count in self._due.items() if count and each > deadline)})
        for until in later:
            num_due = sum(count for each, count in self._due.items() if each <= until)
            num_steps = min(until, self._settings.steps) - self._started
            if num_due >= self._settings.groups_per_step * num_steps - self._num_short:
                return False
        return True

    def _leaves_room(self, step: int) -> bool:
        """Whether the steps after this one have room for all groups that it leaves, if it takes the graded groups with
        the nearest deadlines."""
        num_due = num_graded = 0
        for deadline in sorted(self._due):
            num_due += self._due[deadline]
            num_graded += len(self._graded.get(deadline, ()))
            if num_due - num_graded > self._settings.groups_per_step * (deadline - step):
                return False
        return True

    def _has_group(self) -> bool:
        """Whether a worker with the newest weights would get a group."""
        return bool(self._offered) or self._has_room(self._deadline(self._version))

    def _group_for(self, worker: _Worker) -> _Group | None:
        """The next group that this worker may start with its weights; None if there is none."""
        deadline = self._deadline(worker.version)
        if self._settings.on_new_weights == "finish" and worker.version != self._version:
            return None  # it finishes what it has, for the new weights
        if self._offered:
            group = self._groups[self._offered[0]]
            if group.deadline > deadline:
                return None
            heapq.heappop(self._offered)
            return group
        if not self._has_room(deadline):
            return None
        number, samples = self._next_group, range(self._settings.samples)
        group = _Group(number=number, deadline=deadline, missing=set(samples), waiting=set(samples))
        self._groups[number] = group
        self._next_group += 1
        self._due[deadline] += 1
        self._rooms.clear()
        return group

    def _nearest(self, count: int) -> list[int]:
        """The graded groups with the nearest deadlines; the first of the data where deadlines are equal."""
        numbers: list[int] = []
        for deadline in sorted(self._graded):
            numbers += heapq.nsmallest(count - len(numbers), self._graded[deadline])
        return numbers

    def _is_acknowledged(self, group: _Group) -> bool:
        """Whether every worker that is still there has acknowledged the versions that it stamped on this group."""
        workers = self._workers
        return all(name not in workers or newest <= workers[name].version for name, newest in group.newest.items())

    def _release(self, numbers: Sequence[int]) -> None:
        """Forgets groups that a step claims, or that are void."""
        gone = set(numbers)
        by_deadline = Counter(self._groups.pop(number).deadline for number in numbers)
        for deadline, count in by_deadline.items():
            self._due[deadline] -= count
            if deadline in self._graded:
                self._graded[deadline] = [number for number in self._graded[deadline] if number not in gone]
                heapq.heapify(self._graded[deadline])
            if not self._due[deadline]:
                del self._due[deadline]
                self._graded.pop(deadline, None)
