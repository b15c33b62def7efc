# SPDX-License-Identifier: Apache-2.0
"""Environments with Gymnasium's interface, played with a stand-in for the package."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedPolicy, byte_tokenizer, task

from helpers.fake_gymnasium import Box, Dict, Discrete, Env, Text, fake_module
from podium.data.trajectories import TrajectoryId
from podium.environments.environment_factory import environment_maker
from podium.environments.episode import Episode, EpisodeLimits, run_episode
from podium.environments.transcript import TurnTokenizer
from podium.errors import MissingExtraError, RecipeError
from podium.recipe.on_policy import EnvironmentSection

TOKENIZER = byte_tokenizer()


class Corridor(Env):
    """Five cells. Right and left move; the last cell is the end, and the third step is one too many."""

    closed: list[int] = []

    def __init__(self, length: int = 5) -> None:
        self.observation_space: Any = Dict({"cell": Discrete(length), "sign": Text(10, "abc")})
        self.action_space: Any = Discrete(2)
        self._length, self._moves = length, 0
        self.resets: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert seed is not None
        self._cell = seed % 3
        self._sign = (options or {}).get("sign", "a")
        return self._seen(), {}

    def step(self, action: int) -> Any:
        self._cell += 1 if action else -1
        self._moves += 1
        at_end = self._cell == self._length - 1
        return self._seen(), 1.0 if at_end else -0.25, at_end, self._moves == 3, {"moves": self._moves}

    def close(self) -> None:
        self.closed.append(self._moves)

    def _seen(self) -> dict[str, Any]:
        return {"cell": self._cell, "sign": self._sign}


class Spelling(Env):
    """Wants a text of a and b, with an observation that is a text."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = Text(100, "abc"), Text(3, "ba")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "spell", {}

    def step(self, action: str) -> Any:
        return action, float(action == "aba"), True, False, {}


