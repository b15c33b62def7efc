# SPDX-License-Identifier: Apache-2.0
"""GRPO on real Ray over four workers, two that learn and two that generate, gives the numbers of one process."""

from __future__ import annotations

import pytest

from helpers.on_policy import numbers, rl_recipe
from helpers.workspace import Workspace
from podium import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_two_learners_and_two_generators_have_the_numbers_of_one_process(workspace: Workspace, local_ray: None) -> None:
    for name, placement in (
        ("inline", {"launcher": "inline"}),
        ("split", {"launcher": "ray", "layout": "split", "devices": 4, "rollout_devices": 2}),
    ):
        api.train(workspace.path / rl_recipe(workspace, name, placement=placement))

    inline, split = (numbers(workspace.path / "runs" / name) for name in ("inline", "split"))
    assert split.keys() == inline.keys()
    for step, values in inline.items():
        for name in ("reward/mean", "response/mean", "loss", "grad_norm", "entropy", "trained_tokens"):
            assert split[step][name] == pytest.approx(values[name], rel=1e-5, abs=1e-5), (step, name)
        assert split[step]["staleness/max"] == 0
