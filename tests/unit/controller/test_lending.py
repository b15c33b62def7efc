# SPDX-License-Identifier: Apache-2.0
"""When the learner's devices are lent, what moves there, and what that brings."""

from __future__ import annotations

import random

import pytest

from helpers.schedules import Costs, World, world_of
from podium.controller.lending import Lending, to_give_back, would_get
from podium.controller.scheduler import GroupScheduler
from podium.controller.scheduling import (
    Action,
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
    Recall,
    ReturnedEpisode,
    ScheduleSettings,
    StartStep,
    StepRequested,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)


def idle(episodes_per_s: float, switch_s: float, waited_s: float = 0.0) -> LearnerIdle:
    return LearnerIdle(episodes_per_s=episodes_per_s, waited_s=waited_s, switch_s=switch_s)


def waiting(measured: LearnerIdle, *, num_missing: int = 8, was_worth_it: bool = True) -> Lending:
    """At the beginning of a wait, with 10 lanes."""
    lending = Lending(was_worth_it=was_worth_it)
    lending.begin(measured, 10, num_missing)
    return lending


def test_devices_are_lent_where_the_wait_exceeds_the_cost_of_switching() -> None:
    assert waiting(idle(episodes_per_s=0.0, switch_s=0.0)).is_worth_it(8, 10)  # nothing is known
    assert waiting(idle(episodes_per_s=1.0, switch_s=5.0)).is_worth_it(8, 10)  # 8 s against 1.5 x 5 s
    assert not waiting(idle(episodes_per_s=1.0, switch_s=5.0)).is_worth_it(7, 10)
    assert not waiting(idle(episodes_per_s=1.0, switch_s=0.0)).is_worth_it(0, 10)
    assert waiting(idle(episodes_per_s=1.0, switch_s=5.0, waited_s=9.0)).is_worth_it(2, 10)  # the last ones were long
    assert not Lending().is_worth_it(8, 10)  # the learner is busy


def test_a_wait_near_the_threshold_does_not_change_its_mind_with_every_step() -> None:
    lending, found = Lending(), []
    for wait in [16, 9, 12, 6, 12, 9, 16, 12]:  # s, at 1 episode/s; a switch takes 5 s
        lending.begin(idle(1.0, 5.0), 10, wait)
        found.append(lending.is_worth_it(wait, 10))
        lending.end()
    assert found == [True, True, True, False, False, False, True, True]


def test_the_time_that_is_left_is_the_longest_of_three_estimates() -> None:
    lending = waiting(idle(episodes_per_s=2.0, switch_s=5.0, waited_s=30.0))
    assert lending.left_s(8, 10) == 30.0
    lending.note_waited(20.0, 8)
    assert lending.left_s(8, 10) == 20.0  # none has ended for so long
    lending.note_waited(24.0, 4)
    assert lending.left_s(4, 10) == 6.0  # the rest of the last wait
    lending.note_waited(29.0, 3)
    assert lending.left_s(3, 10) == 1.5  # 3 episodes at 2 per s
    assert lending.left_s(3, 1) == 15.0  # of 10 lanes one is left
    assert lending.left_s(3, 0) == float("inf")
    assert lending.left_s(0, 10) == 0.0


def test_within_a_wait_lending_must_be_worth_twice_as_much() -> None:
    lending = waiting(idle(episodes_per_s=1.0, switch_s=5.0))
    assert not lending.is_worth_it(7, 10)  # 7.5 s
    assert not lending.is_worth_it(15, 10)
    assert lending.is_worth_it(16, 10)  # 3 x 5 s
    lending.end()
    lending.begin(idle(1.0, 5.0), 10, 8)
    assert lending.is_worth_it(8, 10)  # it was, at last


def test_lent_workers_get_episodes_where_an_even_part_is_less_than_the_others_have() -> None:
    assert not would_get(4, 4, 2)  # one each, and one each for those that get some
    assert would_get(5, 4, 1)
    assert not would_get(20, 10, 1)  # 2 each: an even part of 20 / 11, rounded up, is as much
    assert would_get(1, 0, 2)  # nobody else is left
    assert would_get(1, 4, None)  # it is not known how many there are
    assert would_get(1, 4, 0)  # episode runners
    assert not would_get(0, 4, 2)


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


def ended(group: int, sample: int, worker: str, attempt: int = 0) -> EpisodeEnded:
    return EpisodeEnded(group=group, attempt=attempt, sample=sample, worker=worker, oldest=0, newest=0)


def test_devices_are_lent_when_workers_die_and_the_wait_grows() -> None:
    tell = Talk(ScheduleSettings(steps=4, groups_per_step=4, samples=2, lends=True))
    for worker in ("a", "b", "c"):
        tell(WorkerJoined(worker=worker, lanes=8, version=0))
    assert tell(idle(episodes_per_s=1.0, switch_s=6.0)) == []  # 8 s are left, and 9 s are too few
    tell(StepRequested())
    assert Lend() not in tell(WorkerLost(worker="b"))  # 12 s at 2/3 of the rate
    assert tell(WorkerLost(worker="c"))[-1] == Lend()  # 24 s at 1/3 of it, above 18 s
    tell(WorkerJoined(worker="d", lanes=8, version=0))
    assert Lend() not in tell(WorkerLost(worker="d"))  # they are on their way


