# SPDX-License-Identifier: Apache-2.0
"""Microseconds of a decision of the scheduler, and of its audit, with many devices and episodes in flight.

    .venv/bin/python benchmarks/scheduler.py                      1,024 devices, 100,000 episodes in flight

Lengths are log-normal, workers end their episodes in that order, groups are graded at once, and an update takes as long
as a median episode. Only `decide` and `observe` are timed, in processor time. Where a decision says that there is more
to do, what follows counts as another one. Python's garbage collector, which stops a process wherever it is, is timed
apart. With --lend a third of the devices is the learner's and lent in
every step, recalled early when it has nothing to do, and told how long it waits."""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import random
import statistics
import time
from typing import Any

from podium.controller.schedule_audit import ScheduleAudit
from podium.controller.scheduler import GroupScheduler
from podium.controller.scheduling import (
    Admit,
    Continue,
    Continued,
    DevicesLent,
    DevicesReturned,
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
    ReturnedEpisode,
    ScheduleSettings,
    StartStep,
    StepCommitted,
    StepRequested,
    WeightsInstalled,
    WorkerJoined,
    WorkerLeft,
)

LIMIT_S = 1e-3  # that no decision should take


class Timed:
    """Tells events to a scheduler under audit and keeps what each took."""

    def __init__(self, settings: ScheduleSettings) -> None:
        self.scheduler, self.audit = GroupScheduler(settings), ScheduleAudit(settings)
        self.decide_s: dict[str, list[float]] = {}
        self.above: list[tuple[float, str, int]] = []  # decisions above the limit: seconds, event, actions
        self.most_actions = 0
        self.audit_s: list[float] = []
        self.collect_s: list[float] = []  # of garbage, within decisions
        self._collecting_since = self._collected_s = 0.0
        self.num_running = self.most_running = 0
        gc.callbacks.append(self._note_collection)

    def close(self) -> None:
        gc.callbacks.remove(self._note_collection)

    def tell(self, event: Event) -> list[object]:
        """All that follows from an event."""
        actions = self._decide(event)
        last = actions
        while last and isinstance(last[-1], Continue):
            last = self._decide(Continued(), after=type(event).__name__)
            actions += last
        return actions

    def _decide(self, event: Event, after: str = "") -> list[object]:
        self._collected_s = 0.0
        began = time.thread_time()
        actions = self.scheduler.decide(event)
        decided = time.thread_time()
        if self._collected_s:
            self.collect_s.append(self._collected_s)
        took, name = decided - began - self._collected_s, type(event).__name__
        self.decide_s.setdefault(f"{name} of {after}" if after else name, []).append(took)
        if took > LIMIT_S:
            self.above.append((took, f"{name} of {after}" if after else name, len(actions)))
        self.most_actions = max(self.most_actions, len(actions))
        began = time.thread_time()
        self.audit.observe(event, actions)
        self.audit_s.append(time.thread_time() - began)
        self.num_running -= isinstance(event, EpisodeEnded)
        self.num_running -= len(event.episodes) if isinstance(event, EpisodesReturned) else 0
        self.num_running += sum(len(action.samples) for action in actions if isinstance(action, Admit))
        self.most_running = max(self.most_running, self.num_running)
        self.audit.take_finished()
        return list(actions)

    def _note_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._collecting_since = time.thread_time()
        else:
            self._collected_s += time.thread_time() - self._collecting_since


