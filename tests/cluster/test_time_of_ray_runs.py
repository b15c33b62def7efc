# SPDX-License-Identifier: Apache-2.0
"""Where the time of runs on Ray went, with learners and generators on devices of their own."""

from __future__ import annotations

import pytest

from helpers.on_policy import rl_recipe
from helpers.times import largest_wait, times_of
from helpers.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(300)]

REWARD = """
import time

def slow(answer):
    time.sleep(0.2)  # longer than an update takes on a busy machine
    return sum(letter.isdigit() for letter in answer) / max(1, len(answer))
"""


@pytest.mark.parametrize("layout", ["split", "elastic"])
def test_learners_and_generators_wait_for_a_slow_reward(workspace: Workspace, local_ray: None, layout: str) -> None:
    (workspace.path / "slow.py").write_text(REWARD)
    recipe = rl_recipe(
        workspace, steps=6, reward=[{"function": "slow.py:slow"}], rollout={"staleness": 1},
        placement={"launcher": "ray", "layout": layout, "devices": 2},
    )  # fmt: skip
    outcome = workspace.podium("train", recipe)
    assert outcome.code == 0, outcome
    by_kind = times_of(workspace.path / "runs" / "sums")
    assert largest_wait(by_kind["train"]) == largest_wait(by_kind["rollout"]) == "waiting for grading"
    assert "seconds of workers" in outcome.out


def test_learner_and_generator_wait_for_each_other(workspace: Workspace, local_ray: None) -> None:
    recipe = rl_recipe(
        workspace, steps=6, rollout={"max_new_tokens": 64},
        placement={"launcher": "ray", "layout": "split", "devices": 2},
    )  # fmt: skip
    assert workspace.podium("train", recipe).code == 0
    by_kind = times_of(workspace.path / "runs" / "sums")
    learner, generator = by_kind["train"].seconds, by_kind["rollout"].seconds
    assert learner["update"] > 0
    assert generator["generation"] > 0
    of_generation = learner.get("waiting for the other role", 0.0) + learner.get(
        "waiting for the tail of generation", 0.0
    )
    assert of_generation > 0.8 * generator["generation"]
    assert generator["waiting for the other role"] > 0.8 * learner["update"]
