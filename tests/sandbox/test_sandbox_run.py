# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose rewards and environment run programs in the recipe's sandbox."""

from __future__ import annotations

import pytest

from helpers.on_policy import rl_recipe, said_by
from helpers.workspace import Workspace
from podium.environments.sandbox import Sandbox, isolation

USES = """
from podium.environments.protocol import Observation, Outcome
from podium.environments.sandbox import recipe_sandbox


async def forty_two(answer):
    result = await recipe_sandbox().run_async("print(6 * int(input()))", stdin="7")
    return float(result.text) + recipe_sandbox().limits.memory_mib


class Runs:
    def reset(self, task):
        return Observation()

    def step(self, turn):
        said = recipe_sandbox().run("echo $(( 1 + 1 ))", language="shell").text
        return Outcome(done=True, reward=float(said) + recipe_sandbox().limits.wall_s)
"""


@pytest.mark.slow
def test_a_run_grades_with_the_recipes_sandbox(workspace: Workspace, sandbox: Sandbox) -> None:
    (workspace.path / "uses.py").write_text(USES)
    workspace.rows("problems.jsonl", [{"prompt": f"Double {at}", "tests": ["assert f(1) == 2"]} for at in range(4)])
    recipe = rl_recipe(
        workspace, reward=["code", {"function": "uses.py:forty_two", "weight": 0}], steps=1,
        data={"train": [{"path": "problems.jsonl"}]}, environment={"environment": "uses.py:Runs"},
        sandbox={"memory_mib": 300, "wall_s": 7.0, "workers": 2},
    )  # fmt: skip

    said = said_by("train", recipe, output=workspace.path / "said.txt")

    assert workspace.metric("sums", "reward/code/mean") == {1: 0.0}, said
    assert workspace.metric("sums", "reward/extra/code/passed") == {1: 0.0}
    assert workspace.metric("sums", "reward/forty_two/mean") == {1: 342.0}
    assert workspace.metric("sums", "reward/mean") == {1: 9.0}  # the environment's


@pytest.mark.slow
def test_a_run_is_refused_where_programs_cannot_be_isolated(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.rows("problems.jsonl", [{"prompt": "Double", "tests": ["assert f(1) == 2"]}])
    recipe = rl_recipe(workspace, reward=["code"], data={"train": [{"path": "problems.jsonl"}]})
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)  # type: ignore[attr-defined]

    for command in ("check", "train"):
        workspace.refused(workspace.podium(command, recipe), "bubblewrap (bwrap) is not installed")
