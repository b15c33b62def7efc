# SPDX-License-Identifier: Apache-2.0
"""Rewards and environments failed at step 1 of a job. `podium try` runs them on a few episodes in one process, shows
these token by token, and names file and line of what fails."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import podium
from helpers.on_policy import rl_recipe
from helpers.workspace import Workspace
from podium.environments.chat_format import ToolCall
from podium.environments.protocol import Turn
from podium.environments.tools import ToolEnvironment
from podium.errors import RecipeError

ENVIRONMENT = """
from podium.environments.protocol import Observation, Outcome

class Echo:
    async def reset(self, task):
        return Observation(messages=[{"role": "user", "content": "say something"}])

    async def step(self, turn):
        return Outcome(messages="again", reward=0.25)

class Broken(Echo):
    async def step(self, turn):
        return Outcome(reward=1 / 0)

class Misfit(Echo):
    async def step(self, turn):
        return (1.0, True)

class Forgetful(Echo):
    async def step(self, turn):
        Outcome(done=True)

class WrongReward(Echo):
    async def step(self, turn):
        return Outcome(reward="high", done=True)
"""
TOOLS = """
from podium.environments.chat_format import ToolCall
from podium.environments.protocol import Turn
from podium.environments.tools import ToolEnvironment

def broken(x: int) -> str:
    return str(x // 0)

class Caller(ToolEnvironment):
    def __init__(self):
        super().__init__([broken])

    async def step(self, turn):
        call = ToolCall(name="broken", arguments={"x": 1}, text="")
        return await super().step(Turn(number=turn.number, text=turn.text, calls=(call,)))
"""


@pytest.mark.slow
def test_episodes_are_shown_with_turns_masks_rewards_and_times(workspace: Workspace) -> None:
    recipe = rl_recipe(workspace, "sums")

    outcome = workspace.podium("try", recipe, "--prompts", "2", "--samples", "3")

    assert outcome.code == 0, outcome.err
    assert outcome.out.count("sample ") == 6
    assert outcome.out.count("prompt: ") == 2
    assert outcome.out.count("[[") == 6
    assert outcome.out.count("(digits ") == 6
    assert "6 episodes" in outcome.out
    assert not (workspace.path / "runs").exists()


@pytest.mark.slow
def test_what_is_shown_is_what_would_be_trained(workspace: Workspace) -> None:
    """The first step of the run has the same prompts, tokens and rewards."""
    trial = podium.try_recipe(rl_recipe(workspace, "sums"), prompts=4, samples=4)
    assert workspace.podium("train", rl_recipe(workspace, "sums", steps=1)).code == 0

    rewards = [episode.reward for episode in trial.episodes]
    assert sum(rewards) / 16 == workspace.metric("sums", "reward/mean")[1]
    assert sum(each.num_trained for each in trial.episodes) == workspace.metric("sums", "trained_tokens")[1]


def test_a_reward_that_fails_is_named_with_file_and_line(workspace: Workspace) -> None:
    (workspace.path / "rewards.py").write_text("def digits(answer, reference):\n    return reference['x']\n")

    outcome = workspace.podium("try", rl_recipe(workspace, "sums"))

    workspace.refused(outcome, "4 of 4", "TypeError", "rewards.py, line 2")
    assert outcome.out.count("sample ") == 4


@pytest.mark.slow
def test_an_environment_is_played(workspace: Workspace) -> None:
    (workspace.path / "echo.py").write_text(ENVIRONMENT)
    recipe = rl_recipe(workspace, "sums", environment={"environment": "echo.py:Echo", "max_turns": 2})

    (episode,) = podium.try_recipe(recipe, prompts=1, samples=1).episodes

    assert [is_policy for is_policy, _ in episode.turns] == [True, False, True]
    assert "again" in episode.turns[1][1]
    assert episode.rewards["environment"] == 0.5
    assert episode.marked.count("[[") == 2


@pytest.mark.slow
def test_an_environment_that_fails_is_named_with_file_and_line(workspace: Workspace) -> None:
    (workspace.path / "echo.py").write_text(ENVIRONMENT)
    recipe = rl_recipe(workspace, "sums", environment={"environment": "echo.py:Broken"})

    outcome = workspace.podium("try", recipe)

    workspace.refused(outcome, "4 of 4", "ZeroDivisionError", "echo.py, line 13")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fact", "line"),
    [
        ("Misfit", "a tuple", 16),
        pytest.param("Forgetful", "None", 20, marks=pytest.mark.slow),
        pytest.param("WrongReward", "high", 24, marks=pytest.mark.slow),
    ],
)
def test_an_environment_that_returns_another_type_is_named_with_file_and_line(
    workspace: Workspace, name: str, fact: str, line: int
) -> None:
    (workspace.path / "echo.py").write_text(ENVIRONMENT)
    recipe = rl_recipe(workspace, "sums", environment={"environment": f"echo.py:{name}"})

    (episode,) = podium.try_recipe(recipe, prompts=1, samples=1).episodes

    assert f"echo.py, line {line}" in str(episode.error)
    assert fact in str(episode.error)


@pytest.mark.slow
def test_a_tool_that_raises_is_shown_and_ends_the_command_with_2(workspace: Workspace) -> None:
    (workspace.path / "tools.py").write_text(TOOLS)
    environment = {"environment": "tools.py:Caller", "max_turns": 1, "hidden_tools": True}

    outcome = workspace.podium("try", rl_recipe(workspace, "sums", environment=environment))

    assert outcome.code == 2, outcome
    assert "4 of 4" in outcome.err
    assert re.search(r"warning: .*broken .*ZeroDivisionError.*tools\.py, line 7", outcome.err)
    assert outcome.out.count("sample ") == 4


def test_a_tool_that_fails_is_named_with_file_and_line_and_the_model_reads_no_path() -> None:
    def broken(x: int) -> str:
        """Divides."""
        return str(x // 0)

    environment = ToolEnvironment([broken])
    call = ToolCall(name="broken", arguments={"x": 1}, text="")

    outcome = asyncio.run(environment.step(Turn(number=0, text="", calls=(call,))))

    (warning,) = outcome.warnings
    assert re.search(r"broken .*ZeroDivisionError.*test_13_trying\.py, line \d+", warning)
    assert ".py" not in str(outcome.messages)


@pytest.mark.slow
def test_a_stand_in_has_the_place_of_a_model_that_does_not_fit(workspace: Workspace, tmp_path: Path) -> None:
    """Only its tokenizer is read: there are no weights."""
    folder = tmp_path / "large"
    folder.mkdir()
    for file in workspace.model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    recipe = rl_recipe(workspace, "sums", model={"path": str(folder), "init": "random"})

    outcome = workspace.podium("try", recipe, "--stand-in")

    assert outcome.code == 0, outcome.err
    assert outcome.out.count("sample ") == 4


@pytest.mark.slow
def test_equal_rewards_are_pointed_out(workspace: Workspace) -> None:
    (workspace.path / "rewards.py").write_text("def digits(answer, reference):\n    return 1.0\n")

    assert "nothing to learn" in workspace.podium("try", rl_recipe(workspace, "sums")).out


def test_a_program_that_generates_nothing_cannot_be_tried(workspace: Workspace) -> None:
    with pytest.raises(RecipeError, match="check --deep"):
        podium.try_recipe(workspace.recipe("sums"))
