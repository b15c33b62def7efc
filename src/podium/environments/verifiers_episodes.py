# SPDX-License-Identifier: Apache-2.0
"""Environments of the package `verifiers`: each of its episodes is one session of the gateway.

Such an environment asks the model itself, so it is a kind of agent: its `reset` plays the whole episode."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from podium.data.tasks import Task
from podium.environments.agents import AgentCall
from podium.environments.field_packages import require_package
from podium.environments.protocol import Outcome
from podium.errors import RecipeError, exception_text
from podium.recipe.field_environments import VerifiersSection
from podium.recipe.on_policy import EnvironmentSection

# The package keeps a client for each address that its servers have seen. So an environment serves so many episodes, and
# then another takes its place.
_EPISODES_PER_SERVING = 256
_MODEL = "policy"
_TASK_COLUMN = "idx"
_KEY_NUMBERS = count()


class VerifiersHost:
    """The environment of a recipe in one process: its tasks, and what serves its episodes. For one event loop."""

    def __init__(self, section: EnvironmentSection, named: VerifiersSection, key: str) -> None:
        """Loads the environment. Starts no server and reads no task."""
        where = f"{key}.verifiers"
        require_package("verifiers", "verifiers", where)
        taskset = _module_name(named.taskset)
        try:
            self._config = _config(taskset, named.env, section)
        except Exception as error:  # its classes are the user's code
            raise RecipeError(
                f"{where}: {named.taskset} cannot be loaded with {key}.options: {exception_text(error)}"
            ) from error
        self.tasks = _Tasks(_loaded(self._config).taskset)
        self._serving: _Serving | None = None
        self._started = set[_Serving]()

    async def serving(self) -> _Serving:
        """The environment with its servers, for one more episode. It is started where there is none, or where the last
        one has served its episodes."""
        if self._serving is None or not self._serving.takes_more:
            self._serving = _Serving(_loaded(self._config), self._started)
        serving = self._serving
        serving.begin()
        try:
            await serving.started()
        except BaseException:
            serving.end()
            if self._serving is serving and serving.has_failed:
                self._serving = None  # the next episode tries again
            raise
        return serving

    async def close(self) -> None:
        """Ends all servers. No episode may run. A process that is ended needs no call of this."""
        self._serving = None
        await asyncio.gather(*(each.close() for each in list(self._started)))


class VerifiersAgent:
    """One episode of an environment of verifiers."""

    def __init__(self, host: VerifiersHost) -> None:
        self._host = host

    async def reset(self, call: AgentCall, /) -> Outcome:
        """Plays the episode of the row's task and returns its reward. Raises an error if the environment has failed."""
        task = self._host.tasks.of(call.task)
        serving = await self._host.serving()
        try:
            with _client_of(call) as client:
                return await _played(serving.environment, task, client)
        finally:
            serving.end()


async def _played(environment: Any, task: Any, client: Any) -> Outcome:
    from verifiers.v1 import ModelContext

    discarded: list[Any] = []
    context = ModelContext(model=_MODEL, client=client)
    episode = await environment.run_episode(task, context, on_discard=discarded.append)
    if not environment.complete(episode):
        raise RuntimeError(_failure(episode))
    if any(trace.num_turns for trace in discarded):
        raise RuntimeError(
            "an agent was run again after an error, and the answers of its first attempt are on record. Set `retries` "
            "of the environment's agents to 0."
        )
    return outcome_of(_trained(episode.traces, client))


def _trained(traces: Sequence[Any], client: Any) -> list[Any]:
    """Traces of the agents whose tokens are trained: those that asked the gateway."""
    asked = [trace for trace in traces if trace.agent.config.client == client]
    for trace in asked:
        if not trace.agent.trainable and trace.num_turns:
            raise RuntimeError(
                f"the agent {trace.agent.name!r} is not to be trained, and asks the model that is. Give it a `model` "
                "and a `client` of its own in environment.options."
            )
    found = [trace for trace in asked if trace.agent.trainable]
    if not found:
        raise RuntimeError("no agent of the environment asks the model that is trained.")
    return found


def outcome_of(traces: Sequence[Any]) -> Outcome:
    """Reward and metrics of an episode: means over its trained agents. A reward `NAME` is the metric `reward_NAME`,
    with its weight, so that these sum up to the episode's reward."""
    rewards = [{name: _value(name, reward) for name, reward in trace.rewards.items()} for trace in traces]
    metrics = [{name: float(value) for name, value in trace.metrics.items() if value is not None} for trace in traces]
    total = sum(sum(each.values()) for each in rewards) / len(traces)
    parts = {f"reward_{name}": sum(each.get(name, 0.0) for each in rewards) / len(traces) for name in _names(rewards)}
    return Outcome(reward=total, done=True, metrics={**_means(metrics), **parts})