class Joint(Env):
    """Its observations have no text."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = Box(), Discrete(2)


@pytest.fixture(autouse=True)
def gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = {"Corridor-v0": Corridor, "Spelling-v0": Spelling, "Joint-v0": Joint, "Nothing-v0": dict}
    monkeypatch.setitem(sys.modules, "gymnasium", fake_module(registered))
    Corridor.closed = []


def played(section: EnvironmentSection, lines: Sequence[str], row: dict[str, Any], **fields: Any) -> Episode:
    return asyncio.run(
        run_episode(
            environment_maker(section)(),
            replace(task(), row=row, **{"messages": None, **fields}),
            ScriptedPolicy(TOKENIZER, lines),
            TurnTokenizer(TOKENIZER),
            id=TrajectoryId(0, 0),
            limits=EpisodeLimits(max_turns=6, max_new_tokens=50),
        )
    )


def contents(episode: Episode) -> list[str]:
    return [str(message["content"]) for message in episode.messages]


def test_observations_are_messages_and_answers_are_actions() -> None:
    section = EnvironmentSection(gymnasium={"id": "Corridor-v0", "actions": ["left", "right"]}, options={"length": 3})
    episode = played(section, ["right", " Right "], {"seed": 3})
    assert contents(episode) == ["cell: 0\nsign: a", "right", "cell: 1\nsign: a", " Right ", "cell: 2\nsign: a"]
    assert (episode.turn_rewards, episode.finish) == ((-0.25, 1.0), "done")
    assert episode.metrics == {"turns": 2.0, "illegal_actions": 0.0, "terminated": 1.0, "truncated": 0.0}
    assert Corridor.closed == [0, 2]  # the one that shows its spaces, and the episode's


def test_an_illegal_action_is_a_message_and_a_penalty_and_no_step() -> None:
    section = EnvironmentSection(gymnasium={"id": "Corridor-v0", "illegal_reward": -0.5})
    episode = played(section, ["right", "2", "-1", "0", "1", "1"], {"seed": 0})
    legal = "Illegal action. Answer with a whole number from 0 to 1."
    assert [contents(episode)[at] for at in (2, 4, 6)] == [legal, legal, legal]
    assert episode.turn_rewards == (-0.5, -0.5, -0.5, -0.25, -0.25, -0.25)
    assert (episode.metrics["illegal_actions"], episode.metrics["truncated"]) == (3.0, 1.0)
    assert (episode.finish, episode.metrics["terminated"]) == ("done", 0.0)


def test_text_actions_are_what_the_space_contains() -> None:
    section = EnvironmentSection(gymnasium="Spelling-v0")
    episode = played(section, ["abc", "aba"], {})
    assert contents(episode)[2] == "Illegal action. Answer with 1 to 3 of the characters ab"
    assert (episode.reward, episode.finish) == (1.0, "done")


def test_a_row_gives_seed_options_and_the_beginning_of_the_prompt() -> None:
    section = EnvironmentSection(gymnasium={"id": "Corridor-v0", "seed": "game", "reset_options": "setup"})
    prompt = ({"role": "system", "content": "Walk."}, {"role": "user", "content": "Go right."})
    episode = played(section, ["1"] * 3, {"game": 1, "setup": {"sign": "c"}}, messages=prompt)
    assert contents(episode)[:2] == ["Walk.", "Go right.\n\ncell: 1\nsign: c"]
    assert [message["role"] for message in episode.messages[:2]] == ["system", "user"]


def test_raw_text_is_continued() -> None:
    episode = played(EnvironmentSection(gymnasium="Corridor-v0"), ["1"] * 3, {"seed": 0}, text="Go: ")
    assert contents(episode)[0] == "Go: cell: 0\nsign: a"


def test_rows_without_a_seed_have_one_from_their_content() -> None:
    section = EnvironmentSection(gymnasium="Corridor-v0")
    beginnings = [contents(played(section, ["0"] * 6, {"name": name}))[0] for name in ("x", "x", "y", "z", "w")]
    assert beginnings[0] == beginnings[1]
    assert len(set(beginnings)) > 1


@pytest.mark.parametrize(
    ("keys", "row", "why"),
    [
        ({"seed": "game"}, {"seed": 1}, "no column 'game'"),
        ({}, {"seed": "one"}, "whole number"),
        ({"reset_options": "setup"}, {"seed": 1, "setup": 3}, "needs a mapping"),
    ],
)
def test_a_row_that_does_not_fit_fails_its_episode(keys: dict[str, Any], row: dict[str, Any], why: str) -> None:
    episode = played(EnvironmentSection(gymnasium={"id": "Corridor-v0", **keys}), ["1"], row)
    assert episode.finish == "error"
    assert why in str(episode.error)


def test_functions_render_and_parse(tmp_path: Path) -> None:
    file = tmp_path / "words.py"
    file.write_text(
        "def show(observation, info):\n    return f\"{observation['cell']} after {info.get('moves', 0)}\"\n"
        "def read(text):\n    word = text.split()[-1]\n    if word not in ('L', 'R'):\n"
        "        raise ValueError('say L or R')\n    return int(word == 'R')\n"
    )
    section = EnvironmentSection(
        gymnasium={"id": "Corridor-v0", "render": f"{file}:show", "parse": f"{file}:read"}, options={"length": 3}
    )
    episode = played(section, ["I go R", "up", "now R"], {"seed": 0})
    assert contents(episode)[::2] == ["0 after 0", "1 after 1", "Illegal action: say L or R", "2 after 2"]


def test_a_class_of_a_file_is_made_with_the_options(tmp_path: Path) -> None:
    file = tmp_path / "worlds.py"
    file.write_text(
        "import gymnasium\nfrom helpers.fake_gymnasium import Discrete\n"
        "class World(gymnasium.Env):\n"
        "    observation_space = action_space = Discrete(3, start=1)\n"
        "    def __init__(self, goal):\n        self.goal = goal\n"
        "    def reset(self, seed=None, options=None):\n        return 1, {}\n"
        "    def step(self, action):\n        return action, float(action == self.goal), True, False, {}\n"
    )
    section = EnvironmentSection(gymnasium=f"{file}:World", options={"goal": 3})
    assert played(section, ["3"], {}).turn_rewards == (1.0,)
    with pytest.raises(RecipeError, match=r"environment\.options\.gaol: .*World.*Did you mean goal"):
        environment_maker(EnvironmentSection(gymnasium=f"{file}:World", options={"gaol": 3}))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"id": "Joint-v0"}, r"gymnasium\.render: observations of Joint-v0 are Box"),
        ({"id": "Corridor-v0", "actions": ["a", "b", "c"]}, r"gymnasium\.actions: 3 names"),
        ({"id": "Spelling-v0", "actions": ["a"]}, r"gymnasium\.actions: 1 name"),
        ({"id": "Nothing-v0"}, r"gymnasium\.id: Nothing-v0 makes a dict"),
        ({"id": "Absent-v0"}, r"gymnasium\.id: making Absent-v0 raised KeyError"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_first_episode(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        environment_maker(EnvironmentSection(gymnasium=keys))


def test_the_error_of_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"environment\.gymnasium: .*pip install podium\[gymnasium\]"):
        environment_maker(EnvironmentSection(gymnasium="Corridor-v0"))
