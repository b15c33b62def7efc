# SPDX-License-Identifier: Apache-2.0
"""Schedules that are saved, stopped, killed and resumed: nothing is lost or trained twice, and what breaks that is
caught. Thousands of random ones are in `test_schedule_invariants`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from helpers.random_schedules import random_world
from helpers.resumed_schedules import CountedPrompts, ResumedWorld, check_capacity, check_prompts
from helpers.schedules import Costs
from podium.controller.done_prompts import DonePrompts
from podium.controller.schedule_audit import ScheduleAudit
from podium.controller.scheduler import GroupScheduler
from podium.controller.scheduling import ScheduleSettings
from podium.errors import InvariantError


def _resumed(seed: int, *, make: Callable[..., GroupScheduler], make_done: Callable[[], DonePrompts]) -> ResumedWorld:
    """Nine steps with long tails, stopped after the third, then killed twice. Every other commit is saved."""
    settings = ScheduleSettings(steps=9, groups_per_step=3, samples=2, staleness=4, on_new_weights="keep")
    return ResumedWorld(
        settings, Costs(random.Random(seed), spread=2.0), (2, 3), make(settings), ScheduleAudit(settings),
        stop_after=3, make=make, make_done=make_done, chance=random.Random(seed), resumes=True, save_share=0.5,
        kills_s=(1_000.0, 8.0, 8.0),
    )  # fmt: skip


def test_the_state_is_that_before_the_oldest_live_group_without_later_prompts_that_are_done() -> None:
    done = DonePrompts()
    done.add([0, 2, 5, 3])
    live = [(4, {"next": 4}), (1, {"next": 1}), (6, {"next": 6})]
    assert done.state(live, lambda: {"next": 7}) == {"next": 1, "done": [2, 3, 5]}
    # Prompts below the oldest live group are forgotten; what the source was to pass over before it is not.
    done.add([1, 4])
    assert done.state([(6, {"next": 6, "done": [8]})], lambda: {"next": 9}) == {"next": 6, "done": [8]}
    assert done.state([], lambda: {"next": 9}) == {"next": 9}


def test_prompts_that_are_done_are_passed_over_once() -> None:
    prompts = CountedPrompts({"next": 1, "done": [2, 3, 5]})
    assert [prompts.take(), prompts.take()] == [1, 4]
    assert prompts.state() == {"next": 5, "done": [5]}
    assert prompts.passed == {0, 1, 2, 3, 4, 5}
    assert [prompts.take(), prompts.state()] == [6, {"next": 7}]


def test_random_schedules_are_resumed_from_saves_in_the_middle() -> None:
    worlds = [random_world(seed).run() for seed in range(100)]
    begins = [saved for world in worlds for saved in world.resumed]
    assert sum(saved.step > 0 for saved in begins) > 10
    assert sum(bool(saved.data.get("done")) for saved in begins) > 3  # groups had overtaken others


class _ForgetsWhatIsDone(DonePrompts):
    """Goes on before the oldest live group, with all prompts after it."""

    def state(
        self, live: Iterable[tuple[int, Mapping[str, Any]]], position: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        return {"next": super().state(live, position)["next"]}


class _ForgetsWhatIsLive(DonePrompts):
    """Goes on after all prompts that were taken, as a position in the data alone would."""

    def state(
        self, live: Iterable[tuple[int, Mapping[str, Any]]], position: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        return position()


class _ForgetsEarlierDone(DonePrompts):
    """Knows what is done since the last start only."""

    def state(
        self, live: Iterable[tuple[int, Mapping[str, Any]]], position: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        return super().state([(index, {"next": before["next"]}) for index, before in live], position)


class _AdmitsForTheStepsBefore(GroupScheduler):
    """Counts its groups from 0 after a resume, and its room from the first step of the run."""

    def __init__(self, settings: ScheduleSettings, *, step: int = 0, version: int = 0) -> None:
        super().__init__(settings, step=step, version=version)
        self._before = step

    def _deadline(self, version: int) -> int:
        return super()._deadline(version) + self._before


class _KeepsRoomForWhatIsGone(GroupScheduler):
    """Counts groups that ran when it was saved, after a resume too."""

    def __init__(self, settings: ScheduleSettings, *, step: int = 0, version: int = 0) -> None:
        super().__init__(settings, step=step, version=version)
        self._is_resumed = step > 0

    def _deadline(self, version: int) -> int:
        return super()._deadline(version) - self._is_resumed


class _RepeatsTheLastStep(GroupScheduler):
    """Goes on with the step that was saved."""

    def __init__(self, settings: ScheduleSettings, *, step: int = 0, version: int = 0) -> None:
        super().__init__(settings, step=max(0, step - 1), version=version)


@pytest.mark.parametrize(
    ("make", "make_done", "report"),
    [
        (GroupScheduler, _ForgetsWhatIsDone, "a prompt was trained twice"),
        (GroupScheduler, _ForgetsWhatIsLive, "a prompt has no end, or two"),
        (GroupScheduler, _ForgetsEarlierDone, "a prompt was trained twice"),
        (_AdmitsForTheStepsBefore, DonePrompts, "capacity after step 3"),
        (_KeepsRoomForWhatIsGone, DonePrompts, "capacity after step 3"),
        (_RepeatsTheLastStep, DonePrompts, "invariant: conservation"),
    ],
)
def test_a_run_that_is_resumed_wrongly_is_caught(
    make: type[GroupScheduler], make_done: type[DonePrompts], report: str
) -> None:
    reports = [_report(_resumed(seed, make=make, make_done=make_done)) for seed in range(20)]
    assert sum(report in each for each in reports) >= 15, reports


def test_a_run_that_is_resumed_rightly_is_not() -> None:
    worlds = [_resumed(seed, make=GroupScheduler, make_done=DonePrompts) for seed in range(20)]
    assert [_report(world) for world in worlds] == [""] * 20
    assert sum(len(world.resumed) for world in worlds) > 40


def _report(world: ResumedWorld) -> str:
    try:
        world.run(most_events=20_000)
        check_capacity(world)
        check_prompts(world)
    except (AssertionError, InvariantError) as error:
        return str(error)
    return ""
