# SPDX-License-Identifier: Apache-2.0
"""Environments of OpenEnv servers: each episode has a client and so a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from podium.data.kinds import Message
from podium.data.tasks import Task
from podium.environments.chat_format import BadCall, ToolCall
from podium.environments.field_packages import IllegalActionError, beginning, require_package
from podium.environments.protocol import Outcome, Turn
from podium.environments.signatures import require_options_of
from podium.errors import RecipeError, exception_text, type_phrase
from podium.recipe import plugins
from podium.recipe.field_environments import OpenEnvSection
from podium.recipe.on_policy import EnvironmentSection

# Of `environment.timeout_s`, so that the error of a slow server is the server's.
_SHARE_OF_TIMEOUT = 0.95
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# Fields of observations and actions that are not the environment's own.
_COMMON_FIELDS = frozenset(("done", "reward", "metadata"))
_CODE = re.compile(r"\(code: (\w+)\)\s*$")


class ServerFailedError(Exception):
    """The server cannot continue an episode. The text names it and says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenEnvSpec:
    """How the sessions of a recipe are opened, and how texts become actions and observations texts."""

    section: OpenEnvSection
    limit_s: float  # of one call
    connect: Callable[[], Any]  # gives a client that is not connected yet
    action_class: type[BaseModel] | None
    to_action: Callable[[Turn], Any] | None
    field: str | None
    render: Callable[[Any], Any] | None
    key: str

    @classmethod
    def of(cls, environment: EnvironmentSection, section: OpenEnvSection, key: str) -> OpenEnvSpec:
        """Loads the package and the recipe's classes and functions. Connects to no server."""
        where = f"{key}.openenv"
        require_package("openenv", "openenv", where)
        action: Any = None if section.action is None else plugins.load(section.action, f"{where}.action")
        action_class = action if isinstance(action, type) else None
        if action_class is not None and not issubclass(action_class, BaseModel):
            raise RecipeError(f"{where}.action: {section.action} is no subclass of OpenEnv's Action.")
        if section.answer == "tool_call" and action_class is None:
            raise RecipeError(
                f"{where}.action: a tool call needs a class of actions, and {section.action} is a function."
            )
        limit_s = environment.timeout_s * _SHARE_OF_TIMEOUT
        return cls(
            section=section,
            limit_s=limit_s,
            connect=_client_maker(section, environment.options, limit_s, key),
            action_class=action_class,
            to_action=None if action_class is not None else action,
            field=_field(section, action_class, where),
            render=None if section.render is None else plugins.load(section.render, f"{where}.render"),
            key=where,
        )

    @property
    def server(self) -> str:
        """The server's address for messages, without what could be a password."""
        parts = urlsplit(self.section.base_url)
        return f"{parts.scheme}://{parts.hostname}{'' if parts.port is None else f':{parts.port}'}"

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tool that the model is shown."""
        if self.section.answer != "tool_call" or self.action_class is None:
            return None
        schema = self.action_class.model_json_schema()
        fields = {name: each for name, each in schema.get("properties", {}).items() if name != "metadata"}
        description = (inspect.getdoc(self.action_class) or "").split("\n\n")[0]
        function = {
            "name": self.section.tool,
            "description": description,
            "parameters": {**schema, "properties": fields},
        }
        return [{"type": "function", "function": function}]

    def actions_of(self, turn: Turn) -> list[Any]:
        """The actions of a turn, at least one. Raises an IllegalActionError if it has none."""
        if self.to_action is not None:
            try:
                return [self.to_action(turn)]
            except ValueError as error:
                raise IllegalActionError(f"Illegal action: {error}") from error
        match self.section.answer:
            case "text":
                assert self.field is not None
                return [self._action({self.field: turn.text.strip()})]
            case "json":
                return [self._action(_object(turn.text))]
            case "tool_call":
                return [self._action(self._arguments(call)) for call in self._calls(turn)]

    def _calls(self, turn: Turn) -> tuple[ToolCall | BadCall, ...]:
        if not turn.calls:
            raise IllegalActionError(f"Illegal action. Call the tool {self.section.tool}.")
        return turn.calls

    def _arguments(self, call: ToolCall | BadCall) -> Mapping[str, Any]:
        if isinstance(call, BadCall):
            raise IllegalActionError(f"Illegal action: {call.why}")
        if call.name != self.section.tool:
            raise IllegalActionError(f"Illegal action. There is no tool {call.name}; call {self.section.tool}.")
        return call.arguments

    def _action(self, values: Mapping[str, Any]) -> Any:
        if self.action_class is None:
            return dict(values)
        try:
            return self.action_class.model_validate(dict(values))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
            raise IllegalActionError(f"Illegal action. {wrong}") from error

    def text_of(self, observation: Any) -> str:
        """An observation as the model reads it."""
        if self.render is not None:
            text = self.render(observation)
            if not isinstance(text, str):
                raise TypeError(f"{self.key}.render returned {type_phrase(text)}; it returns a text")
            return text
        values = observation.model_dump(mode="json") if isinstance(observation, BaseModel) else observation
        if not isinstance(values, Mapping):
            return str(values)
        own = {name: value for name, value in values.items() if name not in _COMMON_FIELDS}
        only = next(iter(own.values())) if len(own) == 1 else own
        return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False)

    def reset_arguments(self, task: Task) -> dict[str, Any]:
        """Keyword arguments of `reset`, from the row."""
        return {name: task.row[name] for name in self.section.reset if name in task.row}


class OpenEnvEnvironment:
    """One episode of an OpenEnv environment.

    Metrics: turns, illegal_actions, and the state's numbers of the recipe."""

    def __init__(self, spec: OpenEnvSpec) -> None:
        self._spec = spec
        self._client: Any = None

    async def reset(self, task: Task, /) -> Any:
        """Opens a session and resets it. The model reads the row's prompt and the first observation."""
        spec, loop = self._spec, asyncio.get_running_loop()
        began, pause_s = loop.time(), _FIRST_PAUSE_S
        while True:
            try:
                result = await self._opened(spec.reset_arguments(task), began + spec.limit_s - loop.time())
                break
            except _NotServedError as error:
                limit_s = spec.limit_s if error.is_full else min(spec.limit_s, spec.section.connect_timeout_s)
                await self.close()
                if loop.time() + pause_s >= began + limit_s:
                    raise ServerFailedError(str(error)) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if result.done:
            raise ServerFailedError(f"the environment at {spec.server} was done before the first answer.")
        return beginning(task, spec.text_of(result.observation), spec.tools)

    async def step(self, turn: Turn, /) -> Outcome:
        """Takes the actions of the answer one after the other; an illegal one is a message, and no step."""
        metrics = {"turns": 1.0, "illegal_actions": 0.0}
        reward, messages, done = 0.0, [], False
        try:
            for index, action in enumerate(self._spec.actions_of(turn)):
                result = await self._answered("step", self._client.step(action))
                reward, done = reward + _number(result.reward, self._spec), bool(result.done)
                messages.append(self._message(self._spec.text_of(result.observation), f"{turn.number:04d}{index:05d}"))
                if done:
                    metrics |= await self._state_metrics()
                    break
        except IllegalActionError as error:
            metrics["illegal_actions"] = 1.0
            reward += self._spec.section.illegal_reward
            text, role = str(error), "tool" if turn.calls else "user"
            messages.append(self._message(text, f"{turn.number:04d}99999", role=role))
        return Outcome(messages=messages, reward=reward, done=done, metrics=metrics)

    async def close(self) -> None:
        """Ends the session."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # the server may be gone
                await client.close()

    async def _opened(self, arguments: Mapping[str, Any], left_s: float) -> Any:
        self._client = client = self._spec.connect()
        try:
            await asyncio.wait_for(client.connect(), left_s)
        except (OSError, TimeoutError) as error:
            raise _NotServedError(
                f"no server answers at {self._spec.server} ({error or 'timed out'}). Start it, or correct "
                f"{self._spec.key}.base_url."
            ) from error
        return await self._answered("reset", client.reset(**arguments))

    async def _answered(self, method: str, call: Awaitable[Any]) -> Any:
        """The server's answer to a call, or why there is none."""
        server = self._spec.server
        try:
            result = await asyncio.wait_for(call, self._spec.limit_s)
        except TimeoutError as error:
            raise ServerFailedError(f"{server} did not answer {method} within {self._spec.limit_s:.3g} s.") from error
        except RuntimeError as error:  # the client's, for an error that the server reports
            code = found[1] if (found := _CODE.search(str(error))) else ""
            if code == "CAPACITY_REACHED":
                raise _NotServedError(f"{server}: {error}. {_FULL}", is_full=True) from error
            if code == "VALIDATION_ERROR" and method == "step":
                raise IllegalActionError("Illegal action: the environment does not take it.") from error
            raise ServerFailedError(f"{server} failed at {method}: {error}") from error
        except Exception as error:  # of the transport, or what the client makes of an answer that is none
            if type(error).__name__.startswith("ConnectionClosed"):  # of websockets, which only the client imports
                raise self._closed(method, error) from error
            raise ServerFailedError(
                f"{server} answered {method} with what the client cannot read: {exception_text(error)}"
            ) from error
        if method != "state" and not all(hasattr(result, name) for name in ("observation", "reward", "done")):
            raise ServerFailedError(f"the client of {server} returned {type_phrase(result)} and no StepResult.")
        return result

    def _closed(self, method: str, error: Exception) -> Exception:
        text = f"{self._spec.server} closed the connection at {method} ({error})."
        if method == "reset":  # as a server does that has no session left
            return _NotServedError(f"{text} {_FULL}", is_full=True)
        return ServerFailedError(text)

    async def _state_metrics(self) -> dict[str, float]:
        names = self._spec.section.state_metrics
        if not names:
            return {}
        state = await self._answered("state", self._client.state())
        values = state.model_dump() if isinstance(state, BaseModel) else state
        missing = [name for name in names if not isinstance(values.get(name), int | float)]
        if missing:
            raise ServerFailedError(f"the state of {self._spec.server} has no number {missing[0]!r}.")
        return {name: float(values[name]) for name in names}

    def _message(self, text: str, call_id: str, *, role: str | None = None) -> Message:
        if self._spec.section.answer != "tool_call" or role == "user":
            return {"role": "user", "content": text}
        return {"role": "tool", "content": text, "tool_call_id": call_id, "name": self._spec.section.tool}