def _value(name: str, reward: Any) -> float:
    if reward is None:
        raise RuntimeError(f"the reward {name!r} was not computed.")
    value = float(reward.value)
    if not math.isfinite(value):
        raise RuntimeError(f"the reward {name!r} is {value}, and not a finite number.")
    return value


def _names(numbers: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for each in numbers for name in each))


def _means(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name, over those that have it."""
    values = {name: [each[name] for each in numbers if name in each] for name in _names(numbers)}
    return {name: sum(each) / len(each) for name, each in values.items()}


def _failure(episode: Any) -> str:
    """Why an episode has failed."""
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if not errors:
        return "the environment did not finish the episode."
    return f"{errors[-1].type}: {errors[-1].message}"


class _Tasks:
    """The tasks of a taskset by their position. They are read as far as they are asked for."""

    def __init__(self, taskset: Any) -> None:
        self._coming: Iterator[Any] | None = None
        self._taskset, self._read = taskset, list[Any]()

    def of(self, task: Task) -> Any:
        """The task that a row names."""
        index = task.row.get(_TASK_COLUMN)
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ValueError(
                f"{task.place}: the row needs a column {_TASK_COLUMN!r}, the task's position in the taskset from 0; it "
                f"has {index!r}"
            )
        if self._coming is None:
            self._coming = iter(self._taskset)
        while len(self._read) <= index:
            try:
                self._read.append(next(self._coming))
            except StopIteration:
                size = len(self._read)
                raise ValueError(f"{task.place}: {_TASK_COLUMN} {index}: the taskset has {size} tasks") from None
        return self._read[index]


class _Serving:
    """An environment whose servers run, in a task of their own: what the package enters it also leaves there."""

    def __init__(self, environment: Any, started: set[_Serving]) -> None:
        """`started`: has it as long as its servers run."""
        self.environment = environment
        started.add(self)
        self._num_begun = self._num_running = 0
        self._idle = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._serve())
        self._task.add_done_callback(lambda _: started.discard(self))

    @property
    def takes_more(self) -> bool:
        """Whether another episode may begin."""
        return self._num_begun < _EPISODES_PER_SERVING and not self._task.done()

    @property
    def has_failed(self) -> bool:
        """Whether its servers did not start."""
        return self._ready.done() and not self._ready.cancelled() and self._ready.exception() is not None

    async def started(self) -> None:
        """Waits until its servers run."""
        await asyncio.shield(self._ready)

    def begin(self) -> None:
        """Counts an episode that begins."""
        self._num_begun += 1
        self._num_running += 1

    def end(self) -> None:
        """Counts an episode that is over. The last one ends the servers of an environment that takes no more."""
        self._num_running -= 1
        if not self._num_running and not self.takes_more:
            self._idle.set()

    async def close(self) -> None:
        """Ends its servers."""
        self._idle.set()
        await self._task

    async def _serve(self) -> None:
        try:
            async with self.environment.serving():
                self._ready.set_result(None)
                await self._idle.wait()
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)
                self._ready.exception()  # retrieved, also if every episode has left


@contextmanager
def _client_of(call: AgentCall) -> Iterator[Any]:
    """The package's client for one session. It reads keys from variables of the process only; programs of the
    environment do not inherit those that have API_KEY in their names."""
    from verifiers.v1 import EvalClientConfig

    variable = f"PODIUM_SESSION_API_KEY_{next(_KEY_NUMBERS)}"
    os.environ[variable] = call.key
    try:
        yield EvalClientConfig(base_url=call.base_url, api_key_var=variable)
    finally:
        del os.environ[variable]


def _module_name(taskset: str) -> str:
    """What the package imports. The folder of a file becomes importable, also for the tool servers that it starts."""
    if not taskset.endswith(".py"):
        return taskset
    file = Path(taskset).resolve()
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    return file.stem


def _config(taskset: str, env: str | None, section: EnvironmentSection) -> Any:
    """The environment's config. Agents that have no limit of turns have the recipe's."""
    from verifiers.v1 import AgentConfig, resolve_env_config

    options = dict(section.options)
    own = options.get("taskset") or {}
    if not isinstance(own, Mapping):
        raise TypeError("taskset: expected keys and values")
    values = {**options, "taskset": {**own, "id": taskset}, **({} if env is None else {"id": env})}
    config = resolve_env_config(values)
    agents = {name: value for name, value in config if isinstance(value, AgentConfig) and value.max_turns is None}
    limited = {name: each.model_copy(update={"max_turns": section.max_turns}) for name, each in agents.items()}
    return config.model_copy(update=limited)


def _loaded(config: Any) -> Any:
    from verifiers.v1 import load_environment

    return load_environment(config)
