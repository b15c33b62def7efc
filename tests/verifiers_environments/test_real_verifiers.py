# SPDX-License-Identifier: Apache-2.0
"""Environments of the package verifiers, unchanged from PyPI: rewards, metrics and exact tokens of their episodes. The
package has an environment of its own: `make test-verifiers`."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("verifiers") is None:
    pytest.skip("verifiers is not installed in this environment: run `make test-verifiers`", allow_module_level=True)

from helpers.gateways import serving
from podium.data.tasks import Task
from podium.environments import verifiers_episodes
from podium.environments.agents import AgentCall
from podium.environments.environment_factory import environment_maker
from podium.environments.protocol import Outcome
from podium.errors import RecipeError
from podium.gateway.branches import SessionRecord
from podium.gateway.episodes import sequences_of
from podium.recipe.on_policy import EnvironmentSection

sys.path.append(str(Path(__file__).parents[1] / "unit" / "environments"))
from scripted import CHATML, byte_tokenizer

pytestmark = [pytest.mark.verifiers, pytest.mark.timeout(300)]

TASKSETS = Path(__file__).parent / "tasksets"
TOKENIZER = byte_tokenizer(CHATML)
LOCAL = {"type": "subprocess"}
NULL = {"harness": {"id": "null"}, "runtime": LOCAL}
DIRECT = {"harness": {"id": "direct"}, "runtime": LOCAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What an episode gave, and what the gateway has recorded of it."""

    outcome: Outcome | str  # or why it failed
    record: SessionRecord

    @property
    def texts(self) -> list[str]:
        """The sequences that are trained."""
        found = sequences_of(self.record)
        parts = [0, *found.starts, len(found.tokens_T)]
        return [TOKENIZER.decode(found.tokens_T[a:b].tolist()) for a, b in pairwise(parts)]

    @property
    def sampled(self) -> int:
        """How many tokens are trained."""
        return int(sequences_of(self.record).sampled_T.sum())


def section(name: str, options: dict[str, Any], **keys: Any) -> EnvironmentSection:
    env = keys.pop("env", None)
    return EnvironmentSection(verifiers={"taskset": str(TASKSETS / f"{name}.py"), "env": env}, options=options, **keys)


def played(of: EnvironmentSection, script: Callable[[str], str], rows: list[Any]) -> list[Played]:
    """An episode of each row, all at the same time."""

    async def episode(make: Any, server: Any, row: Any) -> Played:
        session = server.gateway.open_session()
        task = Task(source="t", messages=None, text=None, tools=None, reference=None, row=row, place="row 1")
        call = AgentCall(task=task, session_url=f"http://127.0.0.1:{server.port}{session.path}", key=session.key)
        outcome: Any
        try:
            outcome = await make().reset(call)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        return Played(outcome=outcome, record=await server.gateway.close_session(session.id))

    async def run() -> list[Played]:
        make: Any = environment_maker(of)
        (host,) = make.args
        async with serving(TOKENIZER, script) as server:
            try:
                return await asyncio.gather(*(episode(make, server, row) for row in rows))
            finally:
                await host.close()
                assert not host._started

    return asyncio.run(run())


def rewarded(each: Played) -> Outcome:
    assert isinstance(each.outcome, Outcome), each.outcome
    return each.outcome


def test_rewards_with_their_weights_make_the_reward_of_each_episode() -> None:
    """`2` is right for 1+1 only. Both answers are short."""
    first, second = played(section("sums", {"agent": DIRECT}), lambda prompt: "2", [{"idx": 1}, {"idx": 4}])
    assert rewarded(first).reward == 2.5
    assert rewarded(first).metrics == {"reward_right": 2.0, "reward_short": 0.5, "letters": 1.0}
    assert rewarded(second).reward == 0.5
    assert rewarded(second).metrics == {"reward_right": 0.0, "reward_short": 0.5, "letters": 1.0}
    assert first.texts == ["<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"]
    assert first.sampled == first.record.sampled_tokens == 2  # the letter and the end of the turn
    assert not any(name.startswith("PODIUM_SESSION") for name in os.environ)


def test_the_package_s_own_chat_program_plays_an_episode() -> None:
    (one,) = played(section("sums", {"agent": NULL}), lambda prompt: "2", [{"idx": 1}])
    assert rewarded(one).reward == 2.5
    assert one.texts == ["<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"]


def test_several_turns_continue_the_sampled_tokens() -> None:
    def script(prompt: str) -> str:
        return {0: "1", 1: "9", 2: "3"}[prompt.count("<|im_start|>assistant") - 1]

    (one,) = played(section("guessing", {"player": NULL}), script, [{"idx": 0}])
    assert (rewarded(one).reward, rewarded(one).metrics) == (1.0, {"guesses": 3.0, "reward_found": 1.0})
    assert one.record.rerendered_requests == 0
    (text,) = one.texts
    assert [part.split("\n", 1)[1] for part in text.split("<|im_end|>\n<|im_start|>")][::2] == [
        "Guess my number.", "Higher.", "Lower.",
    ]  # fmt: skip
    assert one.sampled == one.record.sampled_tokens == 6


