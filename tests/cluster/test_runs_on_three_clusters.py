# SPDX-License-Identifier: Apache-2.0
"""One recipe of each kind of method on all three clusters: real roles on Ray and in threads of one process, simulated
roles on a virtual clock. The controller's records are alike: ledger, metrics, versions and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from helpers.on_policy import rl_recipe
from helpers.simulated_runs import METHOD_COSTS, groups_by_step, metrics_by_step
from helpers.workspace import Workspace
from podium import api
from podium.controller.simulation.controlled import simulate_run
from podium.controller.simulation.costs import EnvironmentCost, LogNormal
from podium.models.folder import read_config
from podium.programs.controlled import load_program
from podium.recipe import OnPolicyRecipe, load_recipe
from podium.recipe.resolving import resolved
from podium.runs.folder import RunFolder

STEPS, PROMPTS = 4, 4
# Two answers an episode, with a tool's reply between them.
GAME = """
from podium.environments.protocol import Outcome


class Game:
    async def step(self, turn):
        return Outcome(messages="and then", done=turn.number == 1)

    async def reset(self, task):
        return None
"""
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "kl": {"algorithm": {"kl": {"coefficient": 0.1, "where": "reward", "refresh_every": 2}}},
    "ppo": {"program": "ppo", "algorithm": {"epochs": 2, "mini_batches": 2}},
    "distill": {"program": "on_policy_distill"},
    "turns": {"environment": {"environment": "game.py:Game", "max_turns": 3}},
}
SIMULATED_COSTS = replace(
    METHOD_COSTS, environment=EnvironmentCost(turns=LogNormal(median=2.0), call_s=LogNormal(median=0.2, sigma=1.0))
)
SPLIT = {"launcher": "ray", "layout": "split", "devices": 2}


@dataclass(frozen=True)
class Kind:
    """One of the clusters, at a staleness that it allows: threads of one process have one device."""

    placement: dict[str, Any]
    staleness: int
    train: Callable[[Path], object]
    resume: Callable[[Path, int], object]  # of a run's folder, from a step


def _simulate(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert isinstance(recipe, OnPolicyRecipe)
    recipe = resolved(recipe, read_config(Path(recipe.model.path), "model.path"))
    simulate_run(load_program(recipe.program), recipe, RunFolder.create(recipe), SIMULATED_COSTS)


def _simulate_again(folder: Path, step: int) -> None:
    recipe = load_recipe(folder / "recipe.yaml")
    assert isinstance(recipe, OnPolicyRecipe)
    simulate_run(load_program(recipe.program), recipe, RunFolder.open(folder), SIMULATED_COSTS, resume_step=step)


def _resume(folder: Path, step: int) -> None:
    api.resume(folder, step=step)


ON_RAY = [pytest.mark.serial, pytest.mark.slow, pytest.mark.timeout(400)]
KINDS = [
    pytest.param(Kind({}, 0, _simulate, _simulate_again), id="simulated"),
    pytest.param(Kind(SPLIT, 1, _simulate, _simulate_again), id="simulated, staleness 1"),
    pytest.param(Kind({"launcher": "inline"}, 0, api.train, _resume), id="inline", marks=pytest.mark.slow),
    pytest.param(Kind({"launcher": "ray"}, 0, api.train, _resume), id="ray", marks=ON_RAY),
    pytest.param(Kind(SPLIT, 1, api.train, _resume), id="ray, staleness 1", marks=ON_RAY),
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    if kind.train is api.train and kind.placement["launcher"] == "ray":
        request.getfixturevalue("local_ray")
    return kind


def _recipe(workspace: Workspace, name: str, kind: Kind, method: str) -> Path:
    (workspace.path / "game.py").write_text(GAME)
    return workspace.path / rl_recipe(
        workspace, name, steps=STEPS, checkpoint={"every": 2, "keep": 9, "background": False},
        rollout={"staleness": kind.staleness, "prompts_per_step": PROMPTS}, placement=kind.placement,
        **METHODS[method], **({"teachers": [{"path": str(workspace.model)}]} if method == "distill" else {}),
    )  # fmt: skip


def _check_ledger(folder: Path, staleness: int) -> None:
    """Every group once, the first prompts first, and none older than the bound."""
    groups = groups_by_step(folder)
    trained = [index for step in sorted(groups) for index, _, _ in groups[step]]
    assert list(groups) == list(range(1, STEPS + 1))
    assert all(len(step) == PROMPTS for step in groups.values())
    assert sorted(trained) == list(range(STEPS * PROMPTS))
    if not staleness:
        assert trained == sorted(trained)
    for step, rows in groups.items():
        assert all(version == step - 1 for _, _, version in rows)  # every step updates the weights
        assert all(0 <= version - oldest <= staleness for _, oldest, version in rows)


def _names(values: dict[int, dict[str, float]]) -> set[str]:
    """Names of all metrics but those of single ages, which depend on the schedule."""
    ages = tuple(f"staleness/{part}" for part in ("tokens/", "kl", "ess"))
    return {name for step in values.values() for name in step if not name.startswith(ages)}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_and_its_continuation_leave_the_same_records(workspace: Workspace, kind: Kind, method: str) -> None:
    kind.train(_recipe(workspace, "run", kind, method))
    folder = workspace.path / "runs" / "run"
    _check_ledger(folder, kind.staleness)
    before = metrics_by_step(folder)

    kind.resume(folder, 2)

    _check_ledger(folder, kind.staleness)
    again = metrics_by_step(folder)
    assert list(again) == list(before)
    assert again[2] == before[2]
    _simulate(_recipe(workspace, "simulated", kind, method))
    assert _names(before) == _names(metrics_by_step(workspace.path / "runs" / "simulated"))
