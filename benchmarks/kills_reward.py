# SPDX-License-Identifier: Apache-2.0
"""What graders and runners of the fault-injection benchmark load: a reward, and an environment of several turns."""

from __future__ import annotations

from typing import Any

from podium.environments.protocol import Observation, Outcome, Turn


def digits(answer: str, reference: Any) -> float:
    """The share of digits in an answer: an untrained model gets some, so that groups differ."""
    return sum(letter.isdigit() for letter in answer) / max(1, len(answer))


class Dialogue:
    """Says after every turn how many digits it had. What it says depends on the conversation only, so that a retried
    episode is the same episode."""

    async def reset(self, task: Any) -> Observation:
        return Observation()

    async def step(self, turn: Turn) -> Outcome:
        count = sum(letter.isdigit() for letter in turn.text)
        return Outcome(messages=f"{count} digits, more?", reward=count / 10)
