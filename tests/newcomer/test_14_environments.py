# SPDX-License-Identifier: Apache-2.0
"""The docs' own environment could not run from its rows, which have no prompt; tools had no state of their own in an
episode; and `turn.calls` was described nowhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import podium
from helpers.made_batches import make_task
from helpers.on_policy import rl_recipe
from helpers.workspace import Workspace
from podium.environments.chat_format import ToolCall
from podium.environments.protocol import Turn
from podium.environments.tools import ToolClass, ToolEnvironment, load_tools
from podium.errors import RecipeError

DOCS = Path(__file__).parents[2] / "docs" / "environments.md"


def block_with(text: str) -> str:
    """The page's Python block that has this text."""
    blocks = [block.partition("```")[0] for block in DOCS.read_text(encoding="utf-8").split("```python\n")[1:]]
    (block,) = [block for block in blocks if text in block]
    return block


def _call(environment: ToolEnvironment, name: str, **arguments: Any) -> str:
    turn = Turn(number=0, text="", calls=(ToolCall(name=name, arguments=arguments, text=""),))
    (message,) = asyncio.run(environment.step(turn)).messages
    return str(message["content"])


@pytest.fixture
def notebook(tmp_path: Path) -> str:
    (tmp_path / "notebook.py").write_text(block_with("class Notebook"))
    return f"{tmp_path / 'notebook.py'}:Notebook"


def test_a_class_as_a_tool_has_state_of_one_episode(notebook: str) -> None:
    tools = load_tools([notebook])
    first, second = ToolEnvironment(tools), ToolEnvironment(tools)
    for environment in (first, second):
        observation = asyncio.run(environment.reset(make_task(0, hint="look left")))

    assert [tool["function"]["name"] for tool in observation.tools or ()] == ["read", "write"]
    assert _call(first, "write", text="then right") == "2 notes"
    assert _call(first, "read") == '["look left", "then right"]'
    assert _call(second, "read") == '["look left"]'


def test_a_tool_class_that_needs_arguments_is_refused() -> None:
    class Needy:
        def __init__(self, where: str) -> None: ...

    with pytest.raises(RecipeError, match=r"environment\.tools\.1.*Needy"):
        ToolClass.of(Needy, "environment.tools.1")


def test_the_instance_of_a_tool_class_is_closed() -> None:
    closed = []

    class Handle:
        def look(self) -> str:
            """Looks."""
            return "nothing"

        def close(self) -> None:
            closed.append(self)

    environment = ToolEnvironment([ToolClass.of(Handle, "environment.tools.0")])
    asyncio.run(environment.close())

    assert len(closed) == 1
    assert not hasattr(ToolEnvironment([Handle().look]), "close")


@pytest.mark.slow
def test_the_docs_environment_runs_from_rows_without_a_prompt(workspace: Workspace) -> None:
    (workspace.path / "games.py").write_text(block_with("class HigherLower"))
    workspace.rows("train.jsonl", [{"seed": number} for number in range(8)])
    changes = {
        "environment": {"environment": "games.py:HigherLower", "options": {"largest": 50}, "max_turns": 3},
        "reward": [],
        "data": {"heldout": [{"path": "train.jsonl"}]},
    }

    checked = workspace.podium("check", "--deep", rl_recipe(workspace, **changes))
    trial = podium.try_recipe(rl_recipe(workspace, **changes), prompts=2, samples=1)
    outcome = workspace.podium("train", rl_recipe(workspace, **changes))

    assert "8 without a prompt" in checked.out
    assert '{"seed": 0}' in checked.out
    assert "0 tokens" not in checked.out
    assert [sum(is_policy for is_policy, _ in episode.turns) for episode in trial.episodes] == [3, 3]
    assert "from 1 to 50" in trial.episodes[0].marked
    assert outcome.code == 0, outcome.err
    assert "number please" in (workspace.path / "runs/sums/samples.jsonl").read_text()


