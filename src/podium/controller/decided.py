# SPDX-License-Identifier: Apache-2.0
"""A scheduler whose decisions are audited, and what it has decided that nobody has carried out yet. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from podium.controller.schedule_audit import ScheduleAudit
from podium.controller.scheduler import GroupScheduler
from podium.controller.scheduling import (
    Action,
    Admit,
    Continue,
    Continued,
    EndRun,
    Event,
    GiveBack,
    GradeGroup,
    Lend,
    Publish,
    Recall,
    Retire,
    ScheduleSettings,
    StartStep,
    Void,
)


class Decided:
    """Who carries an action out takes it from its list."""

    def __init__(self, settings: ScheduleSettings, *, step: int, version: int) -> None:
        self._scheduler = GroupScheduler(settings, step=step, version=version)
        self.audit = ScheduleAudit(settings, step=step, version=version)
        self.admits: list[Admit] = []
        self.publishes: list[Publish] = []
        self.give_backs: list[GiveBack] = []
        self.retirements: list[Retire] = []
        self.lending: Lend | Recall | None = None
        self.start: StartStep | None = None
        self.has_ended = False  # there is no further step

    def tell(self, event: Event) -> None:
        """Tells the scheduler what happened. Where it has more to do than one decision should take, it goes on at
        once."""
        actions: Sequence[Action] = self._decide(event)
        while actions and isinstance(actions[-1], Continue):
            actions = self._decide(Continued())

    @property
    def lacks_only_rewards(self) -> bool:
        """Whether the next step waits for rewards alone."""
        return self._scheduler.lacks_only_rewards

    @property
    def lacks_only_devices(self) -> bool:
        """Whether the next step waits for the learner's devices alone."""
        return self._scheduler.lacks_only_devices

    def _decide(self, event: Event) -> Sequence[Action]:
        actions = self._scheduler.decide(event)
        self.audit.observe(event, actions)
        for action in actions:
            match action:
                case Admit():
                    self.admits.append(action)
                case Publish():
                    self.publishes.append(action)
                case StartStep():
                    self.start = action
                case GiveBack():
                    self.give_backs.append(action)
                case Retire():
                    self.retirements.append(action)
                case Lend() | Recall():
                    self.lending = action
                case EndRun():
                    self.has_ended = True
                case GradeGroup() | Void() | Continue():
                    pass  # episodes are graded as they end, and a void group stays with its step
                case other:
                    assert_never(other)
        return actions
