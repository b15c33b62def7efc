# SPDX-License-Identifier: Apache-2.0
"""The invariants hold over thousands of random schedules, and a scheduler that breaks one of them is caught."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from helpers.random_schedules import random_world
from helpers.resumed_schedules import ResumedWorld, check_capacity, check_prompts
from helpers.schedules import Costs, Sequence, World, world_of
from podium.controller.schedule_audit import ScheduleAudit
from podium.controller.scheduler import GroupScheduler
from podium.controller.scheduling import (
    Action,
    Admit,
    EpisodeEnded,
    Event,
    GroupGraded,
    Lend,
    Publish,
    Recall,
    ScheduleSettings,
    StartStep,
    StepCommitted,
    StepRequested,
    Void,
    WeightsInstalled,
    WorkerJoined,
    WorkerLeaving,
)
from podium.errors import InvariantError

FAST, ALL, PARTS = 2_000, 10_000, 8


@pytest.mark.parametrize("part", range(PARTS))
def test_all_invariants_hold(part: int) -> None:
    _hold(range(part, FAST, PARTS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_invariants_hold_over_ten_thousand_schedules(part: int) -> None:
    _hold(range(FAST + part, ALL, PARTS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_invariants_hold_where_devices_change_sides(part: int) -> None:
    worlds = _hold(range(part, FAST, PARTS), lends=True)
    assert sum(world.num_lent for world in worlds) > len(worlds)
    assert sum(world.num_moved for world in worlds) > len(worlds)
    assert sum(len(set(world.lent_for)) < world.num_lent for world in worlds) > 10  # several times for one step
    assert sum(world.num_early for world in worlds) > 50


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_invariants_hold_where_devices_change_sides_over_ten_thousand_schedules(part: int) -> None:
    _hold(range(FAST + part, ALL, PARTS), lends=True)


@pytest.mark.slow
@pytest.mark.parametrize("lends", [False, True])
def test_decisions_in_parts_are_those_of_one_decision(lends: bool) -> None:
    """A decision that stops after its first action, and goes on when it is told so, decides the same."""
    for seed in range(300):
        whole = random_world(seed, lends=lends, most_cost=1_000_000).run()
        parts = random_world(seed, lends=lends, most_cost=1).run()
        assert parts.num_events > whole.num_events, seed
        assert (parts.admitted, parts.steps, parts.histories) == (whole.admitted, whole.steps, whole.histories), seed
        assert (parts.now_s, parts.num_moved) == (whole.now_s, whole.num_moved), seed


@pytest.mark.slow
@pytest.mark.parametrize("lends", [False, True])
def test_all_invariants_hold_where_events_come_between_the_parts_of_a_decision(lends: bool) -> None:
    _hold(range(400), lends=lends, most_cost=1)


@pytest.mark.slow
@pytest.mark.parametrize("lends", [False, True])
def test_a_stop_at_any_time_ends_the_run_with_the_step_in_progress(lends: bool) -> None:
    """During an update, and while the program waits: then it still gets its step. Nothing is admitted after that."""
    num_left = 0
    for seed in range(400):
        length_s = random_world(seed, lends=lends, resumes=False).run().now_s
        world = random_world(seed, lends=lends, resumes=False)
        world.stop_after, world.stop_at_s = None, length_s * random.Random(seed).random()
        world.run()
        if world.last is not None:  # else it had ended by then
            assert len(world.steps) == world.last, seed
            assert not world.late, seed
            num_left += len(world.stopped) > 0
        offered = {admit.group for admit in world.admitted}
        assert offered == {history.number for history in world.histories}, seed
    assert num_left > 20


def _hold(seeds: range, *, lends: bool = False, most_cost: int | None = None) -> list[ResumedWorld]:
    worlds = [random_world(seed, lends=lends, most_cost=most_cost) for seed in seeds]
    for world in worlds:
        world.interrupts = most_cost is not None
        world.run()
    for seed, world in zip(seeds, worlds, strict=True):
        steps = world.settings.steps
        assert len(world.trained) == (steps if world.resumes else min(steps, world.stop_after or steps)), seed
        check_prompts(world)
        check_capacity(world)
        offered = {admit.group for admit in world.admitted}
        assert offered == {history.number for history in world.histories}, seed
        if not world.settings.replaces_uniform:
            most = (world.settings.staleness + 1) * world.settings.groups_per_step
            assert world.max_live <= most, seed
    return worlds


# --- broken schedulers, one for each invariant ---

ASYNC = ScheduleSettings(steps=8, groups_per_step=3, samples=2, staleness=1, on_new_weights="keep")


class _TrainsTwice(GroupScheduler):
    """Starts every second step with a group of the step before."""

    last: tuple[int, ...] = ()

    def _start_step(self) -> Iterator[Action]:
        for action in super()._start_step():
            if isinstance(action, StartStep) and self.last:
                action = replace(action, groups=(*action.groups[1:], self.last[0]))
            if isinstance(action, StartStep):
                self.last = action.groups
            yield action


class _Forgets(GroupScheduler):
    """Forgets a group that has finished, as a queue that is emptied would."""

    def _start_step(self) -> Iterator[Action]:
        for action in super()._start_step():
            if isinstance(action, Void):
                continue
            yield action


class _AdmitsTooMuch(GroupScheduler):
    """Fills all lanes, whatever the bound says."""

    def _has_room(self, deadline: int) -> bool:
        return deadline > self._started

    def _leaves_room(self, step: int, num_graded_by: object) -> bool:
        return True


class _DropsTheSlow(GroupScheduler):
    """Voids what has not finished when a step starts."""

    def _start_step(self) -> Iterator[Action]:
        for action in super()._start_step():
            yield action
            if isinstance(action, StartStep) and self._groups:
                yield Void(group=min(self._groups), reason="uniform")


class _DoesNotWaitForAcknowledgements(GroupScheduler):
    def _is_acknowledged(self, group: object) -> bool:
        return True


class _PublishesUnderFinish(GroupScheduler):
    def _publish(self) -> Iterator[Action]:
        for worker in self._workers.values():
            if worker.sent == worker.version < self._version:
                worker.sent = self._version
                yield Publish(version=self._version, worker=worker.name)


class _RunsAhead(GroupScheduler):
    """Generates during the update at staleness 0."""

    def _deadline(self, version: int) -> int:
        return super()._deadline(version) + (self._started > self._committed)


class _StartsWithLentDevices(GroupScheduler):
    """Does not wait until the learner has its devices again."""

    def _start_step(self) -> Iterator[Action]:
        state, self._lending.state = self._lending.state, "home"
        yield from super()._start_step()
        self._lending.state = state


class _LendsWhileItLearns(GroupScheduler):
    """Lends the learner's devices during an update."""

    def _change_sides(self) -> Iterator[Action]:
        if self._started > self._committed and self._lending.state == "home":
            self._lending.state = "leaving"
            yield Lend()
        yield from super()._change_sides()


