# SPDX-License-Identifier: Apache-2.0
"""Environments of OpenEnv servers, with a client that needs no server and no package."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripted import task

from podium.environments.chat_format import BadCall, ToolCall
from podium.environments.environment_factory import environment_maker
from podium.environments.openenv_episodes import ServerFailedError
from podium.environments.protocol import Turn
from podium.errors import MissingExtraError, RecipeError
from podium.recipe.on_policy import EnvironmentSection

CLIENT = '''
import asyncio
from types import SimpleNamespace

from pydantic import BaseModel


class Say(BaseModel):
    """Says a word.

    More about it."""

    word: str
    loud: bool = False


class Two(BaseModel):
    a: str
    b: str


class Client:
    """Echoes words; three of them end the episode."""

    log = []

    def __init__(self, base_url, connect_timeout_s=1.0, fault=None, full=0):
        self.fault, self.full, self.words = fault, full, []

    async def connect(self):
        if self.fault == "down":
            raise ConnectionError("refused")

    async def reset(self, **row):
        if self.fault == "hangs":
            await asyncio.sleep(60)
        if self.fault == "full" and len(Client.log) < self.full:
            Client.log.append("full")
            raise RuntimeError("Server error: at capacity (code: CAPACITY_REACHED)")
        self.row = row
        return SimpleNamespace(observation={"text": f"say {row.get('seed')}"}, reward=None, done=self.fault == "done")

    async def step(self, action):
        if self.fault == "breaks":
            raise RuntimeError("Server error: division by zero (code: EXECUTION_ERROR)")
        if self.fault == "garbage":
            raise KeyError("data")
        word = action["word"] if isinstance(action, dict) else action.word
        if word == "bad":
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
        self.words.append(word)
        seen = {"words": len(self.words), "last": word, "done": False}
        reward = "much" if self.fault == "reward" else True
        return SimpleNamespace(observation=seen, reward=reward, done=len(self.words) == 3)

    async def state(self):
        return {"step_count": len(self.words)}

    async def close(self):
        Client.log.append("closed")


def shout(turn):
    if not turn.text:
        raise ValueError("say something.")
    return Say(word=turn.text.upper())


def last(observation):
    return observation.get("last", "nothing yet")
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "openenv", ModuleType("openenv"))
    (tmp_path / "client.py").write_text(CLIENT)
    return tmp_path / "client.py"


def section(file: Path, *, timeout_s: float = 20.0, options: Any = None, **keys: Any) -> EnvironmentSection:
    openenv = {"base_url": "http://user:secret@localhost:1", "client": f"{file}:Client", **keys}
    return EnvironmentSection(openenv=openenv, options=options or {}, timeout_s=timeout_s)


async def played(what: EnvironmentSection, *turns: Turn) -> list[Any]:
    environment: Any = environment_maker(what)()
    try:
        seen = [await environment.reset(replace(task(), row={"seed": 7, "name": "x"}, messages=None))]
        return seen + [await environment.step(turn) for turn in turns]
    finally:
        await environment.close()


def said(text: str, *calls: Any) -> Turn:
    return Turn(number=0, text=text, calls=calls)


def test_a_text_fills_a_field_and_rewards_are_the_server_s(file: Path) -> None:
    what = section(file, field="word", state_metrics="step_count")
    beginning, one, two, three = asyncio.run(played(what, said(" a "), said("b"), said("c")))
    assert beginning.messages == [{"role": "user", "content": "say 7"}]
    assert one.messages == [{"role": "user", "content": '{"words": 1, "last": "a"}'}]
    assert [(each.reward, each.done) for each in (one, two, three)] == [(1.0, False), (1.0, False), (1.0, True)]
    assert three.metrics == {"turns": 1.0, "illegal_actions": 0.0, "step_count": 3.0}


def test_what_server_or_class_refuse_is_a_message_and_a_penalty(file: Path) -> None:
    plain = section(file, field="word", illegal_reward=-0.5)
    _, refused, taken = asyncio.run(played(plain, said("bad"), said("good")))
    assert refused.messages == [{"role": "user", "content": "Illegal action: the environment does not take it."}]
    assert (refused.reward, refused.metrics["illegal_actions"], taken.reward) == (-0.5, 1.0, 1.0)
    typed = section(file, action=f"{file}:Say", answer="json")
    answers = ('{"word": "a", "loud": true}', '{"loud": 3}', "word", "[1]")
    _, good, *bad = asyncio.run(played(typed, *(said(text) for text in answers)))
    assert good.metrics["illegal_actions"] == 0.0
    assert all(each.metrics["illegal_actions"] == 1.0 for each in bad)
    assert "word: Field required" in bad[0].messages[0]["content"]


def test_a_function_makes_actions_and_another_texts(file: Path) -> None:
    what = section(file, action=f"{file}:shout", render=f"{file}:last", reset=["name"])
    beginning, silent, loud = asyncio.run(played(what, said(""), said("hey")))
    assert beginning.messages[0]["content"] == "nothing yet"
    assert silent.messages[0]["content"] == "Illegal action: say something."
    assert loud.messages[0]["content"] == "HEY"


def test_tool_calls_are_actions_and_results_are_messages_of_the_tool(file: Path) -> None:
    what = section(file, action=f"{file}:Say", answer="tool_call", tool="say")
    calls = [ToolCall(name="say", arguments={"word": word}, text="") for word in "abcd"]
    wrong = ToolCall(name="sing", arguments={}, text="")
    beginning, two, rest, none, other, broken = asyncio.run(
        played(what, said("", *calls[:2]), said("", *calls[2:]), said("hm"), said("", wrong),
               said("", BadCall(text="{", why="it is not JSON.")))
    )  # fmt: skip
    (tool,) = beginning.tools
    assert (tool["function"]["name"], tool["function"]["description"]) == ("say", "Says a word.")
    assert [message["role"] for message in two.messages] == ["tool", "tool"]
    assert len({message["tool_call_id"] for message in two.messages}) == 2
    assert (two.reward, rest.done, len(rest.messages)) == (2.0, True, 1)  # the fourth word comes after the end
    assert none.messages == [{"role": "user", "content": "Illegal action. Call the tool say."}]
    assert [each.messages[0]["role"] for each in (other, broken)] == ["tool", "tool"]
    assert what.reply_role == "tool"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("down", r"no server answers at http://localhost:1 \(refused\)\. Start it, or correct"),
        ("hangs", r"http://localhost:1 did not answer reset within 0\.\d+ s"),
        ("done", "was done before the first answer"),
        ("breaks", "failed at step: .*division by zero"),
        ("garbage", "answered step with what the client cannot read: KeyError"),
        ("reward", "gave the reward 'much', which is no number"),
    ],
)
def test_a_server_s_fault_is_an_error_of_the_episode_that_names_it(file: Path, fault: str, why: str) -> None:
    what = section(file, timeout_s=0.3, options={"fault": fault}, field="word", connect_timeout_s=0.1)
    with pytest.raises(ServerFailedError, match=why) as caught:
        asyncio.run(played(what, said("a")))
    assert "secret" not in str(caught.value)


def test_an_episode_waits_for_a_session_of_a_full_server(file: Path) -> None:
    what = section(file, options={"fault": "full", "full": 2}, field="word")
    beginning, *_ = asyncio.run(played(what))
    assert beginning.messages[0]["content"] == "say 7"
    never = section(file, timeout_s=0.3, options={"fault": "full", "full": 10**6}, field="word")
    with pytest.raises(ServerFailedError, match=r"at capacity .*raise its max_concurrent_envs"):
        asyncio.run(played(never))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"action": "Two"}, r"openenv\.field: .*Two has 2 required fields"),
        ({"action": "Say", "field": "sound"}, r"openenv\.field: .*has no 'sound'. It has: word, loud"),
        ({"action": "Client"}, r"openenv\.action: .* is no subclass"),
        ({"action": "shout", "answer": "tool_call"}, r"openenv\.action: a tool call needs a class"),
        ({"field": "word", "options": {"foult": "down"}}, r"environment\.options\.foult: .*Did you mean fault"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_first_episode(file: Path, keys: dict[str, Any], why: str) -> None:
    if "action" in keys:
        keys = {**keys, "action": f"{file}:{keys['action']}"}
    with pytest.raises(RecipeError, match=why):
        environment_maker(section(file, **keys))


def test_the_error_of_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"environment\.openenv: .*pip install podium\[openenv\]"):
        environment_maker(EnvironmentSection(openenv={"base_url": "http://localhost:1", "field": "x"}))
