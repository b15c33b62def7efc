# SPDX-License-Identifier: Apache-2.0
"""Generators that leave and join while a simulated run goes on. At staleness 0 the weights (a digest of all updates)
are those of the run that nobody left."""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from helpers.simulated_faults import FAULT_COSTS, RESTARTS, CalmRuns, Case, check_groups, fault_recipe, run_with
from helpers.simulated_runs import simulated_recipe
from podium.cluster.simulated_faults import (
    SimulatedDeath,
    SimulatedDrain,
    SimulatedJoin,
    SimulatedLoss,
    SimulatedNodeLoss,
    SimulatedNotice,
    SimulatedSilence,
)
from podium.controller.simulation.controlled import SimulatedRun, simulate_run
from podium.errors import PlacementError, RecipeError, WorkerDiedError
from podium.programs.grpo import grpo
from podium.recipe.schema import OnPolicyPlacementSection
from podium.runs.events import membership_changes, recoveries
from podium.runs.folder import RunFolder

FOREVER_S = 1e6


@pytest.fixture(scope="module")
def calm_runs(tmp_path_factory: pytest.TempPathFactory) -> CalmRuns:
    return CalmRuns(tmp_path_factory.mktemp("calm"))


def most_attempts(run: SimulatedRun) -> int:
    """How often an episode of the run was begun anew, at most."""
    with closing(sqlite3.connect(run.result.folder / "episodes.sqlite")) as file:
        (most,) = file.execute("SELECT MAX(attempts) FROM groups").fetchone()
    return int(most)


@pytest.mark.parametrize("layout", ["split", "elastic"])
@pytest.mark.parametrize("offset_s", [-0.3, 0.5], ids=["in an update", "in generation"])
def test_a_run_goes_on_with_fewer_generators_when_a_node_is_gone(
    tmp_path: Path, calm_runs: CalmRuns, layout: str, offset_s: float
) -> None:
    _, calm = calm_runs.of(Case(layout=layout, staleness=0))
    loss = SimulatedNodeLoss(at_s=calm.committed_s[1] + offset_s, node=0, seconds=FOREVER_S)
    recipe = fault_recipe(tmp_path / "lost", layout, 0)

    run = run_with(recipe, [loss])

    (recovery,) = recoveries(run.result.folder)
    assert (recovery.part, recovery.remedy) == ("generator", "fewer")
    assert run.ended_s < 3 * calm.ended_s  # it waits for nobody
    assert run.weights == calm.weights
    check_groups(run, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["split", "elastic"])
@pytest.mark.parametrize("offset_s", [-0.3, 0.5, None], ids=["in an update", "in generation", "in an evaluation"])
def test_a_node_dies_with_more_generators_than_placement_restarts(
    calm_runs: CalmRuns, layout: str, offset_s: float | None
) -> None:
    """They are four deaths of different workers, and none of them fails again and again."""
    is_evaluation = offset_s is None
    case = Case(layout=layout, staleness=0, variant=int(is_evaluation), slots_per_node=4, restarts=RESTARTS)
    recipe, calm = calm_runs.of(case)
    assert recipe.placement.restarts == OnPolicyPlacementSection().restarts == 3
    at_s = calm.committed_s[1] + (1.5 if offset_s is None else offset_s)

    run = calm_runs.with_faults(case, [SimulatedNodeLoss(at_s=at_s, node=0, seconds=FOREVER_S)])

    assert run.weights == calm.weights
    assert run.ended_s < 3 * calm.ended_s


def test_all_generators_of_a_run_may_die_at_once(calm_runs: CalmRuns) -> None:
    case = Case(layout="split", staleness=0, slots_per_node=4, restarts=1)
    _, calm = calm_runs.of(case)
    losses = [SimulatedNodeLoss(at_s=calm.committed_s[0] + 0.5, node=node, seconds=5.0) for node in (0, 1)]

    run = calm_runs.with_faults(case, losses)

    assert run.weights == calm.weights
    assert run.ended_s > losses[0].at_s + 5.0


def test_a_generator_whose_successors_die_ends_the_run(tmp_path: Path) -> None:
    """The budget is one of each generator: here it is the same one that dies four times in a step."""
    calm = run_with(fault_recipe(tmp_path / "calm", "split", 0, devices=2, rollout_devices=1))
    begin_s = calm.committed_s[0] + 0.5
    deaths = [SimulatedDeath(at_s=begin_s + 2.5 * number, pool="rollout", slot=0) for number in range(4)]

    run = run_with(fault_recipe(tmp_path / "three", "split", 0, devices=2, rollout_devices=1, restarts=3), deaths[:3])
    assert run.weights == calm.weights
    assert [each.step for each in recoveries(run.result.folder)] == [1, 1, 1]

    with pytest.raises(WorkerDiedError, match=r"rollout\[0\]"):
        run_with(fault_recipe(tmp_path / "four", "split", 0, devices=2, rollout_devices=1, restarts=3), deaths)


