# SPDX-License-Identifier: Apache-2.0
"""A run that overlaps on real Ray, and its updates run again from its record."""

from __future__ import annotations

import pytest

from helpers.on_policy import ledger, numbers, rl_recipe
from helpers.workspace import Workspace
from podium import api
from podium.replaying import FreshResult, ReplayResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# How far the data was read, and what generators did: a replay has no use for more prompts than its steps have.
NOT_OF_UPDATES = ("epoch", "prompts/too_long")


def test_a_replay_of_a_stale_run_ends_with_the_same_weights(workspace: Workspace, local_ray: None) -> None:
    recipe = rl_recipe(
        workspace, "stale", steps=6, rollout={"staleness": 2},
        placement={"launcher": "ray", "layout": "split", "devices": 3, "rollout_devices": 1},
    )  # fmt: skip
    api.train(workspace.path / recipe)
    run = workspace.path / "runs" / "stale"
    result = api.replay(run)

    assert isinstance(result, ReplayResult)
    assert result.weights is not None
    assert result.weights.num_tensors > 10
    assert result.is_identical, result.lines()
    assert result.first is None
    original, again = numbers(run), numbers(result.folder)
    assert max(values["staleness/max"] for values in original.values()) >= 1  # else there was nothing to record
    for values in (*original.values(), *again.values()):
        for name in NOT_OF_UPDATES:
            values.pop(name, None)
    assert again == original
    assert ledger(result.folder) == ledger(run)

    fresh = api.replay(run, fresh=True)
    assert isinstance(fresh, FreshResult)
    assert max(values["staleness/max"] for values in numbers(fresh.folder).values()) == 0
    assert [line.split()[0] for line in fresh.lines()[1:7]] == ["1", "2", "3", "4", "5", "6"]
