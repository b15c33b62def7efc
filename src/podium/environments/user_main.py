# SPDX-License-Identifier: Apache-2.0
"""The main program of a process that runs user code: it answers its worker's calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from podium.environments.activity import Activity
from podium.environments.frames import FrameProtocol, Kind
from podium.environments.given_up import GIVEN_UP
from podium.errors import PodiumError
from podium.stack_dumps import allow_dumps

_BEAT_S = 0.05
USER_CODE = "user code"
"""How these processes are known when their stacks are asked for."""
EXIT_CLOSED = 249
"""Exit code of a process whose descriptors user code has closed."""


class Service(Protocol):
    """The work of the process: created by the first call, then called."""

    def describe(self) -> Any:
        """The answer to the first call."""
        ...

    async def answer(self, order: Any, tell: Callable[[Any], None]) -> Any:
        """The answer to one call; `tell` sends partial results before it."""
        ...


def main(connection: int, file: int, num_slots: int, stacks: str | None) -> None:
    """Serves until the worker closes the connection. Arguments: the descriptors of the socket and of the activity file,
    and its slots; the file for stacks of calls that are given up, if there is one."""
    allow_dumps(USER_CODE)
    GIVEN_UP.write_to(None if stacks is None else Path(stacks))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    activity = Activity(file, num_slots, on_leave=_Restorer(connection))
    os.close(file)
    asyncio.run(_serve(socket.socket(fileno=connection), activity))
    os._exit(0)  # threads of user code may hang: they are not joined


class _Restorer:
    """Called whenever user code returns, before its mark is taken away, to undo what would affect other code.

    A copy of the process, which user code has forked and not ended, ends here: it must not go on with the work of this
    process. Output that is closed is opened again, because the next function may print. A process whose own descriptors
    are closed (os.closerange, as daemons do) cannot go on, and ends while it is known whose code that was."""

    def __init__(self, connection: int) -> None:
        self._pid = os.getpid()
        self._outputs = [(1, os.dup(1), ("stdout", "__stdout__")), (2, os.dup(2), ("stderr", "__stderr__"))]
        self._own = [(number, _file_of(number)) for number in (connection, *(copy for _, copy, _ in self._outputs))]

    def __call__(self) -> None:
        if os.getpid() != self._pid:
            os._exit(0)
        if any(_file_of(number) != file for number, file in self._own):
            os._exit(EXIT_CLOSED)
        for number, copy, names in self._outputs:
            if _file_of(number) is None:
                os.dup2(copy, number)
            for name in names:
                if getattr(getattr(sys, name), "closed", True):
                    stream = open(number, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
                    setattr(sys, name, stream)


def _file_of(number: int) -> tuple[int, int] | None:
    """Which file a descriptor refers to; None if it is closed."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


async def _serve(connection: socket.socket, activity: Activity) -> None:
    """Answers until the parent closes the connection, and sends beats. A parent that sees no beat knows that user code
    blocks the event loop or the interpreter."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def beat() -> None:
        activity.beat()
        loop.call_later(_BEAT_S, beat)

    beat()
    server = _Server(activity, loop)
    _, server.frames = await loop.create_connection(lambda: FrameProtocol(server.on_frame, ended.set), sock=connection)
    await ended.wait()


class _Server:
    def __init__(self, activity: Activity, loop: asyncio.AbstractEventLoop) -> None:
        self._activity, self._loop = activity, loop
        self._service: Service | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.frames: FrameProtocol | None = None

    def on_frame(self, number: int, kind: Kind, payload: bytes) -> None:
        task = self._loop.create_task(self._answer(number, payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, payload: bytes) -> None:
        frames = self.frames
        assert frames is not None
        try:
            order = pickle.loads(payload)
            if self._service is None:
                kind, arguments = order
                self._service = kind(self._activity, *arguments)
                value = self._service.describe()
            else:
                value = await self._service.answer(order, lambda part: frames.send(number, "partial", _packed(part)))
            frames.send(number, "value", _packed(value))
        except (SystemExit, KeyboardInterrupt):  # of a module that is imported: the process ends
            raise
        except BaseException as error:  # also what is no Exception: the worker waits for an answer
            frames.send(number, "error", pickle.dumps(_portable(error)))


def _packed(value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"a value cannot be sent to another process: {type(error).__name__}: {error}") from error


def _portable(error: BaseException) -> PodiumError | str:
    """Podium's own errors as they are, others as text: the parent may not have the user's classes."""
    if isinstance(error, PodiumError):
        with contextlib.suppress(Exception):
            copy = pickle.loads(pickle.dumps(error))
            assert isinstance(copy, PodiumError)
            return copy
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its __str__ is user code
        return type(error).__name__