def test_the_recipe_s_limit_of_turns_ends_an_episode_which_is_still_rewarded() -> None:
    (one,) = played(section("guessing", {"player": NULL}, max_turns=2), lambda prompt: "1", [{"idx": 1}])
    assert (rewarded(one).reward, rewarded(one).metrics["guesses"]) == (0.0, 2.0)
    assert one.record.requests == 2


def test_tools_run_in_their_server_and_their_results_come_back() -> None:
    def script(prompt: str) -> str:
        if "tool_response" in prompt:
            return "it is 5"
        assert "Tools as <tool_call>" in prompt
        return '<tool_call>{"name": "add_toolset_add", "arguments": {"a": 2, "b": 3}}</tool_call>'

    (one,) = played(section("adding", {"agent": NULL}), script, [{"idx": 0}])
    assert rewarded(one).reward == 1.0, one.texts
    assert "<tool_response>5</tool_response>" in one.texts[0]
    assert len(one.texts) == 1


def test_attempts_of_one_episode_are_sequences_of_their_own_and_its_reward_is_their_mean() -> None:
    """best-of-n asks the same question three times: no attempt is a repeat of another."""
    answers = iter(["2", "2", "long"])
    (one,) = played(section("sums", {"agent": DIRECT, "n": 3}, env="best-of-n"), lambda _: next(answers), [{"idx": 1}])
    assert rewarded(one).reward == pytest.approx((2.5 + 2.5 + 0.0) / 3)
    assert rewarded(one).metrics["best"] == pytest.approx(2 / 3)
    assert rewarded(one).metrics["pass_at_n"] == 1.0
    assert (one.record.requests, one.record.repeated_requests, one.sampled) == (3, 0, 2 + 2 + 5)


def test_a_failed_episode_says_why_and_the_others_go_on() -> None:
    bad, good, far, none = played(
        section("sums", {"agent": DIRECT}), lambda _: "2", [{"idx": 7}, {"idx": 1}, {"idx": 10}, {"seed": 1}]
    )
    assert "no such sum" in str(bad.outcome)
    assert rewarded(good).reward == 2.5
    assert far.outcome == "ValueError: row 1: idx 10: the taskset has 10 tasks"
    assert "the row needs a column 'idx'" in str(none.outcome)


def test_an_untrained_agent_may_not_ask_the_trained_model() -> None:
    options = {"assistant": NULL, "user": NULL}
    (one,) = played(section("sums", options, env="user-sim"), lambda _: "###DONE###", [{"idx": 1}])
    assert "the agent 'user' is not to be trained, and asks the model that is" in str(one.outcome)


def test_an_agent_that_was_run_again_fails_the_episode() -> None:
    """The first attempt fails in its reward, after its answer is on record. The second one succeeds."""
    options = {"agent": {**DIRECT, "retries": {"max_retries": 1}}}
    (one,) = played(section("sums", options), lambda _: "2", [{"idx": 8}])
    assert one.record.requests == 2
    assert "the answers of its first attempt are on record. Set `retries`" in str(one.outcome)


def test_options_are_the_environment_s_own_config() -> None:
    options = {"agent": DIRECT, "taskset": {"largest": 2}}
    (one,) = played(section("sums", options), lambda _: "2", [{"idx": 3}])
    assert one.outcome == "ValueError: row 1: idx 3: the taskset has 3 tasks"
    with pytest.raises(RecipeError, match=r"environment\.verifiers: .*sums\.py cannot be loaded with environment\.opt"):
        environment_maker(section("sums", {"agent": DIRECT, "smallest": 1}))
    with pytest.raises(RecipeError, match="no_such_taskset"):
        environment_maker(EnvironmentSection(verifiers="no_such_taskset", options={"agent": DIRECT}))


def test_an_environment_is_replaced_after_many_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers_episodes, "_EPISODES_PER_SERVING", 2)
    started: list[Any] = []
    inner = verifiers_episodes._Serving._serve

    async def counted(self: Any) -> None:
        started.append(self)
        await inner(self)

    monkeypatch.setattr(verifiers_episodes._Serving, "_serve", counted)
    many = played(section("sums", {"agent": DIRECT}), lambda _: "2", [{"idx": 1}] * 5)
    assert [rewarded(each).reward for each in many] == [2.5] * 5
    assert len(started) == 3
    assert [each._num_running for each in started] == [0, 0, 0]