class _LendsTwice(GroupScheduler):
    """Lends devices that are on their way already."""

    def _change_sides(self) -> Iterator[Action]:
        if self._lending.state == "leaving":
            yield Lend()
        yield from super()._change_sides()


class _RecallsTwice(GroupScheduler):
    """Recalls devices that are on their way back."""

    def _change_sides(self) -> Iterator[Action]:
        if self._lending.state == "returning":
            yield Recall()
        yield from super()._change_sides()


class _GivesToThoseItRecalls(GroupScheduler):
    """Admits further groups to devices that are on their way back."""

    def _admit(self) -> Iterator[Action]:
        state = self._lending.state
        if state == "returning":
            self._lending.state = "lent"
        yield from super()._admit()
        self._lending.state = state


class _GivesToThoseWhoLeave(GroupScheduler):
    """Admits further groups to a worker that leaves."""

    def _retire(self, event: WorkerLeaving) -> Iterator[Action]:
        yield from super()._retire(event)
        if event.worker in self._workers:
            self._workers[event.worker].is_leaving = False


class _TakesBackWhatEnded(GroupScheduler):
    """Lets episodes run again that have ended already."""

    def _end_episode(self, event: EpisodeEnded) -> Iterator[Action]:
        yield from super()._end_episode(event)
        if event.group in self._groups and self._groups[event.group].missing:
            self._offer(event.group, event.sample)


def _world(settings: ScheduleSettings, scheduler: type[GroupScheduler], seed: int, **costs: float) -> World:
    learner_lanes = (2, 2) if settings.lends else ()
    return world_of(
        settings, Costs(random.Random(seed), **costs), (2, 3), scheduler=scheduler, stop_after=6,
        learner_lanes=learner_lanes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("invariant", "scheduler", "settings", "costs"),
    [
        ("conservation", _TrainsTwice, ASYNC, {}),
        ("conservation", _Forgets, ASYNC, {}),
        ("bounded staleness", _AdmitsTooMuch, ASYNC, {"spread": 2.0}),
        ("no silent bias", _DropsTheSlow, ASYNC, {}),
        (
            "acknowledged weights",
            _DoesNotWaitForAcknowledgements,
            ASYNC,
            {"grade_s": 0.0, "length_s": 0.1, "acknowledge_s": 9.0},
        ),
        ("explicit cache", _PublishesUnderFinish, replace(ASYNC, on_new_weights="finish"), {}),
        ("synchronous at staleness 0", _RunsAhead, replace(ASYNC, staleness=0), {}),
        ("acknowledged weights", _StartsWithLentDevices, replace(ASYNC, lends=True), {"switch_s": 0.01}),
        ("acknowledged weights", _LendsWhileItLearns, replace(ASYNC, lends=True), {"switch_s": 0.01}),
        ("acknowledged weights", _LendsTwice, replace(ASYNC, lends=True), {"switch_s": 0.1}),
        ("acknowledged weights", _RecallsTwice, replace(ASYNC, lends=True), {"switch_s": 0.1}),
        ("conservation", _GivesToThoseItRecalls, replace(ASYNC, lends=True), {"switch_s": 3.0, "length_s": 20.0}),
        ("conservation", _TakesBackWhatEnded, replace(ASYNC, lends=True), {}),
        ("conservation", _GivesToThoseWhoLeave, ASYNC, {"leave_every_s": 1.0, "grace_s": 3.0}),
    ],
)
def test_a_scheduler_that_breaks_an_invariant_is_caught(
    invariant: str, scheduler: type[GroupScheduler], settings: ScheduleSettings, costs: dict[str, float]
) -> None:
    reports = [_report(_world(settings, scheduler, seed, **costs)) for seed in range(20)]
    assert sum(f"invariant: {invariant}" in report for report in reports) >= 15
    assert all(not report or f"invariant: {invariant}" in report for report in reports)


