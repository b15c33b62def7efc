# SPDX-License-Identifier: Apache-2.0
"""Whole runs on the simulated cluster: seconds that can be computed by hand, and the same schedule as the simulation
that has no controller."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.simulated_runs import COSTS, groups_by_step, metrics_by_step, simulated, simulated_recipe
from podium.controller.layout import num_learners
from podium.controller.open_groups import schedule_settings
from podium.controller.simulation.costs import CostModel, DeviceLayout, GenerationCost, LogNormal, UpdateCost
from podium.controller.simulation.run import simulate
from podium.errors import ClusterError
from podium.recipe import GrpoRecipe
from podium.runs.folder import RunFolder

# One token a second in every lane, answers of 10 tokens, one second for an update of 10 tokens.
PLAIN = CostModel(
    generation=GenerationCost(weights_s=1.0), answer_tokens=LogNormal(median=10.0), update=UpdateCost(token_s=0.1)
)
ONE = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_running": 2}
SPLIT = {"layout": "split", "devices": 2}


def test_a_colocated_step_is_the_sum_of_its_phases(tmp_path: Path) -> None:
    """10 s of generation, 3 s of grading, and an update of 20 tokens. Generators leave their device while graders work,
    and return in 0.25 s after the update."""
    recipe = simulated_recipe(tmp_path, rollout=ONE, steps=4)
    costs = replace(PLAIN, grading_s=LogNormal(median=3.0), switch_s=0.25)

    run = simulated(recipe, costs)

    assert run.committed_s == pytest.approx([15.0, 30.25, 45.5, 60.75])
    metrics = metrics_by_step(run.result.folder)
    assert metrics[2]["step_s"] == pytest.approx(15.25)
    assert metrics[2]["time/rollout_s"] == pytest.approx(10.0)
    assert metrics[2]["time/grade_s"] == pytest.approx(3.0)
    assert metrics[2]["time/update_s"] == pytest.approx(2.0)
    assert metrics[2]["time/publish_s"] == pytest.approx(0.25)
    assert metrics[2]["update/mfu"] == pytest.approx(1.0)
    assert metrics[2]["rollout/generated_tokens"] == 20.0


def test_a_learner_that_waits_says_whether_for_episodes_or_for_rewards(tmp_path: Path) -> None:
    """A step takes the 10 s of its generation: 2 s of them update, the last 3 s grade the step's only group."""
    recipe = simulated_recipe(tmp_path, rollout={**ONE, "staleness": 1}, placement=SPLIT, steps=8)

    run = simulated(recipe, replace(PLAIN, grading_s=LogNormal(median=3.0)))

    metrics = metrics_by_step(run.result.folder)
    for step in (4, 5, 6):
        assert metrics[step]["step_s"] == pytest.approx(10.0)
        assert metrics[step]["time/update_s"] == pytest.approx(2.0)
        assert metrics[step]["time/wait_s"] == pytest.approx(5.0)
        assert metrics[step]["time/grade_s"] == pytest.approx(3.0)


@pytest.mark.parametrize("update_s", [10.0, 4.0])
def test_with_staleness_1_a_step_takes_the_longer_phase_and_not_the_sum(tmp_path: Path, update_s: float) -> None:
    recipe = simulated_recipe(tmp_path, rollout={**ONE, "staleness": 1}, placement=SPLIT, steps=8)
    costs = replace(PLAIN, update=UpdateCost(token_s=update_s / 20))

    committed_s = simulated(recipe, costs).committed_s

    assert committed_s[5] - committed_s[2] == pytest.approx(3 * max(10.0, update_s))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_one_another(tmp_path: Path) -> None:
    def run(name: str, seed: int) -> tuple[Any, ...]:
        recipe = simulated_recipe(tmp_path, rollout={"staleness": 1}, placement=SPLIT, run={"name": name})
        done = simulated(recipe, seed=seed)
        return done.committed_s, metrics_by_step(done.result.folder), groups_by_step(done.result.folder)

    first, second = run("first", 7), run("second", 7)
    assert first == second
    assert first[0] != run("third", 8)[0]


