# SPDX-License-Identifier: Apache-2.0
"""Agents: code that plays a whole episode with a client of its own, as a function or as a command.

An agent is the `reset` of an environment that is never stepped: processes, deadlines and crashes are treated as those
of any other environment."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from podium.data.tasks import Task
from podium.environments.protocol import Outcome, is_async
from podium.errors import type_phrase
from podium.recipe import plugins
from podium.recipe.on_policy import EnvironmentSection

# Of what a command prints: the end is kept, which has its result or its last error.
_KEPT_BYTES = 64 << 10
_SHOWN_LETTERS = 500
_KILLED_S = 5.0
_POLL_S = 0.2  # between two looks at a command whose output is open


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentCall:
    """What an agent is called with. `session_url` has no `/v1`, which clients of Anthropic's API add themselves."""

    task: Task
    session_url: str
    key: str

    @property
    def base_url(self) -> str:
        """For clients of OpenAI's API."""
        return f"{self.session_url}/v1"


TurnRewardsById = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentOutcome(Outcome):
    """The reward of an agent's episode. `turn_rewards` are added to it, and belong to single answers of the model: a
    number for each answered request in order, or for each choice of the responses with these ids."""

    turn_rewards: tuple[float, ...] | TurnRewardsById = field(default_factory=tuple)


def agent_maker(section: EnvironmentSection, key: str) -> Callable[[], Any]:
    """The factory of a recipe's agent, one for each episode."""
    if section.agent is None:
        return partial(CommandAgent, section.agent_command)
    function = plugins.load(section.agent, f"{key}.agent")
    return partial(CoroutineAgent if is_async(function) else ThreadAgent, function)


class CoroutineAgent:
    """An agent that shares the event loop with all other episodes."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function

    async def reset(self, call: AgentCall, /) -> Outcome | None:
        """Plays the episode. Returns its reward, if the agent gives one."""
        return reward_of(await self._function(call.task, call.base_url, call.key))


class ThreadAgent:
    """An agent that has a thread for its episode."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def reset(self, call: AgentCall, /) -> Outcome | Awaitable[Outcome | None] | None:
        """Plays the episode. Returns its reward, if the agent gives one."""
        result = self._function(call.task, call.base_url, call.key)
        return _awaited(result) if inspect.isawaitable(result) else reward_of(result)


async def _awaited(result: Awaitable[Any]) -> Outcome | None:
    return reward_of(await result)


def reward_of(result: Any) -> Outcome | None:
    """What an agent returned: a number, None, or {"reward": NUMBER, "turn_rewards": [NUMBER, ...]}."""
    if result is None:
        return None
    if not isinstance(result, Mapping):
        return Outcome(reward=_number(result, "an agent returns a number or None"), done=True)
    for name in result:
        if name not in ("reward", "turn_rewards"):
            raise TypeError(f"an agent returns `reward` and `turn_rewards`, and no {str(name)[:60]!r}")
    reward, turn_rewards = result.get("reward"), result.get("turn_rewards")
    if turn_rewards is None:
        return reward_of(reward)
    whole = 0.0 if reward is None else _number(reward, "the `reward` of an agent is a number")
    return AgentOutcome(reward=whole, done=True, turn_rewards=_turn_rewards(turn_rewards))


def _turn_rewards(given: Any) -> tuple[float, ...] | TurnRewardsById:
    what = "`turn_rewards` has a number for each answered request, or for ids of responses"
    if isinstance(given, Mapping):
        return {
            str(id): tuple(_number(each, what) for each in (value if isinstance(value, list | tuple) else [value]))
            for id, value in given.items()
        }
    if not isinstance(given, list | tuple):
        raise TypeError(f"{what}, and is not {type_phrase(given)}")
    return tuple(_number(each, what) for each in given)


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}, not {type_phrase(value)}") from error
    if isinstance(value, str) or not math.isfinite(number):
        raise TypeError(f"{what} and finite, not {value!r:.80}")
    return number


class CommandAgent:
    """An agent that is a program. Its last line of output is the reward, as a number or as an object with `reward`,
    `turn_rewards` or both; any other output is none."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    async def reset(self, call: AgentCall, /) -> Outcome | None:
        """Runs the program. It ends, with all that it has started, when this is cancelled."""
        with tempfile.TemporaryDirectory(prefix="podium-agent-") as folder:
            file = os.path.join(folder, "task.json")
            text = task_text(call.task)
            with open(file, "w", encoding="utf-8") as out:
                out.write(text)
            arguments = [each.replace("{task_file}", file).replace("{task}", text) for each in self._command]
            code, output, errors = await _run(arguments, _variables(call))
        if code != 0:
            said = (errors.strip() or output.strip())[-_SHOWN_LETTERS:]
            raise RuntimeError(f"the command ended with exit code {code}{f': {said}' if said else ''}")
        return reward_of(printed_reward(output))


def task_text(task: Task) -> str:
    """A task as JSON: `messages` or `text` is the prompt, `row` has all columns."""
    values = {"messages": task.messages, "text": task.text, "tools": task.tools, "row": dict(task.row)}
    return json.dumps(values, ensure_ascii=False, default=str)


def printed_reward(output: str) -> float | dict[str, Any] | None:
    """The reward in the last line of a command's output, if it is one."""
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        if value.get("turn_rewards") is not None:
            return {name: value.get(name) for name in ("reward", "turn_rewards")}
        value = value.get("reward")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _variables(call: AgentCall) -> dict[str, str]:
    return {
        **os.environ,
        **without_proxy(),
        "OPENAI_BASE_URL": call.base_url,
        "OPENAI_API_KEY": call.key,
        "ANTHROPIC_BASE_URL": call.session_url,
        "ANTHROPIC_API_KEY": call.key,
    }


def without_proxy() -> dict[str, str]:
    """Variables with which clients do not send to a cluster's proxy what is for the gateway on this machine."""
    names = ("NO_PROXY", "no_proxy")
    return {name: ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))) for name in names}


async def _run(arguments: Sequence[str], variables: dict[str, str]) -> tuple[int, str, str]:
    """Exit code and the ends of both outputs. The program has a session of its own, so that all of it can be ended."""
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env=variables, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        hint = " Give long tasks as {task_file}." if error.errno == 7 else ""
        raise RuntimeError(f"the command cannot be started: {error}.{hint}") from error
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = _Tail(process.stdout), _Tail(process.stderr)
    reading = [asyncio.ensure_future(each.read()) for each in (output, errors)]
    try:
        # A program that it leaves behind may hold the pipes open: the end of the command counts.
        while process.returncode is None and not all(each.done() for each in reading):
            await asyncio.wait(reading, timeout=_POLL_S)
        code = process.returncode if process.returncode is not None else await process.wait()
        _kill_session(process.pid)
        await asyncio.wait(reading, timeout=_KILLED_S)
        return code, output.text, errors.text
    finally:
        _kill_session(process.pid)
        for each in reading:
            each.cancel()
        with contextlib.suppress(TimeoutError):  # it has been killed: its pipes are closed before this returns
            await asyncio.wait_for(process.wait(), _KILLED_S)


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


class _Tail:
    """The end of an output, as far as it was read."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream, self._kept = stream, b""

    async def read(self) -> None:
        """Until the output is closed."""
        while part := await self._stream.read(_KEPT_BYTES):
            self._kept = (self._kept + part)[-_KEPT_BYTES:]

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")
