# SPDX-License-Identifier: Apache-2.0
"""Runs an episode again with the policy's earlier answers, as long as the prompts are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from podium.environments.episode import Policy, TurnAnswer, TurnRequest


class ReplayPolicy:
    """The policy of one episode. An episode that runs again, because its process was lost, gets its earlier tokens. If
    the environment replies differently, the prompt differs, and the engine generates from there on."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._answers: list[tuple[TurnRequest, TurnAnswer]] = []

    async def answer(self, request: TurnRequest, /) -> TurnAnswer:
        """The answer of the earlier attempt if the request is the same, else the policy's."""
        if request.turn < len(self._answers):
            earlier, earlier_answer = self._answers[request.turn]
            same = earlier.max_new_tokens == request.max_new_tokens and np.array_equal(earlier.prompt, request.prompt)
            if same:
                return earlier_answer
            del self._answers[request.turn :]
        answer = await self._policy.answer(request)
        self._answers.append((request, answer))
        return answer
