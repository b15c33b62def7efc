# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's own environments in on-policy runs: rewards are those of the package, whoever steps it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lake_runs import SMALL, conversation, episodes_of, warm_model

from podium import api
from podium.data.tasks import read_tasks
from podium.environments.environment_factory import environment_maker
from podium.environments.protocol import Turn
from podium.errors import RecipeError
from podium.observe import read_metrics
from podium.recipe.on_policy import EnvironmentSection
from podium.recipe.schema import SourceSection

gymnasium = pytest.importorskip("gymnasium")
pytestmark = [pytest.mark.environments, pytest.mark.timeout(600)]

MOVES = ["left", "down", "right", "up"]
MAP = {"desc": ["SFF", "HFG"], "is_slippery": False}
ILLEGAL = "Illegal action. Answer with one of: left, down, right, up."

TEXT_WORLD = '''
import gymnasium
from gymnasium import spaces


class Echo(gymnasium.Env):
    """Wants the word that it shows, twice."""

    def __init__(self, word="ab"):
        self.observation_space = spaces.Dict({"word": spaces.Text(9), "left": spaces.Discrete(3)})
        self.action_space = spaces.Text(max_length=4, charset="abc")
        self._word = word

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left, self._letter = 2, "abc"[self.np_random.integers(3)]
        return self._seen(), {}

    def step(self, action):
        self._left -= 1
        return self._seen(), float(action == self._word + self._letter), self._left == 0, False, {}

    def _seen(self):
        return {"word": self._word + self._letter, "left": self._left}
'''


@pytest.fixture(scope="module", autouse=True)
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("lake")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        warm_model(folder)
        yield folder


def by_hand(answers: list[str], seed: int) -> tuple[list[str], float]:
    """What the package says to these answers, and the sum of its rewards with the recipe's penalty."""
    lake = gymnasium.make("FrozenLake-v1", **MAP)
    said, reward = [str(lake.reset(seed=seed)[0])], 0.0
    for answer in answers:
        if answer.strip() in MOVES:
            observation, gained, terminated, truncated, _ = lake.step(MOVES.index(answer.strip()))
            said.append(str(observation))
            reward += float(gained)
            if terminated or truncated:
                break
        else:
            said.append(ILLEGAL)
            reward -= 0.1
    return said, reward


def test_rewards_of_a_run_are_those_of_the_package() -> None:
    result = api.train("examples/gymnasium/grpo.yaml", overrides=[*SMALL, "steps=4", "run.name=rewards"])
    episodes = episodes_of(result.folder)
    assert len(episodes) == 4 * 16
    rows = [json.loads(line) for line in Path("demo/lake/train.jsonl").read_text().splitlines()]
    for episode in episodes:
        said, answers = conversation(episode)
        assert episode.row is not None
        expected, reward = by_hand(answers, rows[episode.row]["seed"])
        assert episode.reward == pytest.approx(reward, abs=1e-9)
        assert expected[: len(said)] == said
    assert len({episode.reward for episode in episodes}) > 1
    lines = [line.values for line in read_metrics(result.folder / "metrics.jsonl")]
    counted = {name for line in lines for name in line if name.startswith("environment/")}
    assert counted >= {"environment/turns", "environment/illegal_actions", "environment/terminated"}


def test_a_resumed_run_has_the_episodes_of_an_uninterrupted_one() -> None:
    whole = api.train("examples/gymnasium/grpo.yaml", overrides=[*SMALL, "steps=4", "run.name=whole"])
    part = api.train(
        "examples/gymnasium/grpo.yaml", overrides=[*SMALL, "steps=2", "run.name=part", "checkpoint.every=2"]
    )
    resumed = api.resume(part.folder, overrides=["steps=4"])

    def all_of(folder: Path) -> list[Any]:
        return sorted((each.step, each.group, each.sample, each.tokens, each.reward) for each in episodes_of(folder))

    assert all_of(resumed.folder) == all_of(whole.folder)


def test_spaces_of_the_package_have_texts(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(TEXT_WORLD)
    section = EnvironmentSection(gymnasium=f"{tmp_path / 'echo.py'}:Echo", options={"word": "ca"})
    task = replace(read_tasks([SourceSection(path="demo/lake/train.jsonl")], "data", 1, needs_prompt=False)[0])
    first, second = environment_maker(section)(), environment_maker(section)()
    beginning: Any = first.reset(task)
    assert beginning.messages == second.reset(task).messages  # type: ignore[union-attr]
    word, left = beginning.messages[0]["content"].splitlines()
    assert (word[:8], left) == ("word: ca", "left: 2")
    illegal: Any = first.step(Turn(number=0, text="no"))
    assert (illegal.messages, illegal.done) == (
        "Illegal action. Answer with 1 to 4 of the characters abc", False,
    )  # fmt: skip
    one: Any = first.step(Turn(number=1, text=word.removeprefix("word: ")))
    two: Any = first.step(Turn(number=2, text="aaa"))
    assert [(each.reward, each.done) for each in (one, two)] == [(1.0, False), (0.0, True)]


def test_a_time_limit_of_the_package_truncates(tmp_path: Path) -> None:
    section = EnvironmentSection(
        gymnasium={"id": "FrozenLake-v1", "actions": MOVES}, options={**MAP, "max_episode_steps": 2}
    )
    (task,) = read_tasks([SourceSection(path="demo/lake/train.jsonl")], "data", 1, needs_prompt=False)
    environment: Any = environment_maker(section)()
    environment.reset(task)
    assert not environment.step(Turn(number=0, text="left")).done
    outcome = environment.step(Turn(number=1, text="Left"))
    assert outcome.done
    assert outcome.metrics == {"turns": 1.0, "illegal_actions": 0.0, "terminated": 0.0, "truncated": 1.0}


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"id": "CartPole-v1"}, r"environment\.gymnasium\.render: observations of CartPole-v1 are Box"),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, r"environment\.gymnasium\.actions: 1 name"),
        ({"id": "NoSuchLake-v1"}, r"environment\.gymnasium\.id: making NoSuchLake-v1 raised"),
    ],
)
def test_what_cannot_be_played_is_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        environment_maker(EnvironmentSection(gymnasium=keys))


def test_the_loop_of_episodes_is_not_needed_to_make_one() -> None:
    """Environments of the package are made in the thread that resets them."""
    section = EnvironmentSection(gymnasium={"id": "FrozenLake-v1", "actions": MOVES}, options=MAP)
    make = environment_maker(section)
    (task,) = read_tasks([SourceSection(path="demo/lake/train.jsonl")], "data", 1, needs_prompt=False)

    async def together() -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(make().reset, task) for _ in range(16)))

    assert {each.messages[0]["content"] for each in asyncio.run(together())} == {"0"}
