# SPDX-License-Identifier: Apache-2.0
"""What a process shows of itself, what it may print, and answers that are given a second time."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
from scripted import ScriptedPolicy, byte_tokenizer

from podium.data.trajectories import TrajectoryId
from podium.environments.activity import Activity, Mark
from podium.environments.episode import TurnRequest
from podium.environments.output_cap import OutputCap
from podium.environments.replay import ReplayPolicy

TOKENIZER = byte_tokenizer()


@pytest.fixture
def activity() -> Iterator[Activity]:
    with tempfile.TemporaryFile() as file:
        file.truncate(Activity.num_bytes(3))
        yield Activity(file.fileno(), 3)


def test_a_slot_is_set_while_a_coroutines_own_code_runs_and_not_while_it_waits(activity: Activity) -> None:
    seen: list[dict[int, int]] = []

    async def code() -> str:
        seen.append(dict(activity.running))
        await asyncio.sleep(0)
        seen.append(dict(activity.running))
        return "done"

    async def main() -> str:
        running = asyncio.ensure_future(_awaited(Mark(activity, 1).driven(code())))
        await asyncio.sleep(0)
        seen.append(dict(activity.running))
        return await running

    assert asyncio.run(main()) == "done"
    assert seen == [{1: 1}, {}, {1: 1}]


def test_a_cancelled_coroutine_hears_of_it(activity: Activity) -> None:
    heard: list[str] = []

    async def code() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    async def main() -> None:
        running = asyncio.ensure_future(_awaited(Mark(activity, 0).driven(code())))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert heard == ["cancelled"]
    assert activity.running == {}


def test_a_call_that_was_given_up_does_not_clear_the_slot_of_the_next(activity: Activity) -> None:
    given_up, following = Mark(activity, 0, 6), Mark(activity, 0, 10)
    given_up.__enter__()
    following.__enter__()
    given_up.__exit__(None, None, None)

    assert activity.running == {0: 10}


def test_output_is_kept_up_to_the_cap_and_the_rest_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    cap = OutputCap("the reward of graders[0]", max_bytes=3 * 2**19)

    kept = [cap.take(2**20), cap.take(2**20), cap.take(2**20)]

    assert kept == [2**20, 2**19, 0]
    assert re.search(r"^the reward of graders\[0\] .*1\.5 MiB", str(cap.warning))
    assert capfd.readouterr().err.strip() == f"warning: {cap.warning}"


def _request(turn: int, *prompt: int) -> TurnRequest:
    return TurnRequest(id=TrajectoryId(0, 0), turn=turn, prompt=np.array(prompt, np.int32), max_new_tokens=9)


def test_answers_are_repeated_as_long_as_the_call_is_the_same() -> None:
    inner = ScriptedPolicy(TOKENIZER, ["one", "two", "three"])
    policy = ReplayPolicy(inner)

    async def main() -> None:
        first = [await policy.answer(_request(0, 1)), await policy.answer(_request(1, 1, 2))]
        again = [await policy.answer(_request(0, 1)), await policy.answer(_request(1, 1, 2))]
        assert all(one is other for one, other in zip(first, again, strict=True))
        await policy.answer(_request(0, 1))
        await policy.answer(_request(1, 1, 3))  # the environment said something else

    asyncio.run(main())
    assert [(request.turn, request.prompt.tolist()) for request in inner.requests] == [
        (0, [1]),
        (1, [1, 2]),
        (1, [1, 3]),
    ]


async def _awaited(what: object) -> str:
    return await what  # type: ignore[misc]
