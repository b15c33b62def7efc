# SPDX-License-Identifier: Apache-2.0
"""Recipes whose episodes are played by an agent: what is found before a run, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from podium.checks import problems_of
from podium.errors import RecipeError
from podium.recipe import OnPolicyRecipe, parse_recipe
from podium.recipe.changes import what_matters

RECIPE: dict[str, Any] = {
    "program": "grpo", "model": {"path": "model"}, "data": {"train": [{"path": "train.jsonl"}]},
    "optimizer": {"lr": 1e-3}, "steps": 2, "run": {"name": "agents"},
}  # fmt: skip


def recipe(environment: dict[str, Any], **changes: Any) -> OnPolicyRecipe:
    parsed = parse_recipe({**RECIPE, "environment": environment, **changes})
    assert isinstance(parsed, OnPolicyRecipe)
    return parsed


def problems(path: str) -> list[str]:
    found = problems_of(recipe({"agent": path}))
    return [str(error) for error in found if str(error).startswith("environment.")]


@pytest.mark.parametrize(
    "keys",
    [{"agent": "a.py:f", "tools": "t.py:f"}, {"agent": "a.py:f", "agent_command": ["python"]}, {"agent_command": []}],
)
def test_an_agent_is_the_only_environment(keys: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="environment: give exactly one of"):
        recipe(keys)


@pytest.mark.parametrize(
    ("environment", "changes", "key"),
    [
        ({"options": {"a": 1}}, {}, "environment.options"),
        ({"max_episode_tokens": 99}, {}, "environment.max_episode_tokens"),
        ({"hidden_tools": True}, {}, "environment.hidden_tools"),
        ({}, {"algorithm": {"kl": {"coefficient": 0.1, "where": "reward"}}}, "algorithm.kl.where"),
        ({}, {"algorithm": {"advantage": "reinforce_pp", "gamma": 0.9}}, "algorithm.gamma"),
        ({}, {"rollout": {"router_replay": "on"}}, "rollout.router_replay"),
        ({}, {"program": "ppo"}, "environment.agent: ppo has a critic"),
    ],
)
def test_what_an_agent_excludes_is_refused(environment: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match=key.replace(".", r"\.")):
        recipe({"agent": "a.py:f", **environment}, **changes)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("missing.py:solve", "environment.agent: there is no file"),
        ("agents.py:absent", "environment.agent: .* has no function or class 'absent'"),
        ("agents.py:two", "cannot be called with three arguments"),
    ],
)
def test_an_agent_that_cannot_be_called_is_found_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agents.py").write_text("def two(task, base_url): ...\nasync def solve(task, base_url, key): ...\n")

    found = problems(path)

    assert len(found) == 1
    assert re.search(why, found[0])
    assert problems("agents.py:solve") == []


def test_a_deadline_is_that_of_an_episode() -> None:
    assert recipe({"agent": "a.py:f"}).environment.timeout_s == 600  # type: ignore[union-attr]
    assert recipe({"agent": "a.py:f", "timeout_s": 5}).environment.timeout_s == 5  # type: ignore[union-attr]
    assert recipe({"tools": "t.py:f"}, reward=["exact_match"]).environment.timeout_s == 60  # type: ignore[union-attr]


def test_recipes_without_an_agent_keep_their_fingerprint() -> None:
    keys = what_matters(recipe({"tools": "t.py:f"}, reward=["exact_match"]))
    assert not any(key.startswith("environment.agent") for key in keys)
    assert "environment.agent" in what_matters(recipe({"agent": "a.py:f"}))