def test_devices_are_lent_when_the_last_episodes_go_on_for_long() -> None:
    tell = Talk(ScheduleSettings(steps=4, groups_per_step=1, samples=4, lends=True))
    tell(WorkerJoined(worker="a", lanes=8, version=0))
    assert tell(idle(episodes_per_s=1.0, switch_s=5.0)) == []  # 4 s
    tell(StepRequested())
    assert tell(LearnerWaits(waited_s=10.0)) == []  # none has ended for 10 s: less than 15 s
    assert tell(ended(0, 0, "a")) == []
    assert tell(LearnerWaits(waited_s=15.5)) == []  # one has ended since
    assert tell(LearnerWaits(waited_s=30.0)) == []
    assert tell(LearnerWaits(waited_s=31.0)) == [Lend()]


def test_a_single_episode_is_no_reason_to_lend_devices() -> None:
    tell = Talk(ScheduleSettings(steps=4, groups_per_step=1, samples=2, lends=True))
    tell(WorkerJoined(worker="a", lanes=8, version=0))
    tell(WorkerJoined(worker="b", lanes=8, version=0))
    assert tell(idle(0.0, 1.0)) == [Lend()]  # nothing is known, and both groups can run
    tell(StepRequested())
    tell(WorkerJoined(worker="lent-0", lanes=8, version=0, is_lent=True))
    moved = tell(DevicesLent(version=0))
    assert moved == [GiveBack(worker="a", episodes=((0, 1, 0),))]
    tell(ended(0, 1, "a"))  # before it was given back: one episode is left, and nothing moves
    assert tell(Continued()) == [Recall()]
    tell(WorkerLeft(worker="lent-0"))
    assert tell(DevicesReturned()) == []
    assert tell(LearnerWaits(waited_s=1000.0)) == []


def test_devices_without_work_are_recalled_early_and_lent_again_in_the_same_step() -> None:
    tell = Talk(ScheduleSettings(steps=4, groups_per_step=1, samples=4, lends=True))
    tell(WorkerJoined(worker="a", lanes=8, version=0))
    assert tell(idle(episodes_per_s=0.0, switch_s=5.0)) == [Lend()]
    assert tell(StepRequested()) == [Admit(group=0, attempt=0, samples=(0, 1, 2, 3), worker="a")]
    tell(WorkerJoined(worker="lent-0", lanes=8, version=0, is_lent=True))
    assert tell(DevicesLent(version=0)) == [GiveBack(worker="a", episodes=((0, 2, 0), (0, 3, 0)))]
    back = [ReturnedEpisode(group=0, attempt=0, sample=sample, oldest=0, newest=0) for sample in range(4)]
    moved = tell(EpisodesReturned(worker="a", episodes=tuple(back[2:])))
    assert moved == [Admit(group=0, attempt=0, samples=(2, 3), worker="lent-0")]
    assert tell(ended(0, 2, "lent-0")) == []
    assert tell(ended(0, 3, "lent-0")) == [Continue()]
    assert tell(Continued()) == [GiveBack(worker="a", episodes=((0, 1, 0),))]  # it has nothing, and a has two
    assert tell(EpisodesReturned(worker="a", episodes=(back[1],)))[0] == Admit(
        group=0, attempt=0, samples=(1,), worker="lent-0"
    )
    assert tell(ended(0, 1, "lent-0")) == [Continue()]
    assert tell(Continued()) == [Recall()]  # a has one, which stays
    assert tell(WorkerLeft(worker="lent-0")) == []
    assert tell(WorkerLost(worker="a")) == []  # its last episode waits
    assert tell(DevicesReturned()) == [Lend()]


@pytest.mark.parametrize(("graded_s", "is_early"), [(1.0, True), (3.0, False)])
def test_devices_are_recalled_while_the_last_rewards_are_computed_if_that_is_short(
    graded_s: float, is_early: bool
) -> None:
    """To recall them takes 2 s. They would generate for the step after this one meanwhile."""
    tell = Talk(ScheduleSettings(steps=4, groups_per_step=1, samples=2, staleness=1, on_new_weights="keep", lends=True))
    tell(WorkerJoined(worker="a", lanes=8, version=0))
    assert tell(LearnerIdle(episodes_per_s=0.1, waited_s=0.0, switch_s=4.0, recall_s=2.0, graded_s=graded_s)) == [
        Lend()
    ]
    tell(StepRequested())
    tell(WorkerJoined(worker="lent-0", lanes=8, version=0, is_lent=True))
    tell(DevicesLent(version=0))
    back = [ReturnedEpisode(group=1, attempt=0, sample=sample, oldest=0, newest=0) for sample in (0, 1)]
    tell(EpisodesReturned(worker="a", episodes=tuple(back)))  # to lent-0
    assert tell(ended(0, 0, "a")) == []
    last: list[Action] = [GradeGroup(group=0)]
    assert tell(ended(0, 1, "a")) == ([*last, Recall()] if is_early else last)
    assert tell(GroupGraded(group=0, is_uniform=False)) == ([] if is_early else [Recall()])


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
