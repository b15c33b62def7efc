# SPDX-License-Identifier: Apache-2.0
"""The protocol of environments: reset begins an episode, step answers each turn of the model."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

from podium.data.kinds import Message
from podium.data.masks import Tools
from podium.data.tasks import Task
from podium.environments.activity import MARK, Mark
from podium.environments.chat_format import Call
from podium.environments.given_up import GIVEN_UP


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """The beginning of an episode: a chat (a string is a user message), raw text to continue, or, without both, the
    task's own prompt.

    `tools` are JSON schemas that the chat template shows to the model; None: the task's own tools."""

    messages: Sequence[Message] | str | None = None
    text: str | None = None
    tools: Tools = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One answer of the model.

    `text` is the answer without special tokens, as rewards see it (`answer`). `calls` are its tool calls in order,
    including those marked by special tokens and those that cannot be parsed. `finish` is "length" if a token limit cut
    the answer off."""

    number: int  # from 0
    text: str
    calls: tuple[Call, ...] = ()
    finish: Literal["stop", "length"] = "stop"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The result of a turn.

    `messages` continue the conversation: a list of {role, content}, or a string. A string becomes a user message in a
    chat and is appended verbatim to raw text. `reward` belongs to this turn; an episode's is the sum. With `done`
    nothing more is generated (messages are then only recorded). `metrics` are numbers, summed over the turns.
    `warnings` are for the person who runs it: the console shows each once, and the model never sees them."""

    messages: Sequence[Message] | str = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    warnings: Sequence[str] = ()


class Environment(Protocol):
    """The environment of one episode: an instance is created for every episode and not used again.

    Methods may be coroutines, which run in the event loop with all other episodes and must not block it, or plain
    functions, which run in a thread. Both have a deadline (recipe: environment.timeout_s). An exception ends this
    episode with finish "error" and no other. `close()`, if there is one, is always called at the end.

    In a run, environments run in separate processes: see hosted_episodes.py.

    An environment whose `step` may take longer, because it bounds several calls itself, sets an attribute
    `step_timeout_s`."""

    def reset(self, task: Task, /) -> Observation | Awaitable[Observation | None] | None:
        """Called once, before the model's first answer. None means Observation()."""
        ...

    def step(self, turn: Turn, /) -> Outcome | Awaitable[Outcome]:
        """Called with every answer of the model, including the last one that the limits allow."""
        ...


class BoundedEnvironment:
    """Base of environments whose methods are coroutines that enforce their own deadlines. `places`: file and line of
    the methods of the user's environment that they call."""

    places: Mapping[str, str] = MappingProxyType({})


class CallFailedError(Exception):
    """User code failed in another process, which continues. The text gives the reason."""


class EpisodeLostError(Exception):
    """The episode's process is gone, and another episode caused it. `again` creates an environment that runs the same
    episode from its beginning."""

    def __init__(self, cause: str, again: Callable[[], Environment]) -> None:
        super().__init__(cause)
        self.again = again


class SingleTurn:
    """The task's own prompt and one answer; its reward comes from the recipe's reward functions."""

    async def reset(self, task: Task, /) -> Observation:
        """Leaves the task's own prompt as it is."""
        return Observation()

    async def step(self, turn: Turn, /) -> Outcome:
        """Ends the episode after the first answer."""
        return Outcome(done=True)


async def call_within(timeout_s: float | None, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Calls user code: a coroutine function here, any other in a separate thread. TimeoutError after the deadline.

    Code that outlives its deadline is cancelled and abandoned, because waiting for it could take any time. A thread
    cannot be stopped at all (it is a daemon, so that the process can end)."""
    running = asyncio.ensure_future(_called(functools.partial(function, *arguments, **named)))
    try:
        done, _ = await asyncio.wait({running}, timeout=timeout_s)
    except asyncio.CancelledError:
        running.cancel()
        raise
    if not done:
        error = TimeoutError(f"took longer than {timeout_s:g} s and was given up")
        if (note := GIVEN_UP.note(str(error), running)) is not None:
            error.add_note(note)  # apart from the text: a model may read that
        running.cancel()
        running.add_done_callback(_forget)
        OVERDUE.append(running)
        raise error
    if running.cancelled():
        raise RuntimeError("cancelled itself")
    return running.result()


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine; also for callable objects and partial functions."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Overdue:
    """Calls of this process that outlived their deadline and still run: threads, and tasks that ignore a
    cancellation."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Future[Any]] = []
        self._threads: list[threading.Thread] = []

    def append(self, each: asyncio.Future[Any] | threading.Thread) -> None:
        """Adds a call that outlived its deadline."""
        self._threads.append(each) if isinstance(each, threading.Thread) else self._tasks.append(each)

    @property
    def count(self) -> int:
        """How many of them still run."""
        self._tasks = [task for task in self._tasks if not task.done()]
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return len(self._tasks) + len(self._threads)


OVERDUE = Overdue()


async def _called(function: Callable[[], Any]) -> Any:
    mark = MARK.get()
    try:
        result = function() if is_async(function) else await _in_thread(function, mark)
        if not inspect.isawaitable(result):
            return result
        return await (result if mark is None else mark.driven(result))
    except SystemExit as error:  # would end the event loop, and every other episode with it
        raise RuntimeError(f"called exit({error.code!r})") from error
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # KeyboardInterrupt too would end the event loop
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _in_thread(function: Callable[[], Any], mark: Mark | None) -> Any:
    """Uses a new thread, not the loop's executor: a call that never returns would occupy one of its few threads
    forever, and keep the process alive."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((value, error))

    def work() -> None:
        value, raised = None, None
        try:
            with contextlib.nullcontext() if mark is None else mark:
                value = function()
        except BaseException as error:  # to be raised in the waiting caller
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, value, raised)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="environment", daemon=True)
    thread.start()
    try:
        value, raised = await outcome
    except asyncio.CancelledError:
        OVERDUE.append(thread)
        raise
    if raised is None:
        return value
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        raise raised
    # A coroutine cannot raise these as what they are: they would end it, or the loop.
    raise RuntimeError(f"{type(raised).__name__}: {raised}") from raised


def _forget(running: asyncio.Future[Any]) -> None:
    if not running.cancelled():
        running.exception()
