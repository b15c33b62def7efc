# SPDX-License-Identifier: Apache-2.0
"""User code is called in the loop or in a thread, within its deadline, and can break nothing but its own call."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from scripted import task

from podium.environments.protocol import SingleTurn, Turn, call_within, is_async


def run(function: Callable[..., Any], *given: Any, timeout_s: float | None = 10.0, **named: Any) -> Any:
    return asyncio.run(call_within(timeout_s, function, *given, **named))


async def twice(value: int) -> int:
    return 2 * value


def test_a_coroutine_runs_in_the_loops_thread_and_a_function_in_one_of_its_own() -> None:
    async def here() -> int:
        return threading.get_ident()

    main = threading.get_ident()
    assert run(here) == main
    assert run(threading.get_ident) != main


def test_arguments_and_results_go_through() -> None:
    assert run(twice, 3) == 6
    assert run(functools.partial(twice, 4)) == 8
    assert run(lambda value, *, plus: value + plus, 1, plus=2) == 3


def test_a_function_that_returns_a_coroutine_is_awaited() -> None:
    def indirect() -> Awaitable[int]:
        return twice(5)

    assert not is_async(indirect)
    assert run(indirect) == 10


def test_objects_with_an_async_call_are_seen_as_such() -> None:
    class Tool:
        async def __call__(self) -> int:
            return 1

    assert is_async(Tool())
    assert is_async(functools.partial(Tool()))
    assert run(Tool()) == 1


def test_functions_in_threads_do_not_wait_for_each_other() -> None:
    """Each waits until all 40 have begun."""
    meeting = threading.Barrier(40, timeout=20)

    async def all_at_once() -> list[int]:
        return list(await asyncio.gather(*(call_within(20.0, meeting.wait) for _ in range(40))))

    assert sorted(asyncio.run(all_at_once())) == list(range(40))


@pytest.mark.parametrize("kind", ["async", "sync", "deaf"])
def test_a_call_that_hangs_is_given_up_at_its_deadline(kind: str) -> None:
    released = threading.Event()
    heard = asyncio.Event()

    async def sleeping() -> None:
        await asyncio.Event().wait()

    async def deaf() -> None:
        """Takes its cancellation for noise once."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.set()
            await asyncio.sleep(30)

    function = {"async": sleeping, "sync": released.wait, "deaf": deaf}[kind]
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        run(function, timeout_s=0.05)
    assert time.monotonic() - began < 10
    released.set()


def _exits() -> None:
    sys.exit(3)


async def _exits_async() -> None:
    sys.exit(3)


async def _cancels_itself() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (_exits, RuntimeError, "SystemExit: 3"),
        (_exits_async, RuntimeError, r"called exit\(3\)"),
        (_cancels_itself, RuntimeError, "cancelled itself"),
        (lambda: next(iter(())), RuntimeError, "StopIteration"),
        (lambda: 1 // 0, ZeroDivisionError, "division"),
    ],
)
def test_whatever_is_raised_is_an_ordinary_exception_of_this_call(
    function: Callable[[], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        run(function)


def test_cancelling_the_caller_cancels_the_call() -> None:
    async def scene() -> bool:
        began, ended = asyncio.Event(), asyncio.Event()

        async def waits() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        caller = asyncio.ensure_future(call_within(None, waits))
        await began.wait()
        caller.cancel()
        await asyncio.wait_for(ended.wait(), 10)
        with pytest.raises(asyncio.CancelledError):
            await caller
        return True

    assert asyncio.run(scene())


def test_a_single_turn_is_an_environment_whose_first_step_is_done() -> None:
    environment = SingleTurn()
    assert asyncio.run(environment.reset(task())).messages is None
    assert asyncio.run(environment.step(Turn(number=0, text="4"))).done