class _NotServedError(Exception):
    """No session was opened: nobody listens, or the server is full. Another try may succeed."""

    def __init__(self, text: str, *, is_full: bool = False) -> None:
        super().__init__(text)
        self.is_full = is_full


_FULL = "If it is full, raise its max_concurrent_envs, or lower environment.concurrency."


def _client_maker(section: OpenEnvSection, options: Mapping[str, Any], limit_s: float, key: str) -> Callable[[], Any]:
    client: Any = _generic_client() if section.client is None else plugins.load(section.client, f"{key}.openenv.client")
    given = {"base_url": section.base_url, **options}
    require_options_of(client, given, f"{key}.options")
    limits = {"connect_timeout_s": section.connect_timeout_s, "message_timeout_s": limit_s}
    taken = inspect.signature(client).parameters
    return lambda: client(**{name: value for name, value in limits.items() if name in taken}, **given)


def _generic_client() -> Any:
    from openenv.core import GenericEnvClient

    class PlainClient(GenericEnvClient):  # type: ignore[misc]
        """OpenEnv's client for plain values, which refuses an answer without an observation."""

        def _parse_result(self, payload: Any) -> Any:
            if not isinstance(payload, Mapping) or "observation" not in payload:
                raise ValueError(f"an answer without an observation: {json.dumps(payload)[:200]}")
            return super()._parse_result(dict(payload))

    return PlainClient


def _field(section: OpenEnvSection, action_class: type[BaseModel] | None, where: str) -> str | None:
    """The action's field that a text fills; None: it needs none."""
    if section.answer != "text" or (section.action is not None and action_class is None):
        return None
    if action_class is None:
        return section.field
    fields = action_class.model_fields
    if section.field is not None:
        if section.field not in fields:
            raise RecipeError(f"{where}.field: {section.action} has no {section.field!r}. It has: {', '.join(fields)}.")
        return section.field
    required = [name for name, each in fields.items() if each.is_required()]
    if len(required) != 1:
        raise RecipeError(
            f"{where}.field: {section.action} has {len(required)} required fields. Name the one that an answer fills, "
            "or set `answer` to json or tool_call."
        )
    return required[0]


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise IllegalActionError(f"Illegal action. Answer with a JSON object ({error}).") from error
    if not isinstance(value, dict):
        raise IllegalActionError("Illegal action. Answer with a JSON object.")
    return value


def _number(reward: Any, spec: OpenEnvSpec) -> float:
    if reward is None:
        return 0.0
    if not isinstance(reward, bool | int | float):
        raise ServerFailedError(f"{spec.server} gave the reward {reward!r}, which is no number.")
    return float(reward)
