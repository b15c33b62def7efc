# SPDX-License-Identifier: Apache-2.0
"""A real OpenEnv server on loopback: its rewards are those of a run, and its faults are errors of single episodes."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lake_runs import ROOT, SMALL, conversation, episodes_of, warm_model

from podium import api
from podium.data.tasks import Task
from podium.environments.environment_factory import environment_maker
from podium.environments.openenv_episodes import ServerFailedError
from podium.environments.protocol import Turn
from podium.observe import read_metrics
from podium.recipe.on_policy import EnvironmentSection

pytest.importorskip("openenv")
pytestmark = [pytest.mark.environments, pytest.mark.timeout(600)]

MOVES = ("left", "down", "right", "up")
REFUSED = "Illegal action: the environment does not take it."
ROW = Task(source="t", messages=None, text=None, tools=None, reference=None, row={"seed": 1}, place="here")


@contextmanager
def serving(port: int, sessions: int) -> Iterator[str]:
    """The example's server, until the end of the block."""
    command = [
        sys.executable,
        str(ROOT / "examples/openenv/server.py"),
        "--port",
        str(port),
        "--sessions",
        str(sessions),
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 120
            while True:
                assert process.poll() is None, "the server has ended"
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    assert time.monotonic() < deadline, "the server does not listen"
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(free_port(), 2) as url:
        yield url


def section(url: str, *, timeout_s: float = 60.0, **keys: Any) -> EnvironmentSection:
    return EnvironmentSection(openenv={"base_url": url, **keys}, timeout_s=timeout_s)


def numbers(seed: int) -> list[int]:
    """What the server shows to an episode of this seed."""
    dice = random.Random(seed)
    return [dice.randrange(4) for _ in range(3)]


def test_each_episode_has_a_session_of_its_own(server: str) -> None:
    async def both() -> list[list[Any]]:
        make = environment_maker(section(server, action=f"{ROOT / 'examples/openenv/server.py'}:Move"))
        first, second = make(), make()
        seen: list[list[Any]] = [[], []]
        tasks = (ROW, replace(ROW, row={"seed": 5}))
        for at, each in enumerate((first, second)):
            beginning: Any = await each.reset(tasks[at])  # type: ignore[misc]
            seen[at].append(beginning.messages[0]["content"])
        for turn in range(2):
            for at, each in enumerate((first, second)):
                right = MOVES[int(seen[at][-1])]
                outcome: Any = await each.step(Turn(number=turn, text=right))  # type: ignore[misc]
                seen[at].append(outcome.messages[0]["content"])
                assert (outcome.reward, outcome.done) == (0.5, turn == 1)
        for each in (first, second):
            await each.close()  # type: ignore[attr-defined]
        return seen

    assert asyncio.run(both()) == [[str(number) for number in numbers(seed)] for seed in (1, 5)]


def test_plain_values_are_refused_by_the_server_and_its_state_is_read(server: str) -> None:
    async def episode() -> list[Any]:
        environment: Any = environment_maker(
            section(server, field="move", illegal_reward=-0.1, state_metrics="right")
        )()
        await environment.reset(ROW)
        outcomes = [await environment.step(Turn(number=0, text=text)) for text in ("fly", "down", "up")]
        await environment.close()
        return outcomes

    fly, down, up = asyncio.run(episode())
    assert numbers(1)[:2] == [1, 0]
    assert (fly.messages[0]["content"], fly.reward, fly.done) == (REFUSED, -0.1, False)
    assert (down.reward, up.reward, up.done, up.metrics["right"]) == (0.5, 0.0, True, 1.0)


def test_a_full_server_is_waited_for_and_then_named(server: str) -> None:
    async def crowd() -> str:
        patient, hasty = (environment_maker(section(server, field="move", timeout_s=each)) for each in (60.0, 1.5))
        one, two, three, late = patient(), patient(), patient(), hasty()
        await one.reset(ROW)  # type: ignore[misc]
        await two.reset(ROW)  # type: ignore[misc]
        with pytest.raises(ServerFailedError) as caught:
            await late.reset(ROW)  # type: ignore[misc]
        waiting = asyncio.ensure_future(three.reset(ROW))  # type: ignore[arg-type]
        await one.close()  # type: ignore[attr-defined]
        assert (await waiting).messages
        for each in (two, three):
            await each.close()  # type: ignore[attr-defined]
        return str(caught.value)

    assert "raise its max_concurrent_envs" in asyncio.run(crowd())


def test_a_server_that_is_down_or_talks_nonsense_is_named() -> None:
    from websockets.asyncio.server import serve

    async def answers(connection: Any) -> None:
        async for message in connection:
            await connection.send("no JSON" if '"step"' in message else '{"type": "observation", "data": {}}')

    async def nonsense() -> str:
        async with serve(answers, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            environment: Any = environment_maker(section(f"http://127.0.0.1:{port}", field="move"))()
            with pytest.raises(ServerFailedError, match="an answer without an observation") as caught:
                await environment.reset(ROW)
            with pytest.raises(ServerFailedError, match=r"answered step with what the client cannot read: JSONDecode"):
                await environment._answered("step", environment._client.step({"move": "up"}))
            await environment.close()
            return str(caught.value)

    assert "127.0.0.1" in asyncio.run(nonsense())
    down: Any = environment_maker(section(f"http://127.0.0.1:{free_port()}", field="move", connect_timeout_s=0.3))()
    with pytest.raises(ServerFailedError, match=r"no server answers at http://127\.0\.0\.1:\d+ .*Start it"):
        asyncio.run(down.reset(ROW))


def test_rewards_of_a_run_are_those_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    warm_model(tmp_path)
    with serving(free_port(), 8) as url:
        overrides = [
            *SMALL, "steps=3", f"environment.openenv.base_url={url}", "environment.concurrency=8", "run.name=signs",
        ]  # fmt: skip
        result = api.train("examples/openenv/grpo.yaml", overrides=overrides)
    episodes = episodes_of(result.folder)
    assert len(episodes) == 3 * 16
    for episode in episodes:
        _, answers = conversation(episode)
        assert episode.row is not None
        shown, reward = numbers(episode.row), 0.0  # row n has the seed n
        for answer in answers:
            is_legal = answer.strip() in MOVES
            reward += 0.5 * (answer.strip() == MOVES[shown[0]]) if is_legal else -0.1
            shown = shown[1:] if is_legal else shown
        assert episode.reward == pytest.approx(reward, abs=1e-9)
    assert len({episode.reward for episode in episodes}) > 1
    lines = [line.values for line in read_metrics(result.folder / "metrics.jsonl")]
    assert {"environment/turns", "environment/illegal_actions"} <= {name for line in lines for name in line}
