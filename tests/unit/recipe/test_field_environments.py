# SPDX-License-Identifier: Apache-2.0
"""Recipes that name environments of other packages."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from podium.checks import problems_of
from podium.errors import RecipeError
from podium.recipe import OnPolicyRecipe, parse_recipe
from podium.recipe.changes import changes, what_matters
from podium.recipe.field_environments import GymnasiumSection, VerifiersSection
from podium.recipe.plugins import Plugin
from podium.recipe.resolving import located

RECIPE: dict[str, Any] = {
    "program": "grpo", "model": {"path": "model"}, "data": {"train": [{"path": "train.jsonl"}]},
    "optimizer": {"lr": 1e-3}, "steps": 2, "run": {"name": "field"},
}  # fmt: skip


def recipe(**environment: Any) -> OnPolicyRecipe:
    parsed = parse_recipe({**RECIPE, "environment": environment})
    assert isinstance(parsed, OnPolicyRecipe)
    return parsed


def problems(parsed: OnPolicyRecipe, key: str) -> list[str]:
    return [str(error) for error in problems_of(parsed) if str(error).startswith(key)]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"environment": "a.py:World", "gymnasium": "CartPole-v1"},
        {"tools": "a.py:f", "gymnasium": {"id": "CartPole-v1"}},
    ],
)
def test_a_recipe_has_exactly_one_kind_of_environment(keys: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="environment: give exactly one of"):
        recipe(**keys)


def test_an_id_alone_is_a_section_and_an_import_path_is_a_plugin() -> None:
    registered, custom = recipe(gymnasium="CartPole-v1"), recipe(gymnasium={"id": "worlds.py:World"})
    assert registered.environment is not None
    assert registered.environment.gymnasium == GymnasiumSection(id="CartPole-v1")
    assert not isinstance(registered.environment.gymnasium.id, Plugin)
    assert custom.environment is not None
    assert custom.environment.gymnasium is not None
    assert isinstance(custom.environment.gymnasium.id, Plugin)
    assert not isinstance(GymnasiumSection(id="games:Chess-v0").id, Plugin)


def test_such_environments_need_no_prompts_and_no_rewards() -> None:
    parsed = recipe(gymnasium="CartPole-v1")
    assert not parsed.needs_prompts
    assert parsed.gives_rewards
    assert parsed.solving.reward is None
    assert parsed.solving.is_clear


def test_a_stored_recipe_has_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worlds.py").write_text("class World: ...\ndef show(observation, info): ...\n")
    values = located(recipe(gymnasium={"id": "worlds.py:World", "render": "worlds.py:show"}))["environment"]
    assert values["gymnasium"]["id"] == f"{os.getcwd()}/worlds.py:World"
    assert values["gymnasium"]["render"] == f"{os.getcwd()}/worlds.py:show"
    assert located(recipe(gymnasium="CartPole-v1"))["environment"]["gymnasium"]["id"] == "CartPole-v1"


def test_older_recipes_keep_their_fingerprint_and_a_new_key_counts() -> None:
    assert not [key for key in what_matters(recipe(environment="a.py:World")) if "gymnasium" in key]
    (change,) = changes(recipe(gymnasium="A-v0"), recipe(gymnasium="B-v0"))
    assert (change.key, change.breaks is None) == ("environment.gymnasium.id", False)


def test_check_looks_at_files_and_options_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gymnasium" else find(name))
    file = tmp_path / "worlds.py"
    file.write_text("import gymnasium\nclass World(gymnasium.Env):\n    def __init__(self, size=3): ...\n")
    good = recipe(gymnasium=f"{file}:World", options={"size": 4})
    assert problems(good, "environment") == [
        "environment.gymnasium: needs the package `gymnasium`, which is not installed. Run "
        "`pip install podium[gymnasium]`."
    ]
    bad = recipe(gymnasium={"id": f"{file}:World", "render": f"{file}:show"}, options={"sise": 4})
    assert len(problems(bad, "environment")) == 3
    assert any("Did you mean size?" in text for text in problems(bad, "environment.options.sise"))
    assert any("no function or class 'show'" in text for text in problems(bad, "environment.gymnasium.render"))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ("localhost:8000", "expected the address of a server"),
        ("http://localhost:8000", r"environment\.openenv\.field: name the action's field"),
        ({"base_url": "http://localhost:8000", "answer": "tool_call"}, r"environment\.openenv\.action: name"),
    ],
)
def test_an_openenv_server_has_an_address_and_its_actions_a_form(keys: Any, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        recipe(openenv=keys)


def test_where_an_openenv_server_runs_does_not_change_a_run() -> None:
    first, second = (recipe(openenv={"base_url": f"http://{host}:8000", "field": "x"}) for host in ("a", "b"))
    (change,) = changes(first, second)
    assert (change.key, change.breaks) == ("environment.openenv.base_url", None)
    assert not first.needs_prompts


def test_an_environment_of_verifiers_is_an_agent_with_options() -> None:
    parsed = recipe(verifiers="gsm8k-v1", options={"agent": {"max_turns": 2}})
    assert parsed.environment is not None
    assert parsed.environment.verifiers == VerifiersSection(taskset="gsm8k-v1")
    assert (parsed.environment.is_agent, parsed.environment.timeout_s) == (True, 600.0)
    assert parsed.gives_rewards
    assert not parsed.needs_prompts
    with pytest.raises(RecipeError, match=r"exactly one of .*found `verifiers` and `agent`"):
        recipe(verifiers="gsm8k-v1", agent="a.py:solve")
    with pytest.raises(RecipeError, match=r"environment\.max_episode_tokens: 9 has no meaning with an agent"):
        recipe(verifiers="gsm8k-v1", max_episode_tokens=9)


def test_the_file_of_a_taskset_is_stored_whole_and_an_id_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "signs.py").write_text("")
    (tmp_path / "signs").mkdir()
    for given, stored in (("signs.py", f"{os.getcwd()}/signs.py"), ("signs", "signs")):
        assert located(recipe(verifiers=given))["environment"]["verifiers"]["taskset"] == stored


def test_check_looks_for_verifiers_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "verifiers" else find(name))
    assert problems(recipe(verifiers=f"{tmp_path}/none.py"), "environment") == [
        "environment.verifiers: needs the package `verifiers`, which is not installed. Run "
        "`pip install podium[verifiers]`.",
        f"environment.verifiers.taskset: there is no {tmp_path}/none.py.",
    ]