def test_a_generator_joins_when_there_is_a_node_again(tmp_path: Path, calm_runs: CalmRuns) -> None:
    _, calm = calm_runs.of(Case(layout="split", staleness=0))
    loss = SimulatedNodeLoss(at_s=calm.committed_s[0] + 0.5, node=0, seconds=3.0)

    run = run_with(fault_recipe(tmp_path / "lost", "split", 0), [loss])

    assert [each.remedy for each in recoveries(run.result.folder)] == ["fewer"]
    (change,) = membership_changes(run.result.folder)
    assert (change.change, change.generators) == ("joined", 2)
    assert run.weights == calm.weights


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("layout", ["split", "elastic"])
def test_a_run_without_any_generator_waits_for_one(
    tmp_path: Path, calm_runs: CalmRuns, layout: str, staleness: int
) -> None:
    _, calm = calm_runs.of(Case(layout=layout, staleness=staleness))
    losses = [SimulatedNodeLoss(at_s=calm.committed_s[0] + 0.5, node=node, seconds=100.0) for node in (0, 1)]
    recipe = fault_recipe(tmp_path / "lost", layout, staleness)

    run = run_with(recipe, losses)

    # The learner's devices are lent when the generators are gone, and do all of it.
    assert (run.ended_s > 100.0) == (layout == "split")
    check_groups(run, recipe)
    if staleness == 0:
        assert run.weights == calm.weights


def test_a_run_that_gets_no_generator_ends_and_says_what_to_do(tmp_path: Path) -> None:
    losses = [SimulatedNodeLoss(at_s=4.0, node=node, seconds=FOREVER_S) for node in (0, 1)]
    with pytest.raises(PlacementError, match=r"for 600 s there was no place .* Add a node"):
        run_with(fault_recipe(tmp_path / "lost", "split", 0), losses)


def test_without_restarts_a_generator_that_dies_ends_the_run(tmp_path: Path) -> None:
    death = SimulatedDeath(at_s=4.0, pool="rollout", slot=0)
    with pytest.raises(WorkerDiedError, match=r"rollout\[0\]"):
        run_with(fault_recipe(tmp_path / "fragile", "split", 0, restarts=0), [death])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "staleness"),
    [
        ("split", 2),
        ("elastic", 0),
        pytest.param("split", 0, marks=pytest.mark.slow),
        pytest.param("elastic", 2, marks=pytest.mark.slow),
    ],
)
def test_generators_join_up_to_the_recipes_number_and_the_run_is_faster(
    tmp_path: Path, layout: str, staleness: int
) -> None:
    def run(name: str, *faults: Any, **placement: Any) -> SimulatedRun:
        rollout = {"staleness": staleness, "prompts_per_step": 8, "max_running": 2}
        recipe = simulated_recipe(
            tmp_path / name, rollout=rollout, steps=5,
            placement={"layout": layout, "devices": 2, "rollout_devices": 1, **placement},
        )  # fmt: skip
        return simulate_run(grpo, recipe, RunFolder.create(recipe), FAULT_COSTS, faults=faults, limit_s=1e5)

    joins = [SimulatedJoin(at_s=at_s) for at_s in (5.0, 12.0, 13.0)]
    alone, fixed = run("alone"), run("fixed", *joins)
    joined = run("joined", *joins, max_rollout_devices=3)

    assert list(membership_changes(fixed.result.folder)) == []
    changes = list(membership_changes(joined.result.folder))
    assert [(each.change, each.generators) for each in changes] == [("joined", 2), ("joined", 3)]
    assert joined.ended_s < 0.9 * alone.ended_s
    if staleness == 0:
        assert joined.weights == alone.weights == fixed.weights


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["split", "elastic"])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("is_drained", [False, True], ids=["SIGTERM", "drained"])
def test_the_sequences_of_a_generator_that_leaves_move_with_their_tokens(
    tmp_path: Path, calm_runs: CalmRuns, layout: str, staleness: int, is_drained: bool
) -> None:
    _, calm = calm_runs.of(Case(layout=layout, staleness=staleness))
    at_s = calm.committed_s[0] + 0.7
    recipe = fault_recipe(tmp_path / "left", layout, staleness)

    run = run_with(
        recipe,
        [
            SimulatedDrain(at_s=at_s, node=1, grace_s=30.0, seconds=FOREVER_S)
            if is_drained
            else SimulatedNotice(at_s=at_s, pool="rollout", slot=1, grace_s=30.0)
        ],
    )

    change = next(iter(membership_changes(run.result.folder)))
    assert (change.change, change.generator, change.generators) == ("left", "rollout[1]", 1)
    assert ("drained" if is_drained else "SIGTERM") in change.cause
    assert list(recoveries(run.result.folder)) == []
    assert most_attempts(run) == 1
    check_groups(run, recipe)
    if staleness == 0:
        assert run.weights == calm.weights


