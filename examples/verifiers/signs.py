# SPDX-License-Identifier: Apache-2.0
"""A taskset for verifiers: the model reads a number and has to find the one move that is always right.

The harness, which verifiers takes from this file too, asks in the process of the environment. The package's own ones
start a program for each episode, which takes longer than all else with a model this small."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

MOVES = ("left", "down", "right", "up")


class SignData(vf.TaskData):
    move: str


class SignTask(vf.Task[SignData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.move)

    @vf.reward(weight=0.1)
    async def is_move(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() in MOVES)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SignConfig(vf.TasksetConfig):
    size: int = 520
    seed: int = 0
    move: str = "up"


class SignTaskset(vf.Taskset[SignTask, SignConfig]):
    def load(self) -> Iterator[SignTask]:
        dice = random.Random(self.config.seed)
        for _ in range(self.config.size):
            yield SignTask(SignData(prompt=str(dice.randrange(len(MOVES))), move=self.config.move), self.config.task)


class AskHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt_text}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["AskHarness", "SignTaskset"]
