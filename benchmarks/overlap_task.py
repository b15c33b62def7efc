# SPDX-License-Identifier: Apache-2.0
"""What the sides of the overlap benchmark share: a generator whose answers have given lengths, and a slow reward."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from podium.data.trajectories import TrajectoryId
from podium.environments.protocol import Observation, Outcome, Turn
from podium.roles.generator import GeneratorRank

MEDIAN, SIGMA, CAP = 24, 1.0, 16  # new tokens; sigma of the logarithm; the longest as a multiple of the median
REWARD_S = 0.3


def answer_length(id: TrajectoryId) -> int:
    """Tokens of an answer: log-normal with a heavy tail, the same on every side."""
    draw = np.random.default_rng([17, id.prompt_index, id.sample]).normal()
    return max(1, min(round(MEDIAN * math.exp(SIGMA * draw)), CAP * MEDIAN))


class MeasuredGenerator(GeneratorRank):
    """Ends each answer at its given length."""

    def _requests(self, shard: Any, plan: Any) -> list[Any]:
        return [
            replace(each, sampling=replace(each.sampling, max_new_tokens=answer_length(each.id)))
            for each in super()._requests(shard, plan)
        ]


def slow_reward(answer: str) -> float:
    """Takes as long as a call of a verifier or a sandbox."""
    time.sleep(REWARD_S)
    return float(len(answer) % 7)


async def judge(answer: str) -> float:
    """Waits as for a judge behind HTTP."""
    await asyncio.sleep(REWARD_S)
    return float(len(answer) % 7)


class SlowTool:
    """Waits as for a tool's answer after every turn, and ends after `turns` of them."""

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns

    async def reset(self, task: Any) -> Observation:
        self._random, self._num_turns = np.random.default_rng([5, len(task.text)]), 0
        return Observation()

    async def step(self, turn: Turn) -> Outcome:
        await asyncio.sleep(float(self._random.uniform(0.2, 1.0)))
        self._num_turns += 1
        reward = float(len(turn.text) % 7)
        return Outcome(reward=reward, done=True) if self._num_turns == self._turns else Outcome(messages=" w1 w2 w3")
