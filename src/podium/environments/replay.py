# SPDX-License-Identifier: Apache-2.0
"""The same episode a second time: answers that the policy gave are given again, as long as it is asked the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from podium.environments.episode import Policy, TurnAnswer, TurnRequest


class ReplayPolicy:
    """The policy of one episode. An episode that is run again, because its process was lost, gets the tokens it had.

    An environment that says something else the second time makes another prompt; the engine is asked from there on.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._answers: list[tuple[TurnRequest, TurnAnswer]] = []

    async def answer(self, request: TurnRequest, /) -> TurnAnswer:
        if request.turn < len(self._answers):
            asked, answered = self._answers[request.turn]
            same = asked.max_new_tokens == request.max_new_tokens and np.array_equal(asked.prompt, request.prompt)
            if same:
                return answered
            del self._answers[request.turn :]
        answer = await self._policy.answer(request)
        self._answers.append((request, answer))
        return answer
