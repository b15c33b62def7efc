# SPDX-License-Identifier: Apache-2.0
"""Environments that block, crash and hang, in processes of their own: what each costs, and what it does not."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import ScriptedPolicy, byte_tokenizer, task

from podium.data.trajectories import TrajectoryId
from podium.environments.episode import Episode, EpisodeLimits, TurnAnswer, TurnRequest, run_episodes
from podium.environments.hosted_episodes import MOST_FAILED, EnvironmentHost
from podium.environments.output_cap import OutputCap
from podium.environments.transcript import TurnTokenizer
from podium.errors import RecipeError
from podium.recipe.on_policy import EnvironmentSection

MISBEHAVING = Path(__file__).with_name("misbehaving.py")
TOKENIZER = byte_tokenizer()
TURNS = TurnTokenizer(TOKENIZER)
# The time of one call. Long enough for a busy machine to make a step in it, short enough to wait for.
TIMEOUT_S = 2.0

pytestmark = pytest.mark.slow


def section(name: str, *, concurrency: int = 32, **options: Any) -> EnvironmentSection:
    return EnvironmentSection(
        environment=f"{MISBEHAVING}:{name}", options=options, concurrency=concurrency, timeout_s=TIMEOUT_S, max_turns=2
    )


def run(what: EnvironmentSection, count: int, policy: Any = None, output: OutputCap | None = None) -> list[Episode]:
    """All episodes in the order of their numbers. Nothing of them is left behind."""

    async def main() -> tuple[list[Episode], EnvironmentHost]:
        async with asyncio.timeout(120):
            host = EnvironmentHost(what, output=output or OutputCap("test"))
            try:
                await host.open()
                host.begin_shard()
                work = [
                    (TrajectoryId(number, 0), dataclasses.replace(task(), row={"number": number}))
                    for number in range(count)
                ]
                limits = EpisodeLimits(max_turns=2, max_new_tokens=200, timeout_s=TIMEOUT_S)
                said = policy or ScriptedPolicy(TOKENIZER, ["first", "second"])
                stream = run_episodes(
                    host.make, work, said, TURNS, limits=limits, concurrency=what.concurrency, greedy=False
                )
                return sorted([episode async for episode in stream], key=lambda each: each.id), host
            finally:
                host.end_shard()
                host.close()

    return asyncio.run(main())[0]


def failed(episodes: Sequence[Episode]) -> dict[int, str | None]:
    return {episode.id.prompt_index: episode.error for episode in episodes if episode.finish == "error"}


def assert_failed(episodes: Sequence[Episode], numbers: set[int], why: str) -> None:
    """Episodes with these numbers failed, no others, and each for the reason that the pattern `why` describes."""
    found = failed(episodes)
    assert set(found) == numbers
    assert all(re.search(why, str(error)) for error in found.values()), found


def assert_same(left: Sequence[Episode], right: Sequence[Episode], but: Sequence[int] = ()) -> None:
    for one, other in zip(left, right, strict=True):
        if one.id.prompt_index in but:
            continue
        assert (one.finish, one.turn_rewards, one.messages) == (other.finish, other.turn_rewards, other.messages)
        for name in ("tokens_T", "loss_mask_T", "behavior_logprobs_T", "versions_T"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), (one.id, name)


@pytest.mark.parametrize("how", ["sleep", "loop", "regex"])
def test_a_step_that_blocks_its_event_loop_fails_alone(how: str) -> None:
    episodes = run(section("Blocking", how=how, bad=[3]), 8)

    assert_failed(episodes, {3}, f"^step: blocked .*{TIMEOUT_S:g} s")
    assert [episode.reward for episode in episodes if episode.error is None] == [0, 2, 4, 8, 10, 12, 14]


@pytest.mark.parametrize("kind", ["Blocking", "BlockingInThreads"])
@pytest.mark.parametrize("method", ["step", "reset"])
def test_code_that_ends_its_process_fails_alone(kind: str, method: str) -> None:
    episodes = run(section(kind, how="exit", bad=[0, 5], method=method), 8)

    assert_failed(episodes, {0, 5}, f"^{method}: .*exit code 3")


def test_a_crash_is_named_by_its_signal() -> None:
    episodes = run(section("Blocking", how="abort", bad=[1]), 3)

    assert_failed(episodes, {1}, "^step: .*SIGABRT")


def test_a_thread_of_the_environment_that_ends_the_process_is_found_by_trying() -> None:
    episodes = run(section("BlockingInThreads", how="thread", bad=[2]), 4)

    assert_failed(episodes, {2}, "^step: .*exit code 3")


@pytest.mark.parametrize("how", ["sleep", "loop"])
def test_a_plain_function_that_hangs_fails_at_its_deadline_and_no_other(how: str) -> None:
    episodes = run(section("BlockingInThreads", how=how, bad=[1, 2]), 6)

    assert_failed(episodes, {1, 2}, f"^step: TimeoutError: .*{TIMEOUT_S:g} s")


def test_a_close_that_blocks_is_counted_and_spoils_nothing() -> None:
    episodes = run(section("BlockingClose", how="sleep", bad=[1], method="close"), 4)

    assert failed(episodes) == {}
    assert [dict(episode.metrics) for episode in episodes] == [{}, {"close_failed": 1.0}, {}, {}]


@pytest.mark.parametrize(("tool", "why"), [("exits", "exit code"), ("blocks", "blocked")])
def test_a_tool_that_ends_or_blocks_its_process_fails_its_episode(tool: str, why: str) -> None:
    what = EnvironmentSection(
        tools=(f"{MISBEHAVING}:{tool}",), concurrency=8, timeout_s=TIMEOUT_S, max_turns=2, options={"max_calls": 4}
    )

    def line(request: TurnRequest) -> str:
        word = "exit" if request.id.prompt_index == 1 else "fine"
        call = f'<tool_call>{{"name": "{tool}", "arguments": {{"word": "{word}"}}}}</tool_call>'
        return call if request.turn == 0 else "done"

    episodes = run(what, 4, ScriptedPolicy(TOKENIZER, line))

    assert list(failed(episodes)) == [1]
    assert why in str(episodes[1].error)
    assert [episode.messages[2]["content"] for episode in episodes if episode.error is None] == ["fine"] * 3


def test_episodes_that_were_lost_by_anothers_fault_are_the_same_as_without_it() -> None:
    """Their answers are not even generated again."""
    policy = ScriptedPolicy(TOKENIZER, lambda request: f"draw {request.id.prompt_index} turn {request.turn}")

    after = run(section("Blocking", how="exit", bad=[3]), 6, policy)

    expected = run(section("Blocking", how="exit", bad=[]), 6, ScriptedPolicy(TOKENIZER, policy._lines))
    assert list(failed(after)) == [3]
    assert_same(after, expected, but=[3])
    requested = [(request.id.prompt_index, request.turn) for request in policy.requests]
    assert len(requested) == len(set(requested))


class KillsOnce:
    """Kills the environment's process from outside while one episode waits for its second answer."""

    def __init__(self, inner: ScriptedPolicy, host_pids: list[int]) -> None:
        self._inner, self._pids, self.killed = inner, host_pids, False

    async def answer(self, request: TurnRequest, /) -> TurnAnswer:
        if request.turn == 1 and not self.killed:
            self.killed = True
            os.kill(self._pids[0], signal.SIGKILL)
        return await self._inner.answer(request)


