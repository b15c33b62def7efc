# SPDX-License-Identifier: Apache-2.0
"""Both ends of a broadcast of weights: which of their failures is reported."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from podium.errors import RoleError, WorkerDiedError
from podium.roles import handles
from podium.roles.handles import send_weights

RESET = RoleError("train[0] failed while in policy.send: Connection reset by peer")
DEATH = WorkerDiedError("rollout[0] died")


class End:
    """An end that is done after some time."""

    def __init__(self, outcome: int | Exception, after_s: float = 0.0) -> None:
        self._outcome, self._after_s = outcome, after_s

    async def send(self, transfer: object) -> int:
        await asyncio.sleep(self._after_s)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    install = send


def sent(policy: End, generator: End) -> int:
    ends: list[Any] = [policy, generator, None]
    return asyncio.run(send_weights(*ends))


def test_what_came_is_returned() -> None:
    assert sent(End(7), End(5, after_s=0.01)) == 5


@pytest.mark.parametrize("is_sender", [True, False])
def test_a_death_takes_precedence_over_the_failure_that_it_causes(is_sender: bool) -> None:
    failing, dying = End(RESET), End(DEATH, after_s=0.05)
    with pytest.raises(WorkerDiedError, match="died"):
        sent(*((dying, failing) if is_sender else (failing, dying)))


def test_a_failure_without_a_death_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "DEATH_S", 0.05)
    for other in (End(7), End(RESET), End(7, after_s=0.5)):
        with pytest.raises(RoleError, match="reset"):
            sent(End(RESET), other)


def test_nobody_waits_for_the_generators_of_a_learner_that_died() -> None:
    with pytest.raises(WorkerDiedError):
        asyncio.run(asyncio.wait_for(send_weights(*[End(DEATH), End(7, after_s=60), None]), 5))  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", [7, RESET])
def test_the_end_of_learners_is_waited_for_when_a_generator_died(outcome: int | Exception) -> None:
    """Ranks that are still in this call would take part in the collectives of the next one."""

    async def main() -> None:
        ended = asyncio.Event()

        class Learner(End):
            async def send(self, transfer: object) -> int:
                try:
                    return await super().send(transfer)
                finally:
                    ended.set()

        ends: list[Any] = [Learner(outcome, after_s=0.05), End(DEATH), None]
        with pytest.raises(WorkerDiedError, match="rollout"):
            await send_weights(*ends)
        assert ended.is_set()

    asyncio.run(main())


def test_a_learner_that_dies_after_a_generator_takes_precedence() -> None:
    with pytest.raises(WorkerDiedError, match="train"):
        sent(End(WorkerDiedError("train[0] died"), after_s=0.05), End(DEATH))
