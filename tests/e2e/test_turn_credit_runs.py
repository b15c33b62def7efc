# SPDX-License-Identifier: Apache-2.0
"""Runs with algorithm.credit: turn, in an environment that rewards turns and in one that does not."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.on_policy import numbers, rl_recipe
from helpers.workspace import Workspace
from podium.runs.rollout_files import KeptEpisode, read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DIALOGUE = """
from podium.environments.protocol import Observation, Outcome

class Dialogue:
    def __init__(self, worth=0.1):
        self.worth = worth

    async def reset(self, task):
        return Observation()

    async def step(self, turn):
        digits = sum(letter.isdigit() for letter in turn.text)
        return Outcome(messages=f"{digits} digits more?", reward=digits * self.worth, done=digits == 3)
"""


def trained(workspace: Workspace, name: str, worth: float, **algorithm: Any) -> Path:
    (workspace.path / "dialogue.py").write_text(DIALOGUE)
    environment = {"environment": "dialogue.py:Dialogue", "max_turns": 3, "options": {"worth": worth}}
    recipe = rl_recipe(
        workspace, name, steps=2, environment=environment, algorithm=algorithm, run={"rollouts": {"keep": "all"}}
    )  # fmt: skip
    outcome = workspace.podium("train", recipe)
    assert outcome.code == 0, outcome
    return workspace.path / "runs" / name


def advantages_of_turns(episode: KeptEpisode) -> list[float]:
    """Of each run of tokens that the policy sampled, which all have the same one."""
    found = []
    for is_trained, tokens in groupby(zip(episode.loss_mask, episode.advantages, strict=True), lambda each: each[0]):
        if is_trained:
            [advantage] = {value for _, value in tokens}
            assert advantage is not None
            found.append(advantage)
    return found


def returns_of(episode: KeptEpisode, discount: float) -> list[float]:
    """By hand, from what the episode says."""
    said = [str(each["content"]) for each in episode.messages if each["role"] == "assistant"]
    rewards = [sum(letter.isdigit() for letter in text) * 0.1 for text in said]
    assert episode.reward is not None
    rewards[-1] += episode.reward - sum(rewards)
    return [sum(discount**later * reward for later, reward in enumerate(rewards[turn:])) for turn in range(len(said))]


def test_the_tokens_of_a_turn_are_trained_with_what_came_after_it(workspace: Workspace) -> None:
    run = trained(workspace, "turns", 0.1, credit="turn", turn_discount=0.5, advantage="group_centered")

    num_turns, num_apart = [], 0
    for step in (1, 2):
        episodes = list(read_rollouts(run, step))
        for group in {episode.group for episode in episodes}:
            members = [episode for episode in episodes if episode.group == group]
            returns = [returns_of(episode, 0.5) for episode in members]
            mean = np.mean([np.mean(each) for each in returns])
            for episode, own in zip(members, returns, strict=True):
                assert advantages_of_turns(episode) == pytest.approx([value - mean for value in own], abs=1e-5)
                num_turns.append(len(own))
                num_apart += len(set(own)) > 1
    assert len(num_turns) == 32
    assert max(num_turns) == 3
    assert num_apart > 8


def test_without_rewards_of_turns_a_run_is_the_one_with_credit_to_episodes(workspace: Workspace) -> None:
    runs = [numbers(trained(workspace, credit, 0.0, credit=credit)) for credit in ("episode", "turn")]

    for step in (1, 2):
        of_episodes, of_turns = (each[step] for each in runs)
        assert of_turns["turns/mean"] > 1
        for name in ("loss", "grad_norm", "reward/mean"):
            assert of_turns[name] == pytest.approx(of_episodes[name], rel=1e-4, abs=1e-6), name
        assert of_turns["grad_norm"] > 0
