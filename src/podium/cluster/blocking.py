# SPDX-License-Identifier: Apache-2.0
"""Runs calls that may block for long in threads beside the event loop, and event loops from code that blocks. Nothing
has to join the threads of calls."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from podium.cluster.virtual_time import VirtualLoop

Result = TypeVar("Result")
P = ParamSpec("P")

_JOIN_S = 0.2  # how long a signal may wait for its handler
_running: set[threading.Thread] = set()


async def in_thread(call: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Awaits a call in a new thread. When the awaiting task is cancelled, the thread is abandoned. The threads of
    asyncio.to_thread are joined at the end of the loop instead, however long they hang. On a virtual clock the call is
    made at once: a thread would take real time."""
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        return call(*args, **kwargs)
    promise: Future[Result] = Future()

    def run() -> None:
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            with suppress(InvalidStateError):
                promise.set_exception(error)
        else:
            with suppress(InvalidStateError):
                promise.set_result(result)
        finally:
            _running.discard(threading.current_thread())

    thread = threading.Thread(target=run, name=f"podium {getattr(call, '__name__', 'call')}", daemon=True)
    _running.add(thread)
    thread.start()
    return await asyncio.wrap_future(promise)


def is_any_left() -> bool:
    """Whether a call, other than the current one, has not returned yet."""
    return bool(_running - {threading.current_thread()})


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_to_end(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`. Where an event loop runs in this thread already, as in a notebook, the coroutine gets a thread
    with a loop of its own, and this thread waits for it. Handlers of signals still run in this thread."""
    if not _is_loop_running():
        return asyncio.run(main)
    promise: Future[Result] = Future()

    def run() -> None:
        try:
            promise.set_result(asyncio.run(main))
        except BaseException as error:
            promise.set_exception(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), name="podium event loop", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_JOIN_S)
    return promise.result()