def test_a_process_killed_from_outside_costs_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    opened = EnvironmentHost.open

    async def open_and_tell(self: EnvironmentHost) -> None:
        await opened(self)
        pids.append(self._processes[0][0].process.pid)

    expected = run(section("Blocking", how="exit", bad=[], concurrency=4), 6)
    monkeypatch.setattr(EnvironmentHost, "open", open_and_tell)
    policy = KillsOnce(ScriptedPolicy(TOKENIZER, ["first", "second"]), pids)

    episodes = run(section("Blocking", how="exit", bad=[], concurrency=4), 6, policy)

    assert policy.killed
    assert failed(episodes) == {}
    assert_same(episodes, expected)


def test_an_environment_that_always_ends_its_process_is_given_up() -> None:
    episodes = run(section("Blocking", how="exit", bad=list(range(40))), 40)

    errors = failed(episodes)
    assert len(errors) == 40
    given_up = [error for error in errors.values() if "was not called, after" in str(error)]
    assert 0 < len(given_up) <= 40 - MOST_FAILED


def test_the_order_of_sets_is_the_same_in_every_process() -> None:
    first, second = (run(section("SetOrder"), 1)[0].messages[0]["content"] for _ in range(2))

    assert first == second


def test_output_beyond_the_cap_is_dropped_and_the_episodes_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    output = OutputCap("the environment", max_bytes=10_000)

    episodes = run(section("Talkative", how="", bad=[]), 16, output=output)

    assert failed(episodes) == {}
    assert output.warning is not None
    said = capfd.readouterr()
    assert said.out.count("y") <= 10_000
    assert said.err.count(output.warning) == said.err.count("warning: ") == 1


def test_a_recipe_whose_environment_cannot_be_loaded_says_so() -> None:
    with pytest.raises(RecipeError, match=r"^environment\.environment: .*'Absent'"):
        run(section("Absent"), 1)