class Cluster:
    """Carries actions out on a virtual clock."""

    def __init__(self, settings: ScheduleSettings, devices: int, lanes: int, num_lent: int) -> None:
        self.timed, self.rng = Timed(settings), random.Random(0)
        self.later: list[tuple[float, int, list[Event]]] = []
        self.ticks, self.now_s, self.requested_s = itertools.count(), 0.0, 0.0
        self.lanes, self.learner = lanes, [f"lent-{number}" for number in range(num_lent)]
        self.versions = {f"device-{number}": 0 for number in range(devices - num_lent)}
        self.version = 0
        self.running: dict[str, dict[tuple[int, int], int]] = {}  # worker -> (group, sample) -> its attempt
        self.oldest: dict[tuple[int, int], int] = {}

    def run(self) -> Timed:
        for name in self.versions:
            self.tell(WorkerJoined(worker=name, lanes=self.lanes, version=0))
        self.request()
        while self.later:
            self.now_s, _, events = heapq.heappop(self.later)
            for event in events:
                self.happen(event)
        self.timed.close()
        return self.timed

    def request(self) -> None:
        if self.learner:
            self.tell(LearnerIdle(episodes_per_s=0.0, waited_s=0.0, switch_s=0.1, recall_s=0.05, graded_s=0.0))
            self.requested_s = self.now_s
            self.after(0.1, LearnerWaits(waited_s=0.1))
        self.tell(StepRequested())

    def after(self, seconds: float, *events: Event) -> None:
        heapq.heappush(self.later, (self.now_s + seconds, next(self.ticks), list(events)))

    def happen(self, event: Event) -> None:
        match event:
            case EpisodeEnded():
                if self.running[event.worker].pop((event.group, event.sample), None) is None:
                    return  # it was given back
            case LearnerWaits():
                waited_s = self.now_s - self.requested_s
                if not self.later or abs(waited_s - event.waited_s) > 1e-9:
                    return  # of a wait that is over
                self.after(0.5 * waited_s, LearnerWaits(waited_s=1.5 * waited_s))
            case WeightsInstalled():
                self.versions[event.worker] = event.version
            case StepCommitted():
                self.version = event.version or 0
            case DevicesLent():
                for name in self.learner:
                    self.versions[name] = self.version
                    self.tell(WorkerJoined(worker=name, lanes=self.lanes, version=self.version, is_lent=True))
                event = DevicesLent(version=self.version)
            case DevicesReturned():
                for name in self.learner:
                    self.give_back(name, list(self.running.get(name, {})))
                    self.tell(WorkerLeft(worker=name))
            case _:
                pass
        self.tell(event)
        if isinstance(event, StepCommitted):
            self.request()

    def give_back(self, worker: str, episodes: list[tuple[int, int]]) -> None:
        returned = []
        for group, sample in episodes:
            attempt = self.running[worker].pop((group, sample), None)
            if attempt is not None:
                version = self.versions[worker]
                self.oldest[group, sample] = min(version, self.oldest.get((group, sample), version))
                returned.append(
                    ReturnedEpisode(group=group, attempt=attempt, sample=sample, oldest=version, newest=version)
                )
        if returned:
            self.tell(EpisodesReturned(worker=worker, episodes=tuple(returned)))

    def tell(self, event: Event) -> None:
        for action in self.timed.tell(event):
            self.carry_out(action)

    def carry_out(self, action: object) -> None:
        match action:
            case Admit():
                version = self.versions[action.worker]
                for sample in action.samples:
                    self.running.setdefault(action.worker, {})[action.group, sample] = action.attempt
                    ended = EpisodeEnded(
                        group=action.group, attempt=action.attempt, sample=sample, worker=action.worker,
                        oldest=self.oldest.get((action.group, sample), version), newest=version,
                    )  # fmt: skip
                    self.after(self.rng.lognormvariate(0.0, 1.0), ended)
            case GradeGroup():
                self.after(0.0, GroupGraded(group=action.group, is_uniform=False))
            case StartStep():
                self.after(1.0, StepCommitted(step=action.step, version=action.step))
            case Publish():
                self.after(0.1, WeightsInstalled(worker=action.worker, version=action.version))
            case Lend():
                self.after(0.05, DevicesLent(version=0))
            case Recall():
                self.after(0.05, DevicesReturned())
            case GiveBack():
                self.give_back(action.worker, [(group, sample) for group, sample, _ in action.episodes])
            case _:
                pass


def run(devices: int, episodes: int, samples: int, staleness: int, steps: int, *, lends: bool) -> Timed:
    """Runs a schedule to its last step."""
    groups = episodes // samples // (staleness + 1)
    settings = ScheduleSettings(
        steps=steps, groups_per_step=groups, samples=samples, staleness=staleness, on_new_weights="keep", lends=lends
    )
    return Cluster(settings, devices, -(-episodes // devices), devices // 3 if lends else 0).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--episodes", type=int, default=100_000, help="in flight")
    parser.add_argument("--samples", type=int, default=16, help="of a group")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lend", action="store_true", help="a third of the devices is the learner's, and lent")
    asked = parser.parse_args()
    for staleness in asked.staleness:
        timed = run(asked.devices, asked.episodes, asked.samples, staleness, asked.steps, lends=asked.lend)
        everything = [second for seconds in timed.decide_s.values() for second in seconds]
        print(
            f"{asked.devices} devices, up to {timed.most_running:,} episodes in flight, staleness {staleness}: "
            f"{len(everything):,} events, {1e6 * statistics.mean(everything):.1f} us a decision, "
            f"{1e6 * statistics.mean(timed.audit_s):.1f} us its audit"
        )
        print(
            f"  {len(timed.above)} decisions took more than 1 ms, the longest {1e3 * max(everything):.2f} ms; at most "
            f"{timed.most_actions} actions; the longest audit {1e3 * max(timed.audit_s):.1f} ms"
        )
        for took, name, num_actions in sorted(timed.above, reverse=True)[:10]:
            print(f"    {1e3 * took:.2f} ms: {name}, {num_actions} actions")
        collected = timed.collect_s or [0.0]
        print(
            f"  garbage was collected within {len(timed.collect_s)} decisions, in {sum(collected):.2f} s, at most "
            f"{1e3 * max(collected):.1f} ms"
        )
        for name, seconds in sorted(timed.decide_s.items()):
            ordered = sorted(seconds)
            print(
                f"  {name:<33} {len(seconds):>8,} x  median {1e6 * statistics.median(seconds):8.1f} us  "
                f"99% {1e6 * ordered[int(0.99 * (len(ordered) - 1))]:9.1f} us  most {1e6 * ordered[-1]:9.1f} us"
            )


if __name__ == "__main__":
    main()
