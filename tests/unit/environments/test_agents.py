# SPDX-License-Identifier: Apache-2.0
"""Agents as functions and as commands: what they are given, what they may return, and how a command ends."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import task

from podium.environments.agents import (
    AgentCall,
    AgentOutcome,
    CommandAgent,
    agent_maker,
    printed_reward,
    reward_of,
    task_text,
)
from podium.environments.protocol import Outcome, call_within
from podium.recipe.on_policy import EnvironmentSection

AGENTS = """
import asyncio

async def coroutine(task, base_url, key):
    await asyncio.sleep(0)
    return (task.messages[0]["content"], base_url, key) == ("17*23?", "http://h/sessions/a/v1", "k") and 0.5

def plain(task, base_url, key):
    return 1

def returns_a_coroutine(task, base_url, key):
    return coroutine(task, base_url, key)
"""


def call() -> AgentCall:
    return AgentCall(task=task(), session_url="http://h/sessions/a", key="k")


def run(agent: Any, timeout_s: float = 60.0) -> Any:
    return asyncio.run(call_within(timeout_s, agent.reset, call()))


def command(program: str, *arguments: str) -> CommandAgent:
    return CommandAgent([sys.executable, "-c", program, *arguments])


@pytest.mark.parametrize(("name", "reward"), [("coroutine", 0.5), ("plain", 1.0), ("returns_a_coroutine", 0.5)])
def test_a_function_is_given_task_url_and_key(tmp_path: Path, name: str, reward: float) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    section = EnvironmentSection.model_validate({"agent": f"{tmp_path / 'agents.py'}:{name}"})

    outcome = run(agent_maker(section, "environment")())

    assert isinstance(outcome, Outcome)
    assert (outcome.reward, outcome.done) == (reward, True)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.25), True])
def test_numbers_are_rewards_and_none_is_none(value: Any) -> None:
    outcome = reward_of(value)
    assert outcome is not None
    assert outcome.reward == float(value)
    assert reward_of(None) is None


@pytest.mark.parametrize("value", ["1", "good", float("nan"), float("inf"), [1], {"score": 1}])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="an agent returns"):
        reward_of(value)


def test_rewards_of_single_answers_come_beside_that_of_the_episode() -> None:
    for given, expected in (
        ([1, 2.5], (1.0, 2.5)),
        ({"chatcmpl-1": 1, "resp_2": [2, 3]}, {"chatcmpl-1": (1.0,), "resp_2": (2.0, 3.0)}),
    ):
        outcome = reward_of({"reward": 4, "turn_rewards": given})
        assert isinstance(outcome, AgentOutcome)
        assert (outcome.reward, outcome.turn_rewards) == (4.0, expected)
    alone = reward_of({"turn_rewards": [1]})
    assert isinstance(alone, AgentOutcome)
    assert (alone.reward, alone.turn_rewards) == (0.0, (1.0,))
    assert reward_of({"reward": None}) is None
    whole = reward_of({"reward": 0.5})
    assert whole is not None
    assert whole.reward == 0.5
    for wrong in ("abc", 1, ["a"], {"id": None}, [float("inf")]):
        with pytest.raises(TypeError, match="`turn_rewards` has a number"):
            reward_of({"reward": 4, "turn_rewards": wrong})


@pytest.mark.parametrize(
    ("output", "reward"),
    [("1\n", 1.0), ("said\n0.5\n\n", 0.5), ('{"reward": 2}', 2.0), ("", None), ("done", None), ("1\nthe end", None),
     ('{"score": 1}', None), ("true", None), ('"1"', None),
     ('{"turn_rewards": [1, 0], "note": "x"}', {"reward": None, "turn_rewards": [1, 0]})],
)  # fmt: skip
def test_the_last_line_of_a_command_may_be_its_reward(output: str, reward: Any) -> None:
    assert printed_reward(output) == reward


def test_a_command_is_given_the_task_and_the_variables() -> None:
    program = """
import json, os, sys
first, second = json.loads(sys.argv[1]), json.load(open(sys.argv[2]))
assert first == second and first["messages"][0]["content"] == "17*23?"
assert os.environ["OPENAI_BASE_URL"] == "http://h/sessions/a/v1" and os.environ["OPENAI_API_KEY"] == "k"
assert os.environ["ANTHROPIC_BASE_URL"] == "http://h/sessions/a" and os.environ["ANTHROPIC_API_KEY"] == "k"
print("x" * 300_000)
print(0.75)
"""
    assert run(command(program, "{task}", "{task_file}")).reward == 0.75


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exit code 3: .*it was late"):
        run(command("import sys; print('it was late', file=sys.stderr); sys.exit(3)"))
    with pytest.raises(RuntimeError, match="the command cannot be started"):
        run(CommandAgent(["no-such-program-here"]))


def test_a_command_that_is_given_up_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """The child of the command writes its id, then both sleep."""
    program = f"""
import subprocess, sys, time
child = "import os, time; open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid())); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(600)
"""

    async def main() -> None:
        agent = asyncio.ensure_future(command(program).reset(call()))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert not agent.done(), agent
            await asyncio.sleep(0.02)
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)
        async with asyncio.timeout(30):
            while _runs(int((tmp_path / "pid").read_text())):
                await asyncio.sleep(0.02)

    asyncio.run(main())


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_program_that_a_command_leaves_behind_does_not_hold_its_episode(tmp_path: Path) -> None:
    """It has the command's output open, and would end after a minute."""
    left = tmp_path / "pid"
    program = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(left)!r}, 'w').write(str(child.pid)); print(0.5)"
    )
    began = time.monotonic()
    outcome = run(command(program), timeout_s=50)
    assert outcome.reward == 0.5
    assert time.monotonic() - began < 45
    while _runs(int(left.read_text())):
        assert time.monotonic() - began < 45
        time.sleep(0.02)


def test_clients_do_not_send_to_a_proxy_what_is_for_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:1")
    program = (
        "import os; found = [os.environ[name] for name in ('NO_PROXY', 'no_proxy')]; "
        "print(float(found == ['example.org,127.0.0.1', '127.0.0.1']))"
    )
    assert run(command(program)).reward == 1.0


def test_a_task_is_json_whatever_its_row_holds() -> None:
    values = json.loads(task_text(task()))
    assert set(values) == {"messages", "text", "tools", "row"}
