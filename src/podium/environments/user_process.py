# SPDX-License-Identifier: Apache-2.0
"""A process that runs user code for a worker. It can be killed at any time, and reports which code was running.

User code may block the event loop, hold the GIL, take all memory, or end its process. The process itself survives none
of these. So the worker calls it from outside, under a deadline, and replaces it. Supervisors between the two end every
process that user code has started (see supervisor.py)."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.environments.activity import Activity
from podium.environments.frames import FrameProtocol, Kind
from podium.environments.given_up import joined, stacks_in
from podium.environments.output_cap import OutputCap
from podium.environments.protocol import CallFailedError
from podium.environments.supervisor import descendants
from podium.environments.user_main import EXIT_CLOSED, USER_CODE
from podium.errors import PodiumError, RecipeError, RolloutError
from podium.stack_dumps import append_stacks, dumped_stacks, dumper_name

_START_S = 120.0  # for the interpreter and for importing the user's modules
_EXIT_S = 2.0
# Time beyond a call's limit in which the process may show no progress: a busy machine is not the user's fault.
_GRACE_S = 1.0
_LOOK_S = 0.25
# The supervisors are forked by a file that is no part of a package yet: importing one of podium's imports them all.
_SUPERVISOR = os.path.join(os.path.dirname(__file__), "supervisor.py")
_MAIN = """
import importlib.util, json, sys
options = json.loads(sys.argv.pop())
spec = importlib.util.spec_from_file_location("supervisor", options["supervisor"])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.supervise(**options["supervise"])
sys.path[:] = options["path"]
from podium.environments.user_main import main
main(**options["main"])
"""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The most memory of a process with user code and of all that it starts, together: key of the recipe, and value.
    None: there is no limit."""

    key: str
    gib: float | None

    @property
    def num_bytes(self) -> int | None:
        """The limit in bytes. Raises an error where memory cannot be measured."""
        if self.gib is not None and not os.path.exists("/proc/self/smaps_rollup"):
            raise RecipeError(
                f"{self.key}: the memory of processes can only be measured on Linux (/proc/PID/smaps_rollup is missing "
                "here). Remove the key."
            )
        return None if self.gib is None else int(self.gib * 2**30)

    def exceeded(self, num_bytes: int) -> str:
        """What user code did that had so many bytes."""
        return (
            f"used more memory than {self.key} allows: its process and those that it started had "
            f"{num_bytes / 2**30:.3f} GiB, the limit is {self.gib:g} GiB"
        )


class ProcessLostError(Exception):
    """The process is gone, with every call in it. `suspects` are the slots whose code may have caused it."""

    def __init__(self, cause: str, suspects: dict[int, int]) -> None:
        super().__init__(cause)
        self.cause, self.suspects = cause, suspects


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    slot: int
    answer: asyncio.Future[Any]
    on_partial: Callable[[Any], None] | None


