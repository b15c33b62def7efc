# SPDX-License-Identifier: Apache-2.0
"""Checks every decision of the scheduler against the invariants, from the events and actions alone.

It keeps its own record of each group and uses nothing of the scheduler's state, so that a mistake there cannot hide
itself. A broken invariant ends the run: which tokens were trained on could no longer be trusted. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Never, assert_never

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
    GroupState,
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
    VoidReason,
    WeightsInstalled,
    WorkerJoined,
    WorkerLeaving,
    WorkerLeft,
    WorkerLost,
)
from podium.errors import InvariantError

Invariant = Literal[
    "conservation", "versions", "bounded staleness", "no silent bias", "acknowledged weights", "explicit cache",
    "synchronous at staleness 0",
]  # fmt: skip

# Where a group may come from. A group that a step claims was graded, and is trained once.
_BEFORE: Mapping[GroupState, frozenset[GroupState]] = {
    "running": frozenset({"offered", "running"}),
    "complete": frozenset({"running"}),
    "graded": frozenset({"complete"}),
    "claimed": frozenset({"graded"}),
    "trained": frozenset({"claimed"}),
    "void": frozenset({"offered", "running", "complete", "graded"}),
}
_LIVE: tuple[GroupState, ...] = ("offered", "running", "complete", "graded", "claimed")


@dataclass(frozen=True, slots=True)
class GroupHistory:
    """What became of a group, for the ledger."""

    number: int
    attempts: int
    admitted_version: int  # of the worker that it was first given to; -1: none
    oldest: int  # versions of its tokens; -1: it has none
    newest: int
    trained_step: int | None
    trained_version: int | None  # of the weights that the update started from
    void: VoidReason | None
    events: Sequence[Event | Action] = field(default=(), compare=False, repr=False)  # that it was part of


@dataclass(frozen=True, slots=True)
class OpenHistory:
    """The way so far of a group that is neither trained nor void."""

    number: int
    state: GroupState
    attempts: int
    admitted_version: int  # as of GroupHistory
    oldest: int
    newest: int


@dataclass(slots=True, kw_only=True)
class _Record:
    number: int
    state: GroupState = "offered"
    attempts: int = 0
    admitted_version: int = -1
    attempt_of: dict[int, int] = field(default_factory=dict)  # by sample: its last attempt
    waiting: dict[int, tuple[str, int]] = field(default_factory=dict)  # sample -> worker, and its version then
    begun: dict[int, tuple[int, int]] = field(default_factory=dict)  # sample -> versions of tokens that came back
    ended: set[int] = field(default_factory=set)
    oldest: int = -1
    newest_token: int = -1
    newest: dict[str, int] = field(default_factory=dict)  # by worker
    is_uniform: bool = False
    step: int | None = None
    version: int | None = None
    events: list[Event | Action] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Worker:
    version: int
    sent: int
    is_lent: bool = False
    is_leaving: bool = False


class ScheduleAudit:
    """Observes each event with the actions it led to. Costs some microseconds per event."""

    def __init__(self, settings: ScheduleSettings, *, step: int = 0, version: int = 0) -> None:
        self._settings = settings
        self._groups: dict[int, _Record] = {}  # live ones
        self._counts: Counter[GroupState] = Counter()  # over the whole run
        self._num_offered = 0
        self._workers: dict[str, _Worker] = {}
        self._num_waiting: Counter[str] = Counter()  # by worker: samples that it has
        self._updates = {version: 0}  # version -> number of updates before it
        self._version = version
        self._step, self._committed = step, step
        self._is_stopping = self._is_idle = False  # idle: the learner's devices, until the next step
        self._devices: Literal["home", "leaving", "lent", "returning"] = "home"
        self._lent_version = version
        self._finished: list[GroupHistory] = []

    @property
    def counts(self) -> Mapping[GroupState, int]:
        """Number of groups in each state, over the whole run."""
        return {state: count for state, count in self._counts.items() if count}

    def take_finished(self) -> Sequence[GroupHistory]:
        """The histories of groups that were trained or became void since the last call."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def finished(self) -> Sequence[GroupHistory]:
        """What the next `take_finished` returns."""
        return self._finished

    def open_groups(self) -> Sequence[OpenHistory]:
        """The histories so far of groups that are neither trained nor void. Tokens of episodes that run are not known,
        but for those that came back from another worker."""
        found = []
        for group in self._groups.values():
            begun = [*group.begun.values(), *([(group.oldest, group.newest_token)] if group.oldest >= 0 else ())]
            found.append(
                OpenHistory(
                    number=group.number,
                    state=group.state,
                    attempts=group.attempts,
                    admitted_version=group.admitted_version,
                    oldest=min((oldest for oldest, _ in begun), default=-1),
                    newest=max((newest for _, newest in begun), default=-1),
                )
            )
        return found

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        """Raises an InvariantError if the event, or an action that was decided for it, breaks an invariant."""
        self._observe_event(event)
        for action in actions:
            self._observe_action(action, event)

    # --- events ---

    def _observe_event(self, event: Event) -> None:
        match event:
            case WorkerJoined():
                if event.version not in self._updates:
                    self._broken("acknowledged weights", f"it has version {event.version}, which was never made", event)
                self._workers[event.worker] = _Worker(
                    version=event.version, sent=event.version, is_lent=event.is_lent
                )  # fmt: skip
            case WorkerLost():
                self._workers.pop(event.worker, None)
                for group in self._groups.values():
                    lost = [sample for sample, (worker, _) in group.waiting.items() if worker == event.worker]
                    for sample in lost:
                        del group.waiting[sample]
                        self._num_waiting[event.worker] -= 1
                    if lost:
                        group.events.append(event)
            case WorkerLeaving():
                if event.worker in self._workers:
                    self._workers[event.worker].is_leaving = True
            case WorkerLeft():
                self._leave(event)
            case EpisodeEnded():
                self._end_episode(event)
            case EpisodesReturned():
                self._take_back(event)
            case DevicesLent():
                if event.version != self._version:
                    self._broken("acknowledged weights", f"the learner has version {self._version}", event)
                self._devices, self._lent_version = "lent", event.version
            case DevicesReturned():
                self._devices = "home"
            case LearnerIdle():
                self._is_idle = True
            case GroupGraded():
                group = self._live(event.group, event)
                group.is_uniform = event.is_uniform
                self._move(group, "graded", event)
            case StepCommitted():
                self._commit(event)
            case WeightsInstalled():
                worker = self._workers.get(event.worker)
                if worker is not None:
                    # Weights that are stored late may be of a newer version than the one that was to be sent.
                    if not worker.sent <= event.version <= self._version:
                        self._broken("acknowledged weights", f"it was sent version {worker.sent}", event)
                    worker.version = worker.sent = event.version
            case StopRequested():
                self._is_stopping = True
            case StepRequested() | LearnerWaits() | Continued():
                pass
            case other:
                assert_never(other)

    def _end_episode(self, event: EpisodeEnded) -> None:
        group, worker = self._groups.get(event.group), self._workers.get(event.worker)
        if worker is None or group is None or event.attempt != group.attempt_of.get(event.sample, event.attempt):
            return  # of a worker that was lost
        group.events.append(event)
        self._check_versions(group, event, event.worker, event)
        group.ended.add(event.sample)
        if event.oldest >= 0:
            if self._settings.on_new_weights == "finish" and event.oldest != event.newest:
                self._broken("explicit cache", "on_new_weights is finish, and the episode spans versions", event, group)
            group.oldest = event.oldest if group.oldest < 0 else min(group.oldest, event.oldest)
            group.newest_token = max(group.newest_token, event.newest)
            self._note_newest(group, event.worker, event.newest)
        if len(group.ended) == self._settings.samples:
            self._move(group, "complete", event)

    def _take_back(self, event: EpisodesReturned) -> None:
        for each in event.episodes if event.worker in self._workers else ():
            group = self._groups.get(each.group)
            if group is None or each.attempt != group.attempt_of.get(each.sample, each.attempt):
                continue  # of a worker that was lost
            group.events.append(event)
            self._check_versions(group, each, event.worker, event)
            if each.oldest >= 0:
                group.begun[each.sample] = each.oldest, each.newest
                self._note_newest(group, event.worker, each.newest)

    def _check_versions(
        self, group: _Record, episode: EpisodeEnded | ReturnedEpisode, worker: str, event: Event
    ) -> None:
        """Checks the versions of an episode that leaves a worker: those of tokens that it came with, and those that the
        worker had. With episode runners, engines on lent devices answer too."""
        if episode.sample not in group.waiting or group.waiting[episode.sample][0] != worker:
            self._broken("conservation", f"sample {episode.sample} was not running there", event, group)
        _, admitted = group.waiting.pop(episode.sample)
        self._num_waiting[worker] -= 1
        if episode.oldest < 0:
            return
        begun_oldest, begun_newest = group.begun.get(episode.sample, (admitted, admitted))
        most = max(self._workers[worker].sent, begun_newest, self._lent_version)
        if not min(admitted, begun_oldest) <= episode.oldest <= episode.newest <= most:
            self._broken(
                "versions",
                f"tokens are stamped {episode.oldest} to {episode.newest}; the worker had {admitted} when it began, it "
                f"began with tokens of {begun_oldest} to {begun_newest}, and nothing newer than {most} was there",
                event, group,
            )  # fmt: skip
        if episode.newest not in self._updates or episode.oldest not in self._updates:
            self._broken("versions", "a stamped version was never made", event, group)

    def _note_newest(self, group: _Record, name: str, newest: int) -> None:
        """A worker stamps nothing newer than it was sent; newer tokens are of another one, which had them before."""
        newest = min(newest, self._workers[name].sent)
        group.newest[name] = max(newest, group.newest.get(name, -1))

    def _leave(self, event: WorkerLeft) -> None:
        if self._num_waiting.pop(event.worker, 0):
            lost = [
                group
                for group in self._groups.values()
                if any(worker == event.worker for worker, _ in group.waiting.values())
            ]
            self._broken("conservation", "its worker leaves with episodes of it", event, lost[0])
        self._workers.pop(event.worker, None)

    def _commit(self, event: StepCommitted) -> None:
        if event.step != self._step or event.step != self._committed + 1:
            self._broken("conservation", f"step {self._step} was started and {self._committed} committed", event)
        self._committed = event.step
        for group in [each for each in self._groups.values() if each.state == "claimed"]:
            self._move(group, "trained", event)
            self._finish(group)
        if event.version is not None:
            if event.version <= self._version:
                self._broken("versions", f"the version before was {self._version}", event)
            self._updates[event.version] = self._updates[self._version] + 1
            self._version = event.version
        self._check_conservation(event)

    # --- actions ---

    def _observe_action(self, action: Action, event: Event) -> None:
        match action:
            case Admit():
                self._admit(action, event)
            case GradeGroup():
                group = self._live(action.group, event)
                if group.state != "complete":
                    self._broken("conservation", f"it is {group.state} and is to be graded", event, group)
            case StartStep():
                self._start_step(action, event)
            case Publish():
                self._publish(action, event)
            case Lend() | Recall():
                self._check_lending(action, event)
            case Retire():
                if action.worker not in self._workers or not self._workers[action.worker].is_leaving:
                    self._broken("conservation", f"{action.worker} is to be retired, and does not leave", event)
            case GiveBack():
                for number, sample, _ in action.episodes:
                    group = self._live(number, event)
                    if group.waiting.get(sample, ("", 0))[0] != action.worker:
                        self._broken("conservation", f"sample {sample} does not run on {action.worker}", event, group)
            case Void():
                group = self._live(action.group, event)
                is_right = (
                    group.state == "graded" and group.is_uniform and self._settings.replaces_uniform
                    if action.reason == "uniform"
                    else self._is_stopping or self._committed >= self._settings.steps
                )  # fmt: skip
                if not is_right:
                    self._broken("no silent bias", f"it is void as {action.reason}, and it is not", event, group)
                self._move(group, "void", action)
                self._finish(group, void=action.reason)
            case EndRun():
                if self._groups:
                    group = next(iter(self._groups.values()))
                    self._broken("conservation", "the run ends and this group has no end", event, group)
                self._check_conservation(event)
            case Continue():
                pass
            case other:
                assert_never(other)

    def _check_lending(self, action: Lend | Recall, event: Event) -> None:
        if isinstance(action, Lend) and not self._is_idle:
            self._broken("acknowledged weights", f"the learner still uses its devices after step {self._step}", event)
        if self._devices != ("home" if isinstance(action, Lend) else "lent") or not self._settings.lends:
            self._broken("acknowledged weights", f"{action}: the devices are {self._devices}", event)
        self._devices = "leaving" if isinstance(action, Lend) else "returning"

    def _admit(self, action: Admit, event: Event) -> None:
        worker = self._workers.get(action.worker)
        if action.group not in self._groups:
            if action.attempt != 0:
                self._broken("conservation", f"{action} is of a group that nobody offered", event)
            self._groups[action.group] = _Record(number=action.group)
            self._counts["offered"] += 1
            self._num_offered += 1
        group = self._groups[action.group]
        group.events.append(action)
        if worker is None:
            self._broken("acknowledged weights", f"it is given to {action.worker}, which is not there", event, group)
        if worker.is_leaving:
            self._broken("conservation", f"it is given to {action.worker}, which leaves", event, group)
        if worker.is_lent and self._devices == "returning":
            self._broken("conservation", f"it is given to {action.worker}, which is recalled", event, group)
        if set(action.samples) & ({*group.ended, *group.waiting}) or not action.samples:
            self._broken("conservation", f"samples {action.samples} run or have ended already", event, group)
        if self._settings.staleness == 0 and (self._step > self._committed or worker.version != self._version):
            self._broken(
                "synchronous at staleness 0",
                f"it begins on version {worker.version} while step {self._step} is not committed or the learner has "
                f"version {self._version}",
                event, group,
            )  # fmt: skip
        group.attempts = max(group.attempts, action.attempt + 1)
        group.attempt_of.update(dict.fromkeys(action.samples, action.attempt))
        if group.admitted_version < 0:
            group.admitted_version = worker.version
        group.waiting.update(dict.fromkeys(action.samples, (action.worker, worker.version)))
        self._num_waiting[action.worker] += len(action.samples)
        self._move(group, "running", event)

    def _start_step(self, action: StartStep, event: Event) -> None:
        if action.step != self._committed + 1 or action.step != self._step + 1:
            self._broken("conservation", f"step {action.step} is started after step {self._step}", event)
        if self._devices != "home":
            self._broken("acknowledged weights", "an update would change the weights of lent devices", event)
        self._step, self._is_idle = action.step, False
        if len(action.groups) > self._settings.groups_per_step or len(set(action.groups)) != len(action.groups):
            self._broken("conservation", f"step {action.step} has {len(action.groups)} groups", event)
        for number in action.groups:
            group = self._live(number, event)
            self._move(group, "claimed", action)
            group.step, group.version = action.step, self._version
            age = self._updates[self._version] - self._updates[group.oldest] if group.oldest >= 0 else 0
            if age > self._settings.staleness:
                self._broken(
                    "bounded staleness",
                    f"its oldest token has version {group.oldest}, {age} updates before version {self._version} that "
                    f"step {action.step} starts from; rollout.staleness is {self._settings.staleness}",
                    event, group,
                )  # fmt: skip
            for worker, newest in group.newest.items():
                if worker in self._workers and self._workers[worker].version < newest:
                    self._broken(
                        "acknowledged weights",
                        f"{worker} stamped version {newest} and has not acknowledged it",
                        event, group,
                    )  # fmt: skip
        self._check_conservation(event)

    def _publish(self, action: Publish, event: Event) -> None:
        worker = self._workers.get(action.worker)
        if worker is None or action.version != self._version or worker.sent != worker.version:
            self._broken("acknowledged weights", f"{action}: that worker cannot take this version now", event)
        worker.sent = action.version

    # --- the record ---

    def _live(self, number: int, event: Event) -> _Record:
        if number not in self._groups:
            self._broken("conservation", f"group {number} is not live: it was never offered, is trained or void", event)
        return self._groups[number]

    def _move(self, group: _Record, state: GroupState, why: Event | Action) -> None:
        if group.state not in _BEFORE[state]:
            self._broken("conservation", f"it is {group.state} and becomes {state}", why, group)
        self._counts[group.state] -= 1
        self._counts[state] += 1
        group.state = state

    def _finish(self, group: _Record, *, void: VoidReason | None = None) -> None:
        del self._groups[group.number]
        self._finished.append(
            GroupHistory(
                number=group.number,
                attempts=group.attempts,
                admitted_version=group.admitted_version,
                oldest=group.oldest,
                newest=group.newest_token,
                trained_step=group.step,
                trained_version=group.version,
                void=void,
                events=group.events,
            )
        )

    def _check_conservation(self, event: Event) -> None:
        """offered = running + complete + graded + claimed + trained + void, by two counts that are kept apart."""
        live = sum(self._counts[state] for state in _LIVE)
        total = live + self._counts["trained"] + self._counts["void"]
        if total != self._num_offered or live != len(self._groups):
            counts = ", ".join(f"{count} {state}" for state, count in self.counts.items())
            self._broken("conservation", f"{self._num_offered} groups were offered and there are {counts}", event)

    def _broken(self, invariant: Invariant, what: str, event: Event | Action, group: _Record | None = None) -> Never:
        about = "" if group is None else f"group {group.number}: "
        history = "" if group is None else "\nIts history:" + "".join(f"\n  {each}" for each in group.events[-32:])
        raise InvariantError(
            f"{about}{what} (invariant: {invariant}).\nThe event: {event}{history}\nThis is a defect of Podium: please "
            "report it with the run folder. What was committed before is as it should be."
        )