@pytest.mark.slow
def test_a_row_without_a_prompt_needs_an_environment_that_begins(workspace: Workspace) -> None:
    (workspace.path / "games.py").write_text(block_with("class HigherLower").replace("return Observation(", "return ("))
    workspace.rows("train.jsonl", [{"seed": number} for number in range(8)])

    workspace.refused(workspace.podium("train", rl_recipe(workspace)), "train.jsonl", "`prompt`")
    silent = block_with("class HigherLower").replace("return Observation(", "Observation(")
    (workspace.path / "games.py").write_text(silent)
    trial = podium.try_recipe(
        rl_recipe(workspace, environment={"environment": "games.py:HigherLower"}), prompts=1, samples=1
    )
    assert "reset" in str(trial.episodes[0].error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "facts"),
    [
        (
            {"environment": "games.py:Game", "options": {"larges": 5}},
            ("options.larges", "games.py, line 1"),
        ),
        ({"environment": "games.py:Game", "options": {}}, ("environment.options", "`largest`")),
        (
            {"environment": "games.py:Longer", "options": {"larges": 5}},
            ("options.larges", "games.py, line 11", "largest"),
        ),
        ({"environment": "games.py:Longer", "options": {}}, ("environment.options", "games.py, line 11", "`largest`")),
        ({"environment": "games.py:make", "options": {"how": 1}}, ("environment.options.how", "games.py, line 5")),
        ({"tools": "games.py:tool", "options": {"max_char": 5}}, ("environment.options.max_char", "max_chars")),
    ],
)
def test_options_that_the_environment_does_not_take_or_lacks_are_refused_by_check(
    workspace: Workspace, environment: dict[str, Any], facts: tuple[str, ...]
) -> None:
    (workspace.path / "games.py").write_text(
        "class Game:\n    def __init__(self, largest, seed=0):\n        raise SystemExit('the file was run')\n\n"
        "def make():\n    return Game(3)\n\ndef tool(x: int) -> int:\n    return x\n"
        "\nclass Longer(Game):\n    more = 2\n"
    )
    workspace.rows("train.jsonl", [{"prompt": "1+1=", "seed": number} for number in range(8)])

    recipe = rl_recipe(workspace, environment=environment)
    outcome = workspace.podium("check", recipe)

    workspace.refused(outcome, *facts)


@pytest.mark.parametrize("options", [{"largest": 5}, {"largest": 5, "seed": 1}])
def test_options_that_the_environment_takes_are_no_mistake(workspace: Workspace, options: dict[str, Any]) -> None:
    (workspace.path / "games.py").write_text("class Game:\n    def __init__(self, largest, seed=0): ...\n")
    workspace.rows("train.jsonl", [{"prompt": "1+1="}])
    recipe = rl_recipe(workspace, environment={"environment": "games.py:Game", "options": options})

    outcome = workspace.podium("check", recipe)

    assert outcome.code == 0, outcome.err


@pytest.mark.slow
@pytest.mark.parametrize(("options", "named"), [({"larges": 5}, "options.larges"), ({}, "`largest`")])
def test_an_environment_that_inherits_its_init_from_another_file_is_refused_before_the_first_episode(
    workspace: Workspace, options: dict[str, Any], named: str
) -> None:
    """Only loading it tells which parameters it takes, which a plain check does not do."""
    (workspace.path / "base_of_games.py").write_text("class Base:\n    def __init__(self, largest, seed=0): ...\n")
    (workspace.path / "games.py").write_text(
        "from base_of_games import Base\n\nclass Game(Base):\n"
        "    def reset(self, task): ...\n    def step(self, turn): ...\n"
    )
    workspace.rows("train.jsonl", [{"prompt": "1+1="} for _ in range(8)])
    workspace.monkeypatch.syspath_prepend(workspace.path)
    recipe = rl_recipe(workspace, environment={"environment": "games.py:Game", "options": options})
    game = f"{workspace.path / 'games.py'}, line 3: Game(largest, seed=0)"

    assert workspace.podium("check", recipe).code == 0
    for command in (["check", "--deep"], ["try"], ["train"]):
        workspace.refused(workspace.podium(command[0], recipe, *command[1:]), "environment.options", named, game)