class UserProcess:
    """One child process and the calls that are open in it. All methods but the constructor are for one event loop."""

    def __init__(
        self, service: type[Any], arguments: tuple[Any, ...], *, num_slots: int, limit_s: float, memory: MemoryLimit,
        output: OutputCap, stacks: Path | None = None,
    ) -> None:  # fmt: skip
        """Starts the process without waiting for it. `limit_s`: the longest time that user code may block the process's
        event loop or interpreter. `stacks`: the file for the stacks of a process that is blocked, and of calls that are
        given up in it."""
        self._stacks = stacks
        self._order, self._memory = (service, arguments), memory
        self._limit_s = limit_s + _GRACE_S
        with tempfile.TemporaryFile() as file:
            file.truncate(Activity.num_bytes(num_slots))
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._popen = _popen(theirs.fileno(), file.fileno(), num_slots, memory.num_bytes, stacks)
            self._activity = Activity(file.fileno(), num_slots)
        output.forward(self._popen)
        self._finalizer = weakref.finalize(self, _kill, self._popen)
        self._frames: FrameProtocol | None = None
        self._calls: dict[int, _Call] = {}
        self._next_number = 0
        self._looking: asyncio.TimerHandle | None = None
        self._cause = ""  # why it was killed
        self._suspects: dict[int, int] = {}
        self.lost: ProcessLostError | None = None
        self._ready: asyncio.Future[Any] | None = None

    @property
    def pid(self) -> int:
        """Process id of its outer supervisor, which ends with it."""
        return self._popen.pid

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or is about to."""
        return self.lost is not None or bool(self._cause) or self._popen.poll() is not None

    async def ready(self) -> Any:
        """The service's description of itself, once it has started. Raises the user's error, or a RolloutError."""
        if self._ready is None:
            self._ready = asyncio.ensure_future(self._started())
        return await asyncio.shield(self._ready)

    async def _started(self) -> Any:
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        _, self._frames = await loop.create_connection(
            lambda: FrameProtocol(self._on_frame, self._on_end), sock=self._socket
        )
        answer = self._send(self._order, 0, None)
        try:
            async with asyncio.timeout(_START_S):
                return await answer
        except TimeoutError:
            self.kill("it did not start")
            raise RolloutError(
                f"a process for the recipe's own code did not start in {_START_S:g} s. Look at what its modules do "
                "when they are imported."
            ) from None
        except CallFailedError as error:
            self.kill("it did not start")
            raise RolloutError(f"the recipe's own code cannot be loaded: {error}") from None
        except ProcessLostError as lost:
            raise RolloutError(
                f"a process for the recipe's own code was lost while it started: it {lost.cause}. Look at what its "
                "modules do when they are imported."
            ) from None

    async def call(self, order: Any, *, slot: int = 0, on_partial: Callable[[Any], None] | None = None) -> Any:
        """Returns the service's answer. Waits for user code, whose deadlines the service enforces. When the process
        shows no progress, because user code blocks it, the process is killed, and this raises ProcessLostError."""
        if self.lost is not None:
            raise self.lost
        if self._looking is None:
            self._look_later(self._activity.progress, time.monotonic())
        return await self._send(order, slot, on_partial)

    def post(self, order: Any, *, slot: int = 0) -> None:
        """Sends a call without waiting for its answer."""
        if self.lost is None and self._frames is not None:
            self._send(order, slot, None)

    def kill(self, cause: str) -> None:
        """Ends the process and its children; open calls raise ProcessLostError."""
        if not self._cause:
            self._cause = cause
            self._finalizer()
            if self._frames is not None:
                self._frames.abort()

    def _send(self, order: Any, slot: int, on_partial: Callable[[Any], None] | None) -> asyncio.Future[Any]:
        number = self._next_number
        self._next_number += 1
        call = _Call(slot, asyncio.get_running_loop().create_future(), on_partial)
        call.answer.add_done_callback(_heard)  # the caller may have been cancelled
        payload = pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
        self._calls[number] = call
        if self._frames is not None:  # else its end is known, and the call is about to be lost
            self._frames.send(number, "call", payload)
        return call.answer

    def _on_frame(self, number: int, kind: Kind, payload: bytes) -> None:
        call = self._calls[number] if kind == "partial" else self._calls.pop(number)
        try:
            value = pickle.loads(payload)
        except Exception as error:  # of a class that only the user's modules have
            kind, value = "error", f"it returned something that cannot be read outside of its process ({error})"
            self._calls.pop(number, None)
        if kind == "partial":
            assert call.on_partial is not None
            call.on_partial(value)
        elif call.answer.done():  # the caller has stopped waiting
            return
        elif kind == "error":
            call.answer.set_exception(value if isinstance(value, PodiumError) else CallFailedError(value))
        else:
            call.answer.set_result(value)

    def _on_end(self) -> None:
        """The connection is closed: by `kill`, or by the end of the process."""
        self._frames = None
        open_slots = {call.slot for call in self._calls.values()}
        # If no code was certainly running, any open call may have caused it, for instance by its own thread.
        self._suspects = dict(self._activity.running) or dict.fromkeys(open_slots, 0)
        if self._cause:
            self._lose(self._cause)
        else:
            self._ending = asyncio.ensure_future(self._ended())

    async def _ended(self) -> None:
        """Waits briefly for the exit code, which comes after the end of the connection."""
        deadline = time.monotonic() + _EXIT_S
        while self._popen.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self.kill(self._why_ended())
        self._lose(self._cause)

    def _why_ended(self) -> str:
        if over_bytes := self._activity.over_bytes:
            return self._memory.exceeded(over_bytes)
        code = self._popen.returncode
        if code is None:
            return "closed the connection of its process"
        if code == -signal.SIGKILL:
            return f"ended its process (SIGKILL; the system sends it too when memory runs out, see {self._memory.key})"
        if code == EXIT_CLOSED:
            return "closed file descriptors of its process that are not its own"
        return _exit(code)

    def _lose(self, cause: str) -> None:
        self.lost = ProcessLostError(cause, self._suspects)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.answer.done():
                call.answer.set_exception(self.lost)

    def _look(self, seen: tuple[int, int], since: float) -> None:
        """Checks for progress at intervals while calls are open; kills the process when there is none for too long."""
        self._looking = None
        if not self._calls or self.lost is not None:
            return
        now = self._activity.progress
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > self._limit_s:
            self._ending = asyncio.ensure_future(self._end_blocked())
            return
        self._look_later(seen, since)

    async def _end_blocked(self) -> None:
        """Kills a process that user code blocks, after it has shown where."""
        cause, file = f"blocked its process for longer than {self._limit_s - _GRACE_S:g} s", self._stacks
        if file is not None:
            dump = await asyncio.get_running_loop().run_in_executor(None, self._dumped)
            if dump is not None and append_stacks(file, f"user code {cause}, and was here:", dump):
                cause = joined(cause, stacks_in(file))
        self.kill(cause)

    def _dumped(self) -> str | None:
        """The stacks of the process. Blocks for up to a second."""
        # User code may have forked others, which are below it.
        found = (pid for pid in descendants(self._popen.pid) if dumper_name(pid) == USER_CODE)
        pid = next(found, None)
        return None if pid is None else dumped_stacks(pid)

    def _look_later(self, seen: tuple[int, int], since: float) -> None:
        after_s = min(_LOOK_S, self._limit_s / 4)
        self._looking = asyncio.get_running_loop().call_later(after_s, self._look, seen, since)


def _heard(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()


def _popen(
    connection: int, file: int, num_slots: int, memory_bytes: int | None, stacks: Path | None
) -> subprocess.Popen[bytes]:
    """Starts the outer supervisor in a separate session: the controller handles Ctrl-C, and user code has no
    terminal."""
    options = {
        "supervisor": _SUPERVISOR,
        "supervise": {
            "worker": os.getpid(), "close": [connection], "memory_bytes": memory_bytes, "file": file,
            "over_at": Activity.OVER_AT,
        },
        "path": [entry or os.getcwd() for entry in sys.path],
        "main": {
            "connection": connection, "file": file, "num_slots": num_slots,
            "stacks": None if stacks is None else str(stacks),
        },
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, json.dumps(options)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(connection, file),
        start_new_session=True,
        # The order of sets of strings is the same in every process, and so in every attempt at an episode.
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )  # fmt: skip


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Asks the outer supervisor, which kills: user code has no say in it, whatever signals it ignores or blocks."""
    process.terminate()


def _exit(code: int) -> str:
    if code >= 0:
        return f"ended its process (exit code {code})"
    try:
        return f"ended its process ({signal.Signals(-code).name})"
    except ValueError:
        return f"ended its process (signal {-code})"
