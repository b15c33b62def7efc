# SPDX-License-Identifier: Apache-2.0
"""User code that does what no code should, for processes that must survive it. Loaded by path, as a recipe's own."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from typing import Any

from podium.environments.protocol import Observation, Outcome, Turn

FOREVER_S = 1e6


def block(how: str) -> None:
    match how:
        case "sleep":
            time.sleep(FOREVER_S)
        case "loop":
            while True:
                pass
        case "regex":  # keeps Python's interpreter
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "exit":
            os._exit(3)
        case "abort":
            os.abort()
        case "thread":
            threading.Thread(target=os._exit, args=(3,)).start()
            time.sleep(FOREVER_S)
        case "print":
            while True:
                print("x" * 1000)


class Blocking:
    """Two turns; the tasks whose number is in `bad` misbehave in one method."""

    def __init__(self, how: str, bad: list[int], method: str = "step") -> None:
        self._how, self._bad, self._method = how, bad, method

    async def reset(self, task: Any) -> Observation:
        self._number = task.row["number"]
        await self._act("reset")
        return Observation(messages=f"question {self._number}")

    async def step(self, turn: Turn) -> Outcome:
        await asyncio.sleep(0)
        await self._act("step")
        return Outcome(messages=f"more {self._number}", reward=float(self._number), done=turn.number == 1)

    async def _act(self, method: str) -> None:
        if method == self._method and self._number in self._bad:
            block(self._how)


class BlockingClose(Blocking):
    async def close(self) -> None:
        await self._act("close")


class BlockingInThreads(Blocking):
    """The same with plain functions."""

    def reset(self, task: Any) -> Observation:  # type: ignore[override]
        return asyncio.run(super().reset(task))

    def step(self, turn: Turn) -> Outcome:  # type: ignore[override]
        return asyncio.run(super().step(turn))


class Talkative(Blocking):
    async def _act(self, method: str) -> None:
        print("y" * 4096)


class SetOrder:
    """Says the order of a set of strings, which differs between processes unless somebody sees to it."""

    async def reset(self, task: Any) -> Observation:
        return Observation(messages=" ".join({f"word{number}" for number in range(20)}))

    async def step(self, turn: Turn) -> Outcome:
        return Outcome(done=True)


def exits(word: str) -> str:
    """Ends its process for one word.

    Args:
        word: what to say.
    """
    if word == "exit":
        os._exit(3)
    return word


async def blocks(word: str) -> str:
    """Blocks its event loop for one word.

    Args:
        word: what to say.
    """
    if word == "exit":
        time.sleep(FOREVER_S)
    return word


def reward(answer: str) -> float:
    block(answer)
    return 1.0


async def async_reward(answer: str) -> float:
    await asyncio.sleep(0)
    block(answer)
    return 2.0


_waiting = 0


async def meeting(answer: str) -> float:
    """Returns once as many calls wait at the same time as the answer says; 0.0 if they do not within half a minute."""
    global _waiting
    _waiting += 1
    end_s = time.monotonic() + 30.0
    while _waiting < int(answer) and time.monotonic() < end_s:
        await asyncio.sleep(0.01)
    return float(_waiting >= int(answer))


async def process_id(answer: str) -> float:
    if answer == "slow":
        await asyncio.sleep(1.0)
    return float(os.getpid())


def as_number(answer: str) -> float:
    return float(answer)


def ranks(answers: list[str]) -> list[float]:
    return [float(sorted(answers).index(answer)) for answer in answers]


def length(answer: str) -> float:
    return float(len(answer))
