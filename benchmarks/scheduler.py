# SPDX-License-Identifier: Apache-2.0
"""Microseconds of a decision of the scheduler, and of its audit, with many devices and episodes in flight.

    .venv/bin/python benchmarks/scheduler.py                      1,024 devices, 100,000 episodes in flight

Lengths are log-normal, workers end their episodes in that order, groups are graded at once, and an update takes as long
as a tenth of the longest episode. Only `decide` and `observe` are timed, in processor time."""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time

from podium.controller.schedule_audit import ScheduleAudit
from podium.controller.scheduler import GroupScheduler
from podium.controller.scheduling import (
    Admit,
    EpisodeEnded,
    Event,
    GradeGroup,
    GroupGraded,
    Publish,
    ScheduleSettings,
    StartStep,
    StepCommitted,
    StepRequested,
    WeightsInstalled,
    WorkerJoined,
)


class Timed:
    """Tells events to a scheduler under audit and keeps what each took."""

    def __init__(self, settings: ScheduleSettings) -> None:
        self.scheduler, self.audit = GroupScheduler(settings), ScheduleAudit(settings)
        self.decide_s: dict[str, list[float]] = {}
        self.per_action_s: list[float] = []  # of decisions with more than one action
        self.audit_s: list[float] = []
        self.num_running = self.most_running = 0

    def tell(self, event: Event) -> list[object]:
        began = time.thread_time()
        actions = self.scheduler.decide(event)
        decided = time.thread_time()
        self.audit.observe(event, actions)
        self.audit_s.append(time.thread_time() - decided)
        self.decide_s.setdefault(type(event).__name__, []).append(decided - began)
        if len(actions) > 1:
            self.per_action_s.append((decided - began) / len(actions))
        self.num_running -= isinstance(event, EpisodeEnded)
        self.num_running += sum(len(action.samples) for action in actions if isinstance(action, Admit))
        self.most_running = max(self.most_running, self.num_running)
        self.audit.take_finished()
        return list(actions)


def run(devices: int, episodes: int, samples: int, staleness: int, steps: int) -> Timed:
    """Runs a schedule to its last step."""
    groups = episodes // samples // (staleness + 1)
    settings = ScheduleSettings(
        steps=steps, groups_per_step=groups, samples=samples, staleness=staleness, on_new_weights="keep"
    )
    timed, rng, ticks = Timed(settings), random.Random(0), itertools.count()
    later: list[tuple[float, int, Event]] = []
    now = 0.0

    def carry_out(actions: list[object]) -> None:
        for action in actions:
            match action:
                case Admit():
                    for sample in action.samples:
                        ended = EpisodeEnded(
                            group=action.group, attempt=action.attempt, sample=sample, worker=action.worker,
                            oldest=versions[action.worker], newest=versions[action.worker],
                        )  # fmt: skip
                        heapq.heappush(later, (now + rng.lognormvariate(0.0, 1.0), next(ticks), ended))
                case GradeGroup():
                    graded = GroupGraded(group=action.group, is_uniform=False)
                    heapq.heappush(later, (now, next(ticks), graded))
                case StartStep():
                    committed = StepCommitted(step=action.step, version=action.step)
                    heapq.heappush(later, (now + 1.0, next(ticks), committed))
                case Publish():
                    installed = WeightsInstalled(worker=action.worker, version=action.version)
                    heapq.heappush(later, (now + 0.1, next(ticks), installed))
                case _:
                    pass

    versions = {f"device-{number}": 0 for number in range(devices)}
    lanes = -(-episodes // devices)
    for name in versions:
        carry_out(timed.tell(WorkerJoined(worker=name, lanes=lanes, version=0)))
    carry_out(timed.tell(StepRequested()))
    while later:
        now, _, event = heapq.heappop(later)
        if isinstance(event, WeightsInstalled):
            versions[event.worker] = event.version
        carry_out(timed.tell(event))
        if isinstance(event, StepCommitted):
            carry_out(timed.tell(StepRequested()))
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--episodes", type=int, default=100_000, help="in flight")
    parser.add_argument("--samples", type=int, default=16, help="of a group")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--steps", type=int, default=3)
    asked = parser.parse_args()
    for staleness in asked.staleness:
        timed = run(asked.devices, asked.episodes, asked.samples, staleness, asked.steps)
        everything = [second for seconds in timed.decide_s.values() for second in seconds]
        print(
            f"{asked.devices} devices, up to {timed.most_running:,} episodes in flight, staleness {staleness}: "
            f"{len(everything):,} events, {1e6 * statistics.mean(everything):.1f} us a decision, "
            f"{1e6 * statistics.mean(timed.audit_s):.1f} us its audit"
        )
        longest, late = max(timed.per_action_s), sum(second > 1e-3 for second in everything)
        print(f"  {late} decisions took more than 1 ms; with several actions at most {1e6 * longest:.0f} us an action")
        for name, seconds in sorted(timed.decide_s.items()):
            ordered = sorted(seconds)
            print(
                f"  {name:<17} {len(seconds):>8,} x  median {1e6 * statistics.median(seconds):8.1f} us  "
                f"99% {1e6 * ordered[int(0.99 * (len(ordered) - 1))]:9.1f} us  most {1e6 * ordered[-1]:9.1f} us"
            )


if __name__ == "__main__":
    main()
