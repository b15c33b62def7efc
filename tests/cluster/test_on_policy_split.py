# SPDX-License-Identifier: Apache-2.0
"""GRPO on real Ray over four workers, two that learn and two that generate, gives the numbers of one process."""

from __future__ import annotations

import sqlite3

import pytest

from helpers.on_policy import numbers, rl_recipe
from helpers.workspace import Workspace
from podium import api
from podium.observe.timeline import read_timeline

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


def test_truncated_sampling_goes_with_staleness(workspace: Workspace, local_ray: None) -> None:
    recipe = rl_recipe(
        workspace, "truncated", steps=4, rollout={"staleness": 1, "top_p": 0.9},
        placement={"launcher": "ray", "layout": "split", "devices": 2},
    )  # fmt: skip
    api.train(workspace.path / recipe)

    values = numbers(workspace.path / "runs" / "truncated")
    steps = [values[step] for step in (1, 2, 3, 4)]
    assert max(each["staleness/max"] for each in steps) == 1
    for each in steps:
        assert 0.5 < each["correction/mean"] < 1.0
        assert 0 < each["correction/ess"] <= 1.0
        assert each.get("staleness/kl", 1.0) > 0
        # not at least top_p: after weights in flight the engine continues from a cache of the old ones
        assert 0.85 < each.get("correction/kept_mass", 1.0) < 1.05
        assert each["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert "gap/mean" not in each


@pytest.mark.parametrize("on_new_weights", ["keep", "recompute", "finish"])
def test_generation_overlaps_updates_within_the_bound_of_staleness(
    workspace: Workspace, local_ray: None, on_new_weights: str
) -> None:
    recipe = rl_recipe(
        workspace, "stale", steps=5, rollout={"staleness": 2, "on_new_weights": on_new_weights},
        placement={"launcher": "ray", "layout": "split", "devices": 3, "rollout_devices": 2},
    )  # fmt: skip
    api.train(workspace.path / recipe)

    values = numbers(workspace.path / "runs" / "stale")
    assert [step for step in values if step > 0] == [1, 2, 3, 4, 5]
    oldest = max(values[step]["staleness/max"] for step in (1, 2, 3, 4, 5))
    assert 1 <= oldest <= 2
    assert all({"staleness/queue", "staleness/in_flight"} <= values[step].keys() for step in (1, 2, 3, 4, 5))
    assert values[5]["ratio/mean"] == pytest.approx(1.0, abs=0.2)
    ledger = sqlite3.connect(workspace.path / "runs" / "stale" / "episodes.sqlite")
    rows = ledger.execute("SELECT prompt_index, trained_version - oldest_version FROM groups ORDER BY 1").fetchall()
    ledger.close()
    assert [row[0] for row in rows] == list(range(len(rows)))
    assert all(0 <= age <= 2 for _, age in rows)

    spans = list(read_timeline(workspace.path / "runs" / "stale"))
    waited = [each for each in spans if each.name == "generator.stream > waiting for prompts"]
    assert {each.worker.partition("@")[0] for each in waited} == {"rollout[0]", "rollout[1]"}
    streams = [each for each in spans if each.name == "generator.stream"]
    assert all(any(one.begin_s <= each.begin_s and each.end_s <= one.end_s for one in streams) for each in waited)
