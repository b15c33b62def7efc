# SPDX-License-Identifier: Apache-2.0
"""Where a process with user code was when a call in it was given up: its stacks go to a file of the run, and the
failure names the file."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import io
import tempfile
from pathlib import Path
from typing import Any

from podium.environments.activity import driven_in
from podium.stack_dumps import append_stacks

# Code that hangs in one episode often hangs in others, at the same place.
_MOST_DUMPS = 4
_STACKS = "stacks: "


class GivenUpCalls:
    """Those of this process. There is no file until the process is given one."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._num_left = _MOST_DUMPS

    def write_to(self, file: Path | None) -> None:
        """From now on, stacks are appended to this file, if there is one."""
        self._file = file

    def note(self, failure: str, running: asyncio.Future[Any] | None = None) -> str | None:
        """Writes the stacks of all threads, and that of the task which was given up, if it was one. Returns where they
        are, for the failure's message; None if the file cannot be written, or has grown large."""
        if self._file is None:
            return None
        if self._num_left:
            self._num_left -= 1
            if not append_stacks(self._file, f"a call {failure}, and its process was here:", _stacks(running)):
                return None
        return stacks_in(self._file)

    def noted(self, failure: str) -> str:
        """The failure of a call, with the place of the stacks. Not for texts that a model reads."""
        return joined(failure, self.note(failure))


def stacks_in(file: Path) -> str:
    """What a failure says about its stacks."""
    return f"{_STACKS}{file}"


def joined(failure: str, *notes: str | None) -> str:
    """A failure with what is known about it."""
    return "; ".join([failure, *(each for each in notes if each is not None)])


def notes_of(error: BaseException) -> list[str]:
    """Where the stacks of a call are that was given up with this error."""
    return [each for each in getattr(error, "__notes__", ()) if each.startswith(_STACKS)]


def _stacks(running: asyncio.Future[Any] | None) -> str:
    with tempfile.TemporaryFile() as file:  # it is written without Python
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read().decode(errors="replace")
    return threads if running is None else f"{threads}\n{_awaiting(running)}"


def _awaiting(running: asyncio.Future[Any]) -> str:
    """Where a task waits: its coroutine, what that awaits, and so on. Innermost first, as threads are shown."""
    awaited: Any = running.get_coro() if isinstance(running, asyncio.Task) else None
    frames = []
    while awaited is not None:
        frame = awaited.cr_frame if inspect.iscoroutine(awaited) else getattr(awaited, "gi_frame", None)
        if frame is None:
            break
        frames.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        awaited = awaited.cr_await if inspect.iscoroutine(awaited) else driven_in(frame) or awaited.gi_yieldfrom
    text = io.StringIO()
    print("The task that was given up (most recent call first):", *reversed(frames), sep="\n", file=text)
    return text.getvalue()


GIVEN_UP = GivenUpCalls()
