# SPDX-License-Identifier: Apache-2.0
"""The main program of a process that runs user code: it answers its parent's calls, and ends with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Protocol

from podium.environments.activity import Activity
from podium.environments.frames import FrameProtocol, Kind
from podium.errors import PodiumError

_BEAT_S = 0.05
_PR_SET_PDEATHSIG = 1


class Service(Protocol):
    """The work of the process: created by the first call, then called."""

    def describe(self) -> Any:
        """The answer to the first call."""
        ...

    async def answer(self, order: Any, tell: Callable[[Any], None]) -> Any:
        """The answer to one call; `tell` sends partial results before it."""
        ...


def main() -> None:
    """Arguments: the parent's process id, the descriptors of the socket and of the activity file, and its slots."""
    parent, connection, file, num_slots = json.loads(sys.argv[1])
    _end_with(parent)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    activity = Activity(file, num_slots)
    os.close(file)
    asyncio.run(_serve(socket.socket(fileno=connection), activity))
    os._exit(0)  # threads of user code may hang: they are not joined


def _end_with(parent: int) -> None:
    """The kernel ends this process when its parent dies, even while user code blocks it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


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
        except Exception as error:
            frames.send(number, "error", pickle.dumps(_portable(error)))


def _packed(value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"a value cannot be sent to another process: {type(error).__name__}: {error}") from error


def _portable(error: Exception) -> PodiumError | str:
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
