# SPDX-License-Identifier: Apache-2.0
"""Kept episodes of a run on real Ray whose generators go on during updates: every token has the version that sampled
it."""

from __future__ import annotations

import pytest

from helpers.on_policy import ledger, numbers, rl_recipe
from helpers.workspace import Workspace
from podium import api
from podium.runs.rollout_files import read_rollouts, rollout_facts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_stale_tokens_have_the_version_that_sampled_them(workspace: Workspace, local_ray: None) -> None:
    split = {"launcher": "ray", "layout": "split", "devices": 2}
    recipe = rl_recipe(
        workspace, "stale", steps=6, rollout={"staleness": 1}, placement=split, run={"rollouts": {"keep": "all"}}
    )  # fmt: skip
    api.train(workspace.path / recipe)

    run = workspace.path / "runs" / "stale"
    metrics, num_stale = numbers(run), 0
    for step in range(1, 7):
        episodes = list(read_rollouts(run, step))
        trained_version = rollout_facts(run, step)["version"]
        assert trained_version == step - 1
        ages = [
            trained_version - version
            for episode in episodes
            if any(episode.advantages or ())  # others have no gradient, and the update leaves them out
            for version, is_trained in zip(episode.versions, episode.loss_mask, strict=True)
            if version is not None and is_trained
        ]
        assert set(ages) <= {0, 1}
        has_stale = any(name.startswith("staleness/tokens/") for name in metrics[step])
        for age in (0, 1):
            expected = metrics[step].get(f"staleness/tokens/{age}", 0.0) if has_stale else 1.0 - age
            assert ages.count(age) / len(ages) == pytest.approx(expected)
        num_stale += ages.count(1)
        assert sum(sum(episode.loss_mask) for episode in episodes) == metrics[step]["trained_tokens"]
    assert num_stale > 0
    found = [(each.group, each.sample, each.step, each.state, each.reward) for each in read_rollouts(run)]
    assert found == [(row[0], row[1], row[4], row[5], row[7]) for row in sorted(ledger(run), key=lambda row: row[4])]