@pytest.mark.slow
def test_a_simulated_run_imports_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from helpers.simulated_runs import simulated, simulated_recipe\n"
        "run = simulated(simulated_recipe(Path(sys.argv[1]), steps=3))\n"
        "assert run.result.step == 3\n"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules)\n"
    )
    folder = Path(__file__).resolve().parents[2]  # of the helpers
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_resumed_run_trains_on_every_prompt_once(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"rollout": {"staleness": 2}, "placement": SPLIT, "checkpoint": {"every": 2, "keep": 9}}
    simulated(simulated_recipe(tmp_path, **changes, steps=6))
    longer = simulated_recipe(tmp_path, **changes, steps=8)

    run = simulated(longer, resume_step=4)

    trained = [group[0] for groups in groups_by_step(run.result.folder).values() for group in groups]
    assert sorted(metrics_by_step(run.result.folder)) == list(range(1, 9))
    assert len(trained) == len(set(trained)) == 8 * 4
    assert sorted(trained) == list(range(8 * 4))


def test_agents_are_refused(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def solve(task, base_url, key): ...\n")
    recipe = simulated_recipe(tmp_path, environment={"agent": f"{tmp_path / 'agent.py'}:solve"})
    with pytest.raises(ClusterError, match=r"agents .* are not simulated.*environment\.environment"):
        simulated(recipe)


# --- beside the simulation without a controller ---

SETTINGS: dict[str, dict[str, Any]] = {
    "colocated": {"placement": {"devices": 1}},
    "colocated, two devices": {"placement": {"devices": 2}},
    "split": {"placement": SPLIT},
    "split, three generators": {"placement": {"layout": "split", "devices": 4, "rollout_devices": 3}},
    "staleness 1, keep": {"placement": SPLIT, "rollout": {"staleness": 1, "on_new_weights": "keep"}},
    "staleness 1, recompute": {"placement": SPLIT, "rollout": {"staleness": 1, "on_new_weights": "recompute"}},
    "staleness 1, finish": {"placement": SPLIT, "rollout": {"staleness": 1, "on_new_weights": "finish"}},
    "staleness 2, three generators": {
        "placement": {"layout": "split", "devices": 4, "rollout_devices": 3},
        "rollout": {"staleness": 2, "on_new_weights": "keep"},
    },
    "few lanes": {"placement": SPLIT, "rollout": {"staleness": 1, "on_new_weights": "keep", "max_running": 4}},
}


def _device_layout(recipe: GrpoRecipe) -> DeviceLayout:
    """The controller gives an engine a quarter more episodes than it has lanes."""
    devices, lanes = recipe.placement.devices, recipe.rollout.max_running or 0
    rollout_devices = devices - num_learners(recipe) or None
    return DeviceLayout(devices=devices, rollout_devices=rollout_devices, lanes=lanes, ahead=-(-lanes // 4))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_controller_keeps_the_schedule_of_the_simulation_without_it(tmp_path: Path, name: str, seed: int) -> None:
    """The same groups in the same steps at the same times, but for what the controller adds: it sends the first weights
    of a split layout too, and splits an update of several learners by cost."""
    recipe = simulated_recipe(tmp_path, **SETTINGS[name])
    layout = _device_layout(recipe)

    run = simulated(recipe, seed=seed)
    expected = simulate(schedule_settings(recipe), COSTS, layout, seed=seed)

    first_s = 0.0 if layout.is_colocated else COSTS.publish_s
    slack_s = 1e-6 if layout.num_learners == 1 else 0.3
    groups = groups_by_step(run.result.folder)
    assert [tuple(number for number, _, _ in groups[step]) for step in sorted(groups)] == list(expected.trained_groups)
    assert run.committed_s == pytest.approx([first_s + each for each in expected.committed_s], abs=slack_s)


def test_grading_delays_both_alike(tmp_path: Path) -> None:
    recipe = simulated_recipe(tmp_path, placement=SPLIT, rollout={"staleness": 1, "on_new_weights": "keep"})
    costs = replace(COSTS, grading_s=LogNormal(median=2.0, sigma=0.5))

    run = simulated(recipe, costs)
    expected = simulate(schedule_settings(recipe), costs, _device_layout(recipe))

    assert run.committed_s == pytest.approx([COSTS.publish_s + each for each in expected.committed_s], rel=0.02)


def test_the_folder_of_a_simulated_run_is_a_run_folder(tmp_path: Path) -> None:
    run = simulated(simulated_recipe(tmp_path))
    folder = RunFolder.open(run.result.folder)
    assert folder.state()["status"] == "finished"
    assert run.result.status == "finished"
