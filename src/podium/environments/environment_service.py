# SPDX-License-Identifier: Apache-2.0
"""The environment process: it creates the recipe's environments and calls them, each call under a deadline."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from podium.data.tasks import Task
from podium.environments.activity import MARK, Activity, Mark
from podium.environments.agents import AgentCall, AgentOutcome, without_proxy
from podium.environments.environment_factory import environment_maker
from podium.environments.given_up import joined, notes_of
from podium.environments.protocol import OVERDUE, Observation, Outcome, Turn, call_within
from podium.environments.sandbox.pool import use_recipe_sandbox
from podium.environments.tools import all_tools, load_tools
from podium.errors import defined_at, exception_text, type_phrase
from podium.recipe.on_policy import EnvironmentSection, SandboxSection


@dataclass(frozen=True, slots=True)
class Begin:
    """Creates an environment and resets it."""

    place: int
    task: Task | AgentCall


@dataclass(frozen=True, slots=True)
class Take:
    """Steps with a turn of the model."""

    place: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class End:
    """Closes the environment, if it has a `close`, and forgets it."""

    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentResponse:
    """The result of a call. `value` (which may be None) counts unless there is an `error`."""

    value: Any = None
    error: str | None = None
    closes: bool = False  # the environment has a `close`
    is_free: bool = True  # no code of this place runs any more
    num_overdue: int = 0  # calls of the whole process that outlived their deadline and still run
    places: Mapping[str, str] | None = None  # of Begin: method -> file and line of its definition


class EnvironmentService:
    """Environments by place. A place has one episode at a time; its slot in the activity file has the same number."""

    def __init__(self, activity: Activity, section: EnvironmentSection, sandbox: SandboxSection | None = None) -> None:
        use_recipe_sandbox(sandbox or SandboxSection())
        if section.is_agent:
            os.environ.update(without_proxy())
        self._activity, self._section = activity, section
        self._make = environment_maker(section)
        self._environments: dict[int, Any] = {}

    def describe(self) -> list[dict[str, Any]]:
        """Schemas of the recipe's tools."""
        return [tool.schema for tool in all_tools(load_tools(self._section.tools))] if self._section.tools else []

    async def answer(self, order: Begin | Take | End, tell: Callable[[Any], None]) -> EnvironmentResponse:
        """Runs one call of an episode's environment; an exception becomes the reply's error."""
        place = order.place
        MARK.set(Mark(self._activity, place))
        value, error = None, None
        environment: Any = self._environments.pop(place, None) if isinstance(order, End) else None
        try:
            match order:
                case Begin():
                    value = _plain(await self._begin(order))
                case Take():
                    environment = self._environments[place]
                    timeout_s = max(self._section.timeout_s, getattr(environment, "step_timeout_s", 0.0))
                    value = _plain(await call_within(timeout_s, environment.step, order.turn))
                case End():
                    if _closes(environment):
                        await call_within(self._section.timeout_s, environment.close)
        except Exception as raised:  # the environment is the user's code
            error = _text(raised)
        return EnvironmentResponse(
            value=value,
            error=error,
            closes=_closes(self._environments.get(place)),
            is_free=place not in self._activity.running,
            num_overdue=OVERDUE.count,
            places=_places(self._environments.get(place)) if isinstance(order, Begin) else None,
        )

    async def _begin(self, order: Begin) -> Any:
        try:
            with Mark(self._activity, order.place):
                environment = self._make()
        except SystemExit as error:
            raise RuntimeError(f"the environment cannot be made: called exit({error.code!r})") from error
        except (Exception, KeyboardInterrupt) as error:  # the environment is the user's code
            raise _NotMadeError(f"the environment cannot be made: {exception_text(error)}") from error
        self._environments[order.place] = environment
        return await call_within(self._section.timeout_s, environment.reset, order.task)


class _NotMadeError(Exception):
    """The text is the whole message."""


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, _NotMadeError) else joined(exception_text(error), *notes_of(error))


def _places(environment: Any) -> dict[str, str]:
    return {method: defined_at(getattr(environment, method, None)) for method in ("reset", "step")}


def _closes(environment: Any) -> bool:
    return callable(getattr(environment, "close", None))


def _plain(returned: Any) -> Any:
    """Observations and outcomes as Podium's classes, which the runner can unpickle; other objects only as a
    description."""
    match returned:
        case None:
            return None
        case Observation():
            return Observation(messages=returned.messages, text=returned.text, tools=returned.tools)
        case AgentOutcome():
            return AgentOutcome(
                reward=returned.reward, done=returned.done, metrics=returned.metrics,
                turn_rewards=returned.turn_rewards,
            )  # fmt: skip
        case Outcome():
            return Outcome(
                messages=returned.messages, reward=returned.reward, done=returned.done, metrics=returned.metrics,
                warnings=returned.warnings,
            )  # fmt: skip
        case _:
            return Misfit(type_phrase(returned))


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value that an environment may not return: its type in words."""

    kind: str
