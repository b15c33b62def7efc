# SPDX-License-Identifier: Apache-2.0
"""Decides which prompts are generated where, which groups a step trains on, and who gets new weights when.

The scheduler is told events and returns actions. It awaits nothing, reads no clock and has no random numbers: the same
events give the same actions, on a real cluster and in a simulation. `schedule_audit` checks its decisions.

Staleness is bounded by admission. A group that starts on the newest weights after step k must be trained by step
k + S + 1: that is its deadline. It is admitted only if, for every deadline from its own on, the steps until then have
room for all groups that are due by then. A step takes graded groups with the nearest deadlines, as soon as the steps
after it have room for what it leaves. So no finished group is too old, and none is dropped for being slow. With S = 0 a
step waits for all groups that were admitted for it: that is the synchronous program.

With layout elastic the learner's devices generate while it waits: `lending` says when that is worth it. It is decided
anew with every event that may change it, so devices may be lent and recalled several times before a step. Episodes of a
device that is recalled come back with their tokens, and continue on another one. So do those of a worker that leaves.
Workers may join and leave at any time: those that are there share what may run.

A decision costs a bounded time, whatever the number of devices and episodes. What is more to do follows when the
scheduler is told `Continued`: all actions together, and their order, are those of one decision without a bound.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import assert_never

from podium.controller.lending import Lending, to_give_back, would_get
from podium.controller.scheduled import FreeWorkers, LiveGroups, ScheduledGroup, ScheduledWorker
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

# What one decision may cost, in rough microseconds. A decision that has more to do ends with `Continue`.
_MOST_COST = 200
_PUBLISH, _PLACE, _LOOK, _ADMIT, _GIVE_BACK, _VOID = 4, 4, 3, 20, 10, 4
# Groups or episodes that take a microsecond beside that.
_CLAIMED_PER_US, _EPISODES_PER_US = 20, 4
# Workers that are compared beside other work.
_FEW = 64
# Groups whose missing episodes are counted beside other work.
_FEW_GROUPS = 256


class GroupScheduler:
    """The state of a schedule, and `decide`, which advances it. Groups are numbered from 0 at every start of a run."""

    def __init__(
        self, settings: ScheduleSettings, *, step: int = 0, version: int = 0, most_cost: int = _MOST_COST
    ) -> None:
        self._settings = settings
        self._most_cost, self._left = most_cost, 0  # of a decision, in rough microseconds
        self._live = LiveGroups()
        self._groups = self._live.by_number
        self._workers: dict[str, ScheduledWorker] = {}
        self._started = self._committed = step
        self._updates = {version: 0}  # version -> number of updates before it
        self._version = version  # of the learner
        self._next_group = 0
        self._offered: list[int] = []  # a heap: groups with episodes that wait for another worker
        self._rooms: dict[int, bool] = {}  # deadline -> whether there is room; while groups are admitted
        self._free = FreeWorkers()
        self._to_place: dict[str, None] = {}  # workers whose place among the free ones may have changed
        self._share = 0  # most episodes of a worker, if it has that many lanes
        self._num_own = self._own_lanes = 0  # workers that are neither lent nor leaving, and their lanes
        self._to_publish: deque[str] = deque()  # workers that may be behind, in order
        self._unsure: dict[int, None] = {}  # groups with tokens of versions that their worker had not acknowledged
        self._unacknowledged: int | None = None  # one of them that the next step waits for
        self._gone: dict[str, int] = {}  # workers that were lost or have left -> newest version that they stamped
        self._voided: list[int] = []  # since the last step, ascending
        self._num_replaced = 0  # of them
        self._num_short = 0  # uniform groups that were not replaced: the next step has fewer groups
        self._has_begun = self._is_requested = self._has_ended = False
        self._last = settings.steps  # the run ends with this step
        self._to_void: deque[int] | None = None  # when the run ends
        self._lending = Lending()
        self._spreading: Iterator[tuple[str, tuple[int, ...]]] | None = None  # what lent devices are to get
        self._is_first = False  # whether none of that was asked for yet
        self._lent: dict[str, ScheduledWorker] = {}
        self._moving: set[int] = set()  # episodes that workers were asked to give back, for that
        self._is_even = False  # whether nothing was left to move to lent devices, and they have got nothing since

    def decide(self, event: Event) -> list[Action]:
        """Advances the state by one event and returns what to do now. Where the last action is `Continue`, there may be
        more to do."""
        actions: list[Action] = []
        self._left = self._most_cost
        for number in self._live.forget_claimed():
            self._unsure.pop(number, None)
        match event:
            case WorkerJoined():
                self._join(event)
            case WorkerLost():
                self._lose(event)
            case WorkerLeaving():
                actions += self._retire(event)
            case WorkerLeft():
                self._remove(event.worker)
            case EpisodeEnded():
                actions += self._end_episode(event)
            case EpisodesReturned():
                self._take_back(event)
            case LearnerIdle():
                if self._settings.lends:
                    self._lending.begin(event, self._own_lanes, self._num_missing())
            case LearnerWaits():
                self._lending.note_waited(event.waited_s, self._num_missing())
                self._left -= len(self._groups) // _CLAIMED_PER_US
                self._lending.looks_again = True
            case DevicesLent():
                self._lending.state, self._lending.num_lent = "lent", len(self._lent)
                self._begin_to_spread()
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
                self._last = min(self._last, self._started + self._is_requested)
            case Continued():
                pass
            case other:
                assert_never(other)
        for part in (self._publish, self._start_step, self._admit, self._give_back, self._change_sides):
            if self._left > 0:
                actions += part()
        if self._left <= 0:
            actions.append(Continue())
        return actions

    @property
    def lacks_only_rewards(self) -> bool:
        """Whether the next step could start if all groups whose episodes have ended were graded, and cannot yet."""
        return self._live.num_ended > 0 and self._has_enough(with_ended=True) and not self._has_enough()

    @property
    def lacks_only_devices(self) -> bool:
        """Whether the next step has enough groups and could start if the learner's devices were home."""
        return self._is_requested and self._lending.state != "home" and self._has_enough()

    # --- events ---

    def _join(self, event: WorkerJoined) -> None:
        worker = ScheduledWorker(
            name=event.worker, lanes=event.lanes, version=event.version, sent=event.version, is_lent=event.is_lent
        )
        self._remove(event.worker)
        self._workers[event.worker] = worker
        if worker.is_lent:
            self._lent[event.worker] = worker
        self._to_publish.append(event.worker)
        if self._gone.get(event.worker, -1) > event.version:  # what the one before it sampled is newer
            newer = [
                number for number, group in self._groups.items() if group.newest.get(worker.name, -1) > event.version
            ]
            self._unsure.update(dict.fromkeys(newer))
        self._deal_shares(worker)

    def _lose(self, event: WorkerLost) -> None:
        """Its running episodes wait for another worker. Those that have ended stay."""
        worker = self._remove(event.worker)
        for episode in sorted(worker.running) if worker is not None else ():
            self._moving.discard(episode)
            number, sample = divmod(episode, self._settings.samples)
            attempts = self._groups[number].attempts
            attempts[sample] = attempts.get(sample, 0) + 1
            self._offer(number, sample)

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
            episode = each.group * self._settings.samples + each.sample
            if episode in worker.running:
                worker.running.discard(episode)
                self._moving.discard(episode)
                self._note_newest(self._groups[each.group], worker, each.newest)
                self._offer(each.group, each.sample)
        self._to_place[worker.name] = None

    def _end_episode(self, event: EpisodeEnded) -> Iterator[Action]:
        worker, group = self._workers.get(event.worker), self._groups.get(event.group)
        if worker is None or group is None or event.attempt != group.attempts.get(event.sample, 0):
            return  # the worker was lost meanwhile, and the episode runs elsewhere
        if event.sample not in group.missing:
            return  # it has ended
        episode = event.group * self._settings.samples + event.sample
        worker.running.discard(episode)
        self._moving.discard(episode)
        self._live.end(group, event.sample)
        self._note_newest(group, worker, event.newest)
        self._to_place[worker.name] = None
        if not worker.running:
            self._to_publish.append(worker.name)  # for `finish`
        if not group.missing:
            yield GradeGroup(group=group.number)

    def _end_grading(self, event: GroupGraded) -> Iterator[Action]:
        group = self._groups.get(event.group)
        if group is None:
            return  # the run ends
        if event.is_uniform and self._settings.replaces_uniform:
            is_replaced = self._num_replaced < self._settings.max_replaced
            self._num_replaced += is_replaced
            self._num_short += not is_replaced
            self._live.drop(group)
            self._unsure.pop(group.number, None)
            insort(self._voided, group.number)
            self._lending.looks_again = True  # another one takes its place
            yield Void(group=event.group, reason="uniform")
            return
        self._live.grade(group)

    def _commit(self, event: StepCommitted) -> None:
        self._committed = event.step
        if event.version is not None:
            self._updates[event.version] = self._updates[self._version] + 1
            self._version = event.version
        self._to_publish.extend(self._workers)
        self._to_place = dict.fromkeys(self._workers)

    def _install(self, event: WeightsInstalled) -> None:
        worker = self._workers.get(event.worker)
        if worker is not None:
            worker.version, worker.sent = event.version, max(worker.sent, event.version)
            self._to_publish.append(worker.name)  # there may be a newer one by now
            self._to_place[worker.name] = None

    # --- decisions ---

    @property
    def _is_over(self) -> bool:
        return self._committed >= self._last

    def _publish(self) -> Iterator[Action]:
        """Sends the newest version to workers that have acknowledged the one before. With `finish`, a worker gets it
        when its running sequences have ended."""
        while self._to_publish and self._left > 0:
            worker = self._workers.get(self._to_publish.popleft())
            self._left -= _LOOK
            if worker is None or worker.sent != worker.version or worker.version == self._version:
                continue
            if self._is_over or worker.is_leaving:
                continue
            if self._settings.on_new_weights == "finish" and worker.running:
                continue
            worker.sent = self._version
            self._left -= _PUBLISH
            yield Publish(version=self._version, worker=worker.name)

    def _start_step(self) -> Iterator[Action]:
        """Starts the program's next step when enough groups are graded, and among them those that later steps could not
        train in time."""
        if self._to_void is not None:
            yield from self._end(self._to_void)
        if not self._is_requested or self._started > self._committed or self._has_ended:
            return
        if self._is_over:
            self._has_ended, self._to_void = True, deque(self._live.numbers())
            yield from self._end(self._to_void)
            return
        if not self._has_enough():
            return
        step, taken = self._started + 1, self._live.nearest(self._settings.groups_per_step)
        if not self._are_acknowledged(taken):
            return  # the worker's acknowledgement is on its way
        if self._lending.state != "home":
            if self._lending.state == "lent":
                yield self._recall()
            return  # the step needs the devices
        numbers = self._live.claim(taken)
        voided, self._voided = tuple(self._voided), []
        self._started, self._is_requested = step, False
        self._num_replaced = self._num_short = 0
        self._lending.end()
        self._left -= (len(numbers) + len(voided)) // _CLAIMED_PER_US
        yield StartStep(step=step, groups=numbers, voided=voided)

    def _end(self, to_void: deque[int]) -> Iterator[Action]:
        """Groups that no step will train on are void, and then the run ends."""
        while to_void and self._left > 0:
            self._left -= _VOID
            number = to_void.popleft()
            del self._groups[number]
            yield Void(group=number, reason="stopped")
        if not to_void:
            self._to_void = None
            yield EndRun()

    def _admit(self) -> Iterator[Action]:
        """Gives groups to the workers with the lowest load, while they have lanes and the deadlines have room. Nothing
        is given out before the first step is requested: the workers that are there at the start all get a part."""
        if self._started >= self._last or not self._has_begun:
            return  # no step is left that could train on a group
        self._rooms.clear()
        while self._left > 0 and self._has_group():
            if self._to_place:
                self._place_workers()
                continue
            if not self._free:
                return
            worker = self._free.pop(self._workers)
            self._left -= _LOOK
            if worker.is_leaving or (worker.is_lent and self._lending.state == "returning"):
                continue
            group = self._group_for(worker)
            if group is None:
                continue  # its weights are too old: it comes back when it has newer ones
            first = group.number * self._settings.samples
            worker.running.update(first + sample for sample in group.waiting)
            self._is_even = self._is_even and not worker.is_lent
            self._free.place(worker)
            self._left -= _ADMIT + len(group.waiting) // _EPISODES_PER_US
            for attempt in sorted({group.attempts.get(sample, 0) for sample in group.waiting}):
                samples = tuple(sample for sample in sorted(group.waiting) if group.attempts.get(sample, 0) == attempt)
                yield Admit(group=group.number, attempt=attempt, samples=samples, worker=worker.name)
            group.waiting.clear()

    def _change_sides(self) -> Iterator[Action]:
        """Lends the learner's devices when that is worth it, and recalls them early when it no longer is. What can be
        admitted has been by then."""
        lending = self._lending
        if not lending.is_idle or self._is_over:
            return
        if lending.state == "home" and (lending.looks_again or lending.lacked_work):
            yield from self._lend()
        elif lending.state == "lent" and self._is_requested:
            yield from self._recall_early()

    def _lend(self) -> Iterator[Action]:
        """Lends the devices if there is something for them to do and the next step waits for long enough. Where the
        first lacks, the next event may bring it; else it takes one that makes the wait longer."""
        lending = self._lending
        lending.lacked_work = not self._has_work_to_lend()
        if lending.lacked_work:
            return
        lending.looks_again = True
        if self._has_time_to_count():
            lending.looks_again = False
            if lending.is_worth_it(self._num_missing(), self._own_lanes):
                lending.state = "leaving"
                yield Lend()

    def _recall_early(self) -> Iterator[Action]:
        """Recalls devices that have nothing to do, unless it pays to move more to them, and those for which the step
        would wait longer than for the rewards that it lacks."""
        lending, settings = self._lending, self._settings
        if lending.grades_within_recall and self.lacks_only_rewards and not settings.replaces_uniform:
            yield self._recall()
            return
        if self._spreading is not None or self._moving or any(worker.running for worker in self._lent.values()):
            return
        if not self._lent and (self._live.num_unfinished or self._has_group()):
            return  # episode runners ask them
        if self._lent and not self._is_even:
            if not self._has_time_to_count():
                return
            if lending.stays_worth_it(self._num_missing(), self._own_lanes):
                self._begin_to_spread()
                self._left = 0
                return
        yield self._recall()

    def _recall(self) -> Recall:
        lending, self._spreading = self._lending, None
        lending.state, lending.looks_again, lending.lacked_work = "returning", False, False
        return Recall()

    def _has_work_to_lend(self) -> bool:
        """Whether lent devices would get groups that no other worker takes, or a part of what the others run."""
        self._rooms.clear()
        return self._has_group() or would_get(self._live.num_unfinished, self._num_own, self._lending.num_lent)

    def _has_time_to_count(self) -> bool:
        """Whether this decision may count missing episodes. Where groups are many, that is all that a decision does."""
        if len(self._groups) > _FEW_GROUPS and self._left < self._most_cost:
            self._left = 0
        return self._left > 0

    def _begin_to_spread(self) -> None:
        self._spreading, self._is_first, self._is_even = self._spread(), True, True

    def _give_back(self) -> Iterator[Action]:
        """Gives devices that were lent an even part of what is running, if no new groups could be admitted to them.
        Where workers are many, to compare them is all that a decision does."""
        is_first, self._is_first = self._is_first, False
        if is_first and self._left < self._most_cost and len(self._workers) > _FEW:
            self._is_first, self._left = True, 0
        while self._spreading is not None and self._left > 0:
            found = next(self._spreading, None)
            if is_first and len(self._workers) > _FEW:
                self._left = 0
            if found is None:
                self._spreading = None
                return
            name, episodes = found
            self._is_even = False
            self._left -= _GIVE_BACK + len(episodes) // _EPISODES_PER_US
            if name in self._workers and not self._workers[name].is_leaving:
                self._moving.update(episodes)
                each = [divmod(episode, self._settings.samples) for episode in episodes]
                attempts = ((number, sample, self._groups[number].attempts.get(sample, 0)) for number, sample in each)
                yield GiveBack(worker=name, episodes=tuple(attempts))

    def _spread(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Looks at the workers when the first one is asked for: what could be admitted has been by then."""
        running = {worker.name: worker.running for worker in self._workers.values() if not worker.is_leaving}
        lent = [worker.name for worker in self._workers.values() if worker.is_lent and not worker.is_leaving]
        yield from to_give_back(running, lent)

    # --- parts of decisions ---

    def _offer(self, number: int, sample: int) -> None:
        """An episode waits for a worker again."""
        group = self._groups[number]
        if not group.waiting:
            heapq.heappush(self._offered, number)
        group.waiting.add(sample)

    def _num_missing(self) -> int:
        """Episodes that the next step waits for: of groups that it still needs, those with the nearest deadlines."""
        settings = self._settings
        num_wanted = settings.groups_per_step - self._num_short - self._live.num_graded
        num_episodes, num_unknown = self._live.missing(num_wanted, self._started + 1)
        return num_episodes + num_unknown * settings.samples

    def _note_newest(self, group: ScheduledGroup, worker: ScheduledWorker, newest: int) -> None:
        """Newer tokens than the worker was sent weights for are of another one, which had the episode before."""
        newest = min(newest, worker.sent)
        group.newest[worker.name] = max(newest, group.newest.get(worker.name, newest))
        worker.newest = max(worker.newest, newest)
        if newest > worker.version:
            self._unsure[group.number] = None

    def _remove(self, name: str) -> ScheduledWorker | None:
        worker = self._workers.pop(name, None)
        self._lent.pop(name, None)
        if worker is not None:
            self._free.remove(worker)
            self._gone[name] = max(worker.newest, self._gone.get(name, -1))
        self._deal_shares()
        return worker

    def _deal_shares(self, joined: ScheduledWorker | None = None) -> None:
        """Workers get new weights one after the other. The first one must not take all groups that have room then."""
        settings = self._settings
        own_lanes = [worker.lanes for worker in self._workers.values() if not (worker.is_leaving or worker.is_lent)]
        if sum(own_lanes) != self._own_lanes:
            self._lending.looks_again = True
        self._num_own, self._own_lanes = len(own_lanes), sum(own_lanes)
        most_groups = settings.groups_per_step * (settings.staleness + 1)
        share = -(-most_groups // max(1, len(own_lanes) + len(self._lent))) * settings.samples
        if share != self._share:
            self._share = share
            self._to_place = dict.fromkeys(self._workers)
        elif joined is not None:
            self._to_place[joined.name] = None

    def _place_workers(self) -> None:
        """Finds the workers that may get a group."""
        while self._to_place and self._left > 0:
            name, _ = self._to_place.popitem()
            worker = self._workers.get(name)
            if worker is not None:
                worker.share = min(worker.lanes, self._share)
                self._free.place(worker)
            self._left -= _PLACE

    def _deadline(self, version: int) -> int:
        """The last step that may train on tokens of this version, if every step from now on updates the weights."""
        behind = self._updates[self._version] - self._updates[version]
        return self._committed + self._settings.staleness - behind + 1

    def _has_room(self, deadline: int) -> bool:
        """Whether the steps have room for one more group with this deadline."""
        if deadline not in self._rooms:
            settings = self._settings
            num_steps = {until: min(until, self._last) - self._started for until in (deadline, *self._live.due)}
            rooms = {until: settings.groups_per_step * num - self._num_short for until, num in num_steps.items()}
            self._rooms[deadline] = deadline > self._started and self._live.leave_room(deadline, rooms)
        return self._rooms[deadline]

    def _has_enough(self, *, with_ended: bool = False) -> bool:
        """Whether the next step has enough graded groups, and may leave the others. `with_ended`: if groups whose
        episodes have ended were graded."""
        num = self._live.num_graded + (self._live.num_ended if with_ended else 0)
        if num < self._settings.groups_per_step - self._num_short:
            return False
        by_deadline = self._live.num_ended_by if with_ended else self._live.num_graded_by
        return self._leaves_room(self._started + 1, by_deadline)

    def _leaves_room(self, step: int, num_graded_by: Callable[[int], int]) -> bool:
        """Whether the steps after this one have room for all groups that it leaves, if it takes the graded groups with
        the nearest deadlines. `num_graded_by`: how many are graded, by deadline."""
        num_due = num_graded = 0
        for deadline in sorted(self._live.due):
            num_due += self._live.due[deadline]
            num_graded += num_graded_by(deadline)
            if num_due - num_graded > self._settings.groups_per_step * (deadline - step):
                return False
        return True

    def _has_group(self) -> bool:
        """Whether a worker with the newest weights would get a group."""
        return bool(self._offered) or self._has_room(self._deadline(self._version))

    def _group_for(self, worker: ScheduledWorker) -> ScheduledGroup | None:
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
        group = ScheduledGroup(number=number, deadline=deadline, missing=set(samples), waiting=set(samples))
        self._live.add(group)
        self._next_group += 1
        self._rooms.clear()
        return group

    def _are_acknowledged(self, taken: Mapping[int, int]) -> bool:
        """Whether the versions of all groups that the next step takes are acknowledged."""
        waited_for = () if self._unacknowledged is None else (self._unacknowledged,)
        for number in (*waited_for, *self._unsure):
            group = self._groups.get(number)
            if group is None or self._is_acknowledged(group):
                self._unsure.pop(number, None)
            elif self._live.is_among(taken, group):
                self._unacknowledged = number
                return False
        self._unacknowledged = None
        return True

    def _is_acknowledged(self, group: ScheduledGroup) -> bool:
        """Whether every worker that is still there has acknowledged the versions that it stamped on this group."""
        workers = self._workers
        return all(name not in workers or newest <= workers[name].version for name, newest in group.newest.items())
