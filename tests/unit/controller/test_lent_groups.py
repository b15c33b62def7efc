# SPDX-License-Identifier: Apache-2.0
"""Layout elastic with generators of two devices, on a simulated cluster: the learner's devices are lent in pairs, come
back, and die while they are lent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.simulated_faults import CalmRuns, Case
from helpers.simulated_runs import METHOD_COSTS, groups_by_step, method, metrics_by_step, recipe_of, simulated
from podium.cluster.simulated_faults import SimulatedDeath, SimulatedLoss, SimulatedSilence
from podium.controller.simulation.controlled import SimulatedRun
from podium.controller.simulation.faults import SimulatedFault, SimulatedStop
from podium.observe.timeline import read_timeline
from podium.observe.timing import LENT, RECALLED

# Each has two learners.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "elastic, devices": {"layout": "elastic", "devices": 4, "rollout_devices": 2},
    "elastic": {"layout": "elastic", "devices": 4, "rollout_devices": 2, "generator": {"tensor": 2}},
    "split": {"layout": "split", "devices": 4, "rollout_devices": 2, "generator": {"tensor": 2}},
    "colocated": {"layout": "colocated", "devices": 2, "generator": {"tensor": 2}},
}


def run_on(folder: Path, placement: Mapping[str, Any], *, name: str = "grpo", staleness: int = 0) -> SimulatedRun:
    rollout = {"staleness": staleness, "on_new_weights": "keep"} if staleness else {}
    recipe = recipe_of(folder, **method(name, folder), placement=dict(placement), rollout=rollout)
    return simulated(recipe, METHOD_COSTS)


def lent_between(run: SimulatedRun) -> list[tuple[float, float]]:
    """When the learner's devices were lent and recalled."""
    marks = [span for span in read_timeline(run.result.folder) if span.name in (LENT, RECALLED)]
    marks.sort(key=lambda span: span.begin_s)
    assert [span.name for span in marks] == [LENT, RECALLED] * (len(marks) // 2)
    times = [span.begin_s for span in marks]
    return list(zip(times[::2], times[1::2], strict=True))


@pytest.fixture(scope="module")
def calm_runs(tmp_path_factory: pytest.TempPathFactory) -> CalmRuns:
    return CalmRuns(tmp_path_factory.mktemp("calm"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "turns", "ppo"])
def test_at_staleness_0_pairs_that_are_lent_train_what_other_layouts_train(tmp_path: Path, name: str) -> None:
    runs = {layout: run_on(tmp_path / layout, placement, name=name) for layout, placement in LAYOUTS.items()}

    lines = metrics_by_step(runs["elastic"].result.folder)
    assert sum(lines[step]["lending/tokens"] for step in lines if step > 0) > 0
    assert len({run.weights for run in runs.values()}) == 1
    groups = [groups_by_step(run.result.folder) for run in runs.values()]
    assert all(each == groups[0] for each in groups)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "turns"])
def test_episodes_of_a_pair_that_is_recalled_continue_elsewhere(tmp_path: Path, name: str) -> None:
    """Above staleness 0 devices are recalled while they still have episodes."""
    run = run_on(tmp_path, LAYOUTS["elastic"], name=name, staleness=2)

    lines = metrics_by_step(run.result.folder)
    steps = [step for step in lines if step > 0]
    assert len(lent_between(run)) > 1
    assert sum(lines[step]["lending/tokens"] for step in steps) > 0
    if name == "grpo":  # episodes stay with their runner, and its requests move
        assert sum(lines[step]["lending/moved_episodes"] for step in steps) > 0
    assert sorted(groups_by_step(run.result.folder)) == steps
    assert max(lines[step]["staleness/max"] for step in steps) in (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("slot", [0, 1], ids=["engine", "follower"])
@pytest.mark.parametrize("fault", [SimulatedDeath, SimulatedSilence, SimulatedLoss])
@pytest.mark.parametrize("name", ["grpo", "turns"])
def test_a_device_of_a_lent_pair_dies(calm_runs: CalmRuns, name: str, fault: type[SimulatedDeath], slot: int) -> None:
    """Whether it has the engine or follows it. Its silence is noticed by its heartbeats alone."""
    case = Case(layout="elastic", staleness=0, variant=4, method=name, tensor=2)
    _, calm = calm_runs.of(case)
    more = {"seconds": 100.0} if fault is SimulatedSilence else {}
    for begin_s, end_s in lent_between(calm)[1:3]:
        run = calm_runs.with_faults(case, [fault(at_s=(begin_s + end_s) / 2, pool="train", slot=slot, **more)])
        assert run.weights == calm.weights
        assert calm.ended_s < run.ended_s < calm.ended_s + 60.0  # nobody waits for a deadline


def faults_of(end: str, at_s: float) -> list[SimulatedFault]:
    if end == "stop":
        return [SimulatedStop(at_s=at_s)]
    return [SimulatedDeath(at_s=at_s, pool="rollout", slot=slot) for slot in ((0,) if end == "one" else (0, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stop", "one", "all"])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("name", ["grpo", "turns"])
def test_a_run_that_lends_a_pair_is_resumed_and_loses_its_own_generators(
    calm_runs: CalmRuns, name: str, staleness: int, end: str
) -> None:
    case = Case(layout="elastic", staleness=staleness, variant=4, method=name, tensor=2)
    _, calm = calm_runs.of(case)
    for begin_s, end_s in lent_between(calm)[:2]:
        run = calm_runs.with_faults(case, faults_of(end, (begin_s + end_s) / 2))
        assert staleness or run.weights == calm.weights