def _report(world: World) -> str:
    try:
        world.run(most_events=20_000)
    except InvariantError as error:
        return str(error)
    return ""


class _MislabelledEngine(World):
    """Stamps an answer with the version that is installed when the answer is read, and not with the one that sampled
    it."""

    def _sampled(self, name: str, sequence: Sequence) -> None:
        if name in self.engines:
            sequence.oldest = self.version
        super()._sampled(name, sequence)


def test_a_version_that_did_not_sample_the_token_is_caught() -> None:
    """The learner's version is stamped before the worker has it."""
    world = _MislabelledEngine(
        ASYNC, Costs(random.Random(0), publish_s=3.0), (2, 3), GroupScheduler(ASYNC), ScheduleAudit(ASYNC)
    )
    with pytest.raises(InvariantError, match="invariant: versions"):
        world.run()


def test_the_report_names_the_group_its_history_and_the_event() -> None:
    settings = ScheduleSettings(steps=4, groups_per_step=1, samples=1, staleness=0)
    scheduler, audit = GroupScheduler(settings), ScheduleAudit(settings)

    def tell(event: Event) -> None:
        audit.observe(event, scheduler.decide(event))

    tell(WorkerJoined(worker="a", lanes=1, version=0))
    tell(StepRequested())
    with pytest.raises(InvariantError) as caught:
        tell(EpisodeEnded(group=0, attempt=0, sample=0, worker="a", oldest=3, newest=3))
    report = str(caught.value)
    assert "group 0" in report
    assert "Admit(group=0" in report
    assert "EpisodeEnded(group=0" in report


def test_a_worker_may_take_a_newer_version_than_the_one_that_it_was_to_get() -> None:
    """With `finish`, engines take new weights when no runner has an episode any more. Meanwhile another step may have
    made a newer version."""
    settings = ScheduleSettings(steps=9, groups_per_step=1, samples=1, staleness=2, on_new_weights="finish")
    scheduler, audit = GroupScheduler(settings), ScheduleAudit(settings)

    def tell(event: Event) -> list[Action]:
        actions = scheduler.decide(event)
        audit.observe(event, actions)
        return actions

    for worker in ("a", "b"):
        tell(WorkerJoined(worker=worker, lanes=1, version=0))
    admitted = {each.worker: each.group for each in tell(StepRequested()) if isinstance(each, Admit)}
    slow = admitted["b"]
    tell(EpisodeEnded(group=admitted["a"], attempt=0, sample=0, worker="a", oldest=0, newest=0))
    another = next(iter({0, 1, 2} - set(admitted.values())))
    tell(EpisodeEnded(group=another, attempt=0, sample=0, worker="a", oldest=0, newest=0))
    tell(GroupGraded(group=admitted["a"], is_uniform=False))
    assert Publish(version=1, worker="a") in tell(StepCommitted(step=1, version=1))
    tell(StepRequested())
    tell(GroupGraded(group=another, is_uniform=False))
    assert not any(isinstance(each, Publish) for each in tell(StepCommitted(step=2, version=2)))
    ended = tell(EpisodeEnded(group=slow, attempt=0, sample=0, worker="b", oldest=0, newest=0))
    assert Publish(version=2, worker="b") in ended
    for worker in ("a", "b"):
        tell(WeightsInstalled(worker=worker, version=2))
    tell(GroupGraded(group=slow, is_uniform=False))
    assert any(isinstance(each, StartStep) for each in tell(StepRequested()))


@pytest.mark.parametrize(
    "wrong",
    [
        StepCommitted(step=2, version=2),
        WeightsInstalled(worker="a", version=7),
        EpisodeEnded(group=0, attempt=0, sample=5, worker="a", oldest=0, newest=0),
    ],
)
def test_an_event_that_cannot_be_is_refused(wrong: Event) -> None:
    settings = ScheduleSettings(steps=4, groups_per_step=1, samples=1)
    audit, scheduler = ScheduleAudit(settings), GroupScheduler(settings)
    for event in (WorkerJoined(worker="a", lanes=1, version=0), StepRequested()):
        audit.observe(event, scheduler.decide(event))
    with pytest.raises(InvariantError):
        audit.observe(wrong, [])