def test_a_generator_whose_grace_period_is_too_short_is_one_that_dies(tmp_path: Path, calm_runs: CalmRuns) -> None:
    _, calm = calm_runs.of(Case(layout="split", staleness=0))
    notice = SimulatedNotice(at_s=calm.committed_s[0] + 0.7, pool="rollout", slot=1, grace_s=0.0)

    run = run_with(fault_recipe(tmp_path / "short", "split", 0), [notice])

    assert most_attempts(run) == 2
    assert run.weights == calm.weights


def test_the_only_generator_that_leaves_has_a_successor(tmp_path: Path) -> None:
    recipe = fault_recipe(tmp_path / "one", "split", 0, devices=2, rollout_devices=1, grace_s=5.0)
    calm = run_with(recipe)
    recipe = fault_recipe(tmp_path / "left", "split", 0, devices=2, rollout_devices=1, grace_s=5.0)

    run = run_with(recipe, [SimulatedNotice(at_s=calm.committed_s[0] + 0.7, pool="rollout", slot=0, grace_s=5.0)])

    assert [each.change for each in membership_changes(run.result.folder)] == ["left", "joined"]
    assert run.weights == calm.weights


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ({"layout": "colocated", "devices": 2, "max_rollout_devices": 2}, "with layout colocated all devices generate"),
        (
            {"layout": "split", "devices": 4, "rollout_devices": 3, "max_rollout_devices": 2},
            "less than the 3 generators",
        ),
        ({"layout": "split", "devices": 8, "max_rollout_devices": 2}, "less than the 4 generators"),
        ({"layout": "split", "devices": 2, "max_rollout_devices": 2, "launcher": "inline"}, "nothing can join"),
        ({"layout": "split", "devices": 2, "grace_s": 0}, "grace_s"),
    ],
)
def test_a_number_of_generators_that_cannot_be_is_refused(
    tmp_path: Path, placement: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        simulated_recipe(tmp_path, placement=placement)


SLOW = pytest.mark.slow
DIES, LOST, SILENT = SimulatedDeath, SimulatedLoss, SimulatedSilence


def moments_of_publish(calm: SimulatedRun, variant: int, count: int) -> list[float]:
    """While the weights of step 2 travel. Variant 3 saves before, and evaluates with them afterwards."""
    end_s = FAULT_COSTS.publish_s + (FAULT_COSTS.save_s if variant == 3 else 0.0)
    return [calm.committed_s[1] + end_s * (number + 0.5) / count for number in range(count)]


@pytest.mark.parametrize(
    ("fault", "layout", "variant", "count"),
    [
        (DIES, "split", 2, 1),
        *(
            pytest.param(fault, layout, variant, 5, marks=SLOW)
            for fault in (DIES, LOST, SILENT)
            for layout in ("split", "elastic")
            for variant in (2, 3)
        ),
    ],
)
def test_a_generator_that_is_lost_while_weights_are_published_is_replaced_in_place(
    tmp_path: Path, calm_runs: CalmRuns, fault: Any, layout: str, variant: int, count: int
) -> None:
    """The run does not go back, which would cost steps where there is no snapshot of the last one."""
    case = Case(layout=layout, staleness=0, variant=variant)
    _, calm = calm_runs.of(case)
    for number, at_s in enumerate(moments_of_publish(calm, variant, count)):
        recipe = case.recipe(tmp_path / str(number))
        more = {"seconds": 100.0} if fault is SILENT else {}

        run = run_with(recipe, [fault(at_s=at_s, pool="rollout", slot=number % 2, **more)], seed=variant)

        (recovery,) = recoveries(run.result.folder)
        assert recovery.part == "generator"
        assert recovery.remedy in ("respawn", "fewer")  # fewer: the run ends before the next one is there
        assert run.weights == calm.weights
        check_groups(run, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("others", [("rollout", 1), ("train", 0)], ids=["the last generator", "the learner"])
def test_two_that_die_while_weights_are_published(calm_runs: CalmRuns, others: tuple[str, int]) -> None:
    """At the same time, and one after the other."""
    case = Case(layout="split", staleness=0, variant=2)
    _, calm = calm_runs.of(case)
    pool, slot = others
    for first_s, second_s in itertools.product(moments_of_publish(calm, 2, 3), repeat=2):
        faults = [
            SimulatedDeath(at_s=first_s, pool="rollout", slot=0),
            SimulatedDeath(at_s=second_s, pool=pool, slot=slot),
        ]
        assert calm_runs.with_faults(case, faults).weights == calm.weights
