# SPDX-License-Identifier: Apache-2.0
"""When the learner's devices are lent, what moves there, and what that brings."""

from __future__ import annotations

import random

import pytest

from helpers.schedules import Costs, World, world_of
from podium.controller.lending import Lending, to_give_back
from podium.controller.scheduler import GroupScheduler
from podium.controller.scheduling import (
    Action,
    Admit,
    DevicesLent,
    DevicesReturned,
    EpisodeEnded,
    EpisodesReturned,
    Event,
    GiveBack,
    GroupGraded,
    LearnerIdle,
    Lend,
    Recall,
    ReturnedEpisode,
    ScheduleSettings,
    StartStep,
    StepRequested,
    WorkerJoined,
    WorkerLeft,
)


def idle(episodes_per_s: float, switch_s: float, waited_s: float = 0.0) -> LearnerIdle:
    return LearnerIdle(episodes_per_s=episodes_per_s, waited_s=waited_s, switch_s=switch_s)


def test_devices_are_lent_where_the_wait_exceeds_the_cost_of_switching() -> None:
    assert Lending().is_worth_it(8, idle(episodes_per_s=0.0, switch_s=0.0))  # nothing is known
    assert Lending().is_worth_it(8, idle(episodes_per_s=1.0, switch_s=5.0))  # 8 s against 1.5 x 5 s
    assert not Lending().is_worth_it(7, idle(episodes_per_s=1.0, switch_s=5.0))
    assert not Lending().is_worth_it(0, idle(episodes_per_s=1.0, switch_s=0.0))
    assert Lending().is_worth_it(2, idle(episodes_per_s=1.0, switch_s=5.0, waited_s=9.0))  # the last ones were long


def test_a_wait_near_the_threshold_does_not_change_its_mind_with_every_step() -> None:
    lending = Lending()
    waits = [16, 9, 12, 6, 12, 9, 16, 12]  # s, at 1 episode/s; a switch takes 5 s
    assert [lending.is_worth_it(wait, idle(1.0, 5.0)) for wait in waits] == [
        True, True, True, False, False, False, True, True,
    ]  # fmt: skip


def test_a_lent_worker_gets_an_even_part_of_what_runs_and_the_newest_groups_move() -> None:
    running = {"a": [(group, sample) for group in range(4) for sample in (0, 1)], "b": [(9, 0), (9, 1)], "lent-0": []}
    assert dict(to_give_back(running, ["lent-0"])) == {"a": ((2, 0), (2, 1), (3, 0), (3, 1))}
    assert dict(to_give_back({"a": [(0, 0)], "lent-0": []}, ["lent-0"])) == {}


class Talk:
    """Tells a scheduler events and keeps what it decides."""

    def __init__(self, settings: ScheduleSettings) -> None:
        self.scheduler = GroupScheduler(settings)

    def __call__(self, event: Event) -> list[Action]:
        return self.scheduler.decide(event)


def test_a_step_begins_when_its_devices_are_back_and_what_ran_there_continues() -> None:
    tell = Talk(ScheduleSettings(steps=4, groups_per_step=1, samples=2, staleness=1, on_new_weights="keep", lends=True))
    tell(WorkerJoined(worker="a", lanes=8, version=0))
    assert tell(idle(0.0, 0.0)) == [Lend()]
    tell(StepRequested())  # both groups that may run go to a
    assert tell(WorkerJoined(worker="lent-0", lanes=8, version=0, is_lent=True)) == []
    moved = tell(DevicesLent(version=0))
    assert moved == [GiveBack(worker="a", episodes=((1, 0, 0), (1, 1, 0)))]
    back = [ReturnedEpisode(group=1, attempt=0, sample=sample, oldest=0, newest=0) for sample in (0, 1)]
    assert tell(EpisodesReturned(worker="a", episodes=tuple(back))) == [
        Admit(group=1, attempt=0, samples=(0, 1), worker="lent-0")
    ]
    for sample in (0, 1):
        tell(EpisodeEnded(group=0, attempt=0, sample=sample, worker="a", oldest=0, newest=0))
    assert tell(GroupGraded(group=0, is_uniform=False)) == [Recall()]
    tell(EpisodeEnded(group=1, attempt=0, sample=0, worker="lent-0", oldest=0, newest=0))
    continued = tell(EpisodesReturned(worker="lent-0", episodes=tuple(back[1:])))
    assert continued == [Admit(group=1, attempt=0, samples=(1,), worker="a")]
    assert tell(WorkerLeft(worker="lent-0")) == []
    assert tell(DevicesReturned()) == [StartStep(step=1, groups=(0,), voided=())]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_lent_devices_make_a_schedule_faster(staleness: int) -> None:
    def run(*, lends: bool) -> World:
        settings = ScheduleSettings(
            steps=20, groups_per_step=8, samples=4, staleness=staleness, on_new_weights="keep", lends=lends
        )
        costs = Costs(random.Random(1), length_s=1.0, spread=0.5, update_s=1.0, switch_s=0.05)
        return world_of(settings, costs, (4,), learner_lanes=(4,) if lends else ()).run()

    alone, lent = run(lends=False), run(lends=True)
    assert lent.num_lent >= 15
    assert lent.now_s < 0.75 * alone.now_s
