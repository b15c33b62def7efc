# SPDX-License-Identifier: Apache-2.0
"""Runs calls that may block for long in threads beside the event loop. Nothing has to join these threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
P = ParamSpec("P")

_running: set[threading.Thread] = set()


async def in_thread(call: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Awaits a call in a new thread. When the awaiting task is cancelled, the thread is abandoned. The threads of
    asyncio.to_thread are joined at the end of the loop instead, however long they hang."""
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
