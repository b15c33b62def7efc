# SPDX-License-Identifier: Apache-2.0
"""An event loop on a virtual clock: when every task waits, the clock jumps to the next timer. A simulated hour takes as
long as the Python code in it, and the same program takes the same course every time."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from podium.errors import ClusterError

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is the virtual clock, in seconds from 0. Calls for other threads run at once, in this one: how long a
    thread takes would not be reproducible."""

    def __init__(self, limit_s: float = math.inf) -> None:
        """`limit_s`: when the clock reaches it, the simulation fails."""
        self._now_s, self._limit_s = 0.0, limit_s
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds since the loop began."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Moves the clock forward. Raises a ClusterError at its limit."""
        self._now_s += seconds
        if self._now_s > self._limit_s:
            raise ClusterError(
                f"the simulation has not ended after {self._limit_s:.0f} virtual seconds. The program in it waits for "
                "something that does not happen, or takes longer than the limit allows."
            )

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], Result], *args: *Arguments
    ) -> asyncio.Future[Result]:
        """Runs the call now."""
        done: asyncio.Future[Result] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run_virtual(main: Coroutine[Any, Any, Result], *, limit_s: float = math.inf) -> Result:
    """`asyncio.run` on a virtual clock, for at most `limit_s` of its seconds."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s)) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.BaseSelector):
    """Waits for no file: advances the clock by what the loop would wait."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop, self._files = loop, selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:  # callbacks are ready, and files can wait
            return []
        ready = self._files.select(0)
        if ready:
            return ready
        if timeout is None:
            raise ClusterError(
                "the simulation stands still: every task waits, and nothing is left that could happen. This is a "
                "deadlock of the program that is simulated."
            )
        self._loop.jump(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.modify(fileobj, events, data)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.get_key(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files.get_map()

    def close(self) -> None:
        self._files.close()
