# SPDX-License-Identifier: Apache-2.0
"""Runs of the real controller on the simulated cluster with faults at random moments: every run comes to its end, every
group is trained once, and at staleness 0 the weights (a digest of all updates) are those of the run without faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.simulated_faults import (
    FAULT_COSTS,
    LAYOUTS,
    RESTARTS,
    START_S,
    AnyFault,
    CalmRuns,
    Case,
    Schedule,
    StartFault,
    check_groups,
    fault_recipe,
    layout_of_seed,
    methods_of,
    run_with,
    that_let_it_begin,
)
from helpers.simulated_runs import METHODS
from podium.cluster.simulated_faults import (
    SimulatedDeath,
    SimulatedDelay,
    SimulatedDrain,
    SimulatedJoin,
    SimulatedLoss,
    SimulatedNodeLoss,
    SimulatedNotice,
    SimulatedSilence,
)
from podium.controller.simulation.controlled import simulate_run
from podium.controller.simulation.costs import SimulatedSlowness
from podium.controller.simulation.faults import SimulatedFault, SimulatedStop, random_faults, shortest
from podium.errors import WorkerDiedError
from podium.programs.controlled import load_program
from podium.runs.events import recoveries
from podium.runs.folder import RunFolder

SILENCE = SimulatedSilence(at_s=0.0, pool="train", slot=0, seconds=100.0)
LOSS = SimulatedLoss(at_s=0.0, pool="train", slot=0)
DEATH = SimulatedDeath(at_s=0.0, pool="train", slot=0)
DELAY = SimulatedDelay(at_s=0.0, pool="train", slot=0, seconds=5.0, late_s=2.0)
SLOWNESS = SimulatedSlowness(at_s=0.0, pool="train", slot=0, seconds=10.0, factor=5.0)


@pytest.fixture(scope="module")
def calm_runs(tmp_path_factory: pytest.TempPathFactory) -> CalmRuns:
    return CalmRuns(tmp_path_factory.mktemp("calm"))


@pytest.mark.parametrize("seed", range(8))
def test_a_run_with_faults_comes_to_its_end(calm_runs: CalmRuns, seed: int) -> None:
    Schedule(calm_runs, seed).check()


FOUND: dict[str, tuple[Case, list[SimulatedFault]]] = {
    "a generator dies while the learner is replaced, and has no place": (
        Case(layout="elastic", staleness=4, variant=8),
        [
            SimulatedDeath(at_s=10.4924, pool="train", slot=0),
            SimulatedNodeLoss(at_s=11.6745, node=0, seconds=200.0),
        ],
    ),
    "the last episodes before an evaluation are moved": (
        Case(layout="split", staleness=4, variant=1),
        [
            SimulatedDelay(at_s=7.446382, pool="graders", slot=1, seconds=15.912565, late_s=3.0),
            SimulatedSlowness(at_s=9.516143, pool="rollout", slot=1, seconds=4.460422, factor=2.0),
            SimulatedNotice(at_s=10.894964, pool="rollout", slot=1, grace_s=2.0),
        ],
    ),
    "a node is drained as streams end": (
        Case(layout="elastic", staleness=1, variant=5),
        [SimulatedDrain(at_s=9.36416, node=0, grace_s=0.1, seconds=0.0)],
    ),
    "a runner notices the death of a generator before the controller": (
        Case(layout="elastic", staleness=1, variant=10, method="turns, environment's rewards"),
        [SimulatedLoss(at_s=14.860732, pool="rollout", slot=0)],
    ),
    "a learner dies beside a generator whose runner is dead": (
        Case(layout="colocated", staleness=0, variant=3, method="turns, ppo"),
        [
            SimulatedLoss(at_s=16.878363, pool="runners", slot=0),
            SimulatedDeath(at_s=18.101658, pool="train", slot=1),
        ],
    ),
    "a run that went back asks a generator for episodes whose answers nobody has fetched": (
        Case(layout="split", staleness=3, variant=8, method="turns"),
        [SimulatedDeath(at_s=9.450504, pool="train", slot=0)],
    ),
    "a generator that joins is slow to be built": (
        Case(layout="split", staleness=4, variant=7),
        [
            SimulatedDeath(at_s=7.932573, pool="rollout", slot=1),
            SimulatedDelay(at_s=9.322677, pool="rollout", slot=1, seconds=7.327422, late_s=20.0),
        ],
    ),
    "a learner that is replaced forms its link without a generator that is dead": (
        Case(layout="split", staleness=0, variant=6, slots_per_node=2, restarts=3, method="kl, refreshed", tensor=2),
        [
            SimulatedSlowness(at_s=14.3587, pool="train", slot=0, seconds=8.152960, factor=20.0),
            SimulatedNodeLoss(at_s=20.086579, node=0, seconds=5.0),
            SimulatedDeath(at_s=24.889636, pool="train", slot=0),
        ],
    ),
    "a grader is replaced while a generator is busy whose link is outdated": (
        Case(layout="elastic", staleness=0, variant=7, method="ppo, epochs", tensor=2),
        [
            SimulatedSilence(at_s=6.730984, pool="graders", slot=0, seconds=120.0),
            SimulatedNodeLoss(at_s=11.841303, node=1, seconds=5.0),
            SimulatedDeath(at_s=15.543406, pool="graders", slot=0),
        ],
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_random_faults_have_found(calm_runs: CalmRuns, case: str) -> None:
    calm_runs.with_faults(*FOUND[case])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [27, 33, 40])
def test_nodes_with_several_generators_die_under_the_default_of_restarts(calm_runs: CalmRuns, seed: int) -> None:
    """With deaths of all generators counted together, the first two ended."""
    schedule = Schedule(calm_runs, seed, "grpo")
    assert (schedule.case.slots_per_node, schedule.case.restarts) in [(2, RESTARTS), (4, RESTARTS)]
    schedule.check()


def _moments(begin_s: float, end_s: float, count: int) -> list[float]:
    return [begin_s + (end_s - begin_s) * (number + 0.5) / count for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [DEATH, SILENCE, LOSS], ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("name", ["ppo, epochs", "kl, refreshed", "distill", "reward model"])
def test_models_beside_the_policy_are_lost_with_its_worker_and_come_back(
    calm_runs: CalmRuns, name: str, fault: SimulatedDeath
) -> None:
    """At four moments of the second half of a step, in which they score and learn, and of its commit. The digests of
    critic, reference and policy are those of the run without faults."""
    case = Case(layout="split", staleness=0, variant=3, method=name)
    _, calm = calm_runs.of(case)
    first_s, second_s = calm.committed_s[:2]
    for at_s in _moments((first_s + second_s) / 2, second_s + 0.5, 4):
        run = calm_runs.with_faults(case, [replace(fault, at_s=at_s)])
        assert run.weights == calm.weights
        assert run.ended_s > calm.ended_s


@pytest.mark.slow
@pytest.mark.parametrize("fault", [DEATH, SILENCE, LOSS], ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_runner_that_is_lost_is_replaced_and_its_episodes_run_again(
    calm_runs: CalmRuns, staleness: int, fault: SimulatedDeath
) -> None:
    """Other runners and the learner go on: the run does not go back."""
    case = Case(layout="split", staleness=staleness, variant=2, method="turns")
    _, calm = calm_runs.of(case)
    for at_s in _moments(calm.committed_s[0], calm.committed_s[1], 4):
        calm_runs.with_faults(case, [replace(fault, at_s=at_s, pool="runners")])


def test_the_loss_of_a_runner_is_recorded(tmp_path: Path, calm_runs: CalmRuns) -> None:
    case = Case(layout="split", staleness=0, method="turns")
    _, calm = calm_runs.of(case)
    death = SimulatedDeath(at_s=calm.committed_s[0] + 1.0, pool="runners", slot=1)

    run = run_with(case.recipe(tmp_path), [death])

    (recovery,) = recoveries(run.result.folder)
    assert (recovery.part, recovery.remedy, recovery.step) == ("runner", "retry", 1)
    assert run.weights == calm.weights


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_runs_of_every_method_with_faults(calm_runs: CalmRuns, name: str) -> None:
    """Ten of each whose layout can have it."""
    seeds = [seed for seed in range(2000, 2100) if name in methods_of(layout_of_seed(seed))]
    for seed in seeds[:10]:
        Schedule(calm_runs, seed, name).check()


@pytest.mark.slow
def test_fifty_runs_with_faults(calm_runs: CalmRuns) -> None:
    for seed in range(1000, 1050):
        Schedule(calm_runs, seed).check()


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("fault", [DEATH, SILENCE, LOSS, DELAY, SLOWNESS], ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pool", ["train", "rollout", "graders"])
def test_every_moment_of_a_step(calm_runs: CalmRuns, fault: SimulatedDeath, layout: str, pool: str) -> None:
    """A fault at each of twelve moments of the second step, which saves and evaluates at its end."""
    if pool == "rollout" and layout == "colocated":
        pytest.skip("its generators are the learner's")
    case = Case(layout=layout, staleness=0, variant=1)
    _, calm = calm_runs.of(case)
    begin, end = calm.committed_s[0], calm.committed_s[2]
    for number in range(12):
        at_s = begin + (end - begin) * (number + 0.5) / 12
        calm_runs.with_faults(case, [replace(fault, at_s=at_s, pool=pool)])


def test_deaths_in_a_row_are_survived_up_to_the_limit(tmp_path: Path, calm_runs: CalmRuns) -> None:
    _, calm = calm_runs.of(Case(layout="colocated", staleness=0))
    at_s = [calm.committed_s[1] + seconds for seconds in (0.5, 2.5, 4.5)]  # a step takes longer
    deaths = [replace(DEATH, at_s=each) for each in at_s]

    run = run_with(fault_recipe(tmp_path / "three", "colocated", 0, restarts=3), deaths)

    assert [each.step for each in recoveries(run.result.folder)] == [2, 2, 2]
    with pytest.raises(WorkerDiedError):
        run_with(fault_recipe(tmp_path / "two", "colocated", 0, restarts=2), deaths)


def test_a_generator_that_dies_is_replaced_and_nothing_goes_back(tmp_path: Path, calm_runs: CalmRuns) -> None:
    _, calm = calm_runs.of(Case(layout="split", staleness=0))
    # The new weights are there after 0.25 s; then the generators have the step's first episodes.
    death = SimulatedDeath(at_s=calm.committed_s[0] + 0.5, pool="rollout", slot=1)

    run = run_with(fault_recipe(tmp_path / "killed", "split", 0), [death])

    (recovery,) = recoveries(run.result.folder)
    assert (recovery.part, recovery.remedy) == ("generator", "respawn")
    assert recovery.seconds >= FAULT_COSTS.start_s
    assert run.weights == calm.weights


@pytest.mark.slow
@pytest.mark.parametrize("fault", [DEATH, SILENCE, LOSS], ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("layout", ["split", "elastic"])
def test_the_others_answer_runners_for_a_generator_that_dies(
    tmp_path: Path, calm_runs: CalmRuns, layout: str, staleness: int, fault: SimulatedDeath
) -> None:
    """At eight moments of two steps, nothing goes back. One that dies while weights are sent to all is another matter:
    the step has no episodes yet."""
    case = Case(layout=layout, staleness=staleness, variant=6, method="turns")
    recipe, calm = calm_runs.of(case)
    for number, at_s in enumerate(_moments(calm.committed_s[0], calm.committed_s[2], 8)):
        run = run_with(case.recipe(tmp_path / str(number)), [replace(fault, at_s=at_s, pool="rollout")], seed=6)
        check_groups(run, recipe)
        if staleness == 0:
            assert run.weights == calm.weights
        for each in recoveries(run.result.folder):
            assert each.remedy in ("respawn", "fewer") or "in generator.install" in each.cause


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "turns"])
def test_a_generator_that_dies_in_an_evaluation_leaves_its_episodes_to_the_others(
    tmp_path: Path, calm_runs: CalmRuns, name: str
) -> None:
    case = Case(layout="split", staleness=0, variant=1, method=name)
    recipe, calm = calm_runs.of(case)
    evaluating_s = calm.committed_s[1] + 1.0  # after the save
    for number, at_s in enumerate(_moments(evaluating_s, evaluating_s + 3.0, 4)):
        death = SimulatedDeath(at_s=at_s, pool="rollout", slot=number % 2)
        run = run_with(case.recipe(tmp_path / str(number)), [death], seed=1)
        check_groups(run, recipe)
        assert run.weights == calm.weights
        assert {each.remedy for each in recoveries(run.result.folder)} <= {"respawn", "fewer"}


def test_graders_that_die_are_replaced_and_recorded(tmp_path: Path, calm_runs: CalmRuns) -> None:
    _, calm = calm_runs.of(Case(layout="split", staleness=0))
    # They have nothing to do when a step begins, so that it is noticed when the first episodes have ended.
    deaths = [SimulatedDeath(at_s=calm.committed_s[0] + 0.1, pool="graders", slot=slot) for slot in (0, 1)]

    run = run_with(fault_recipe(tmp_path / "killed", "split", 0, restarts=1), deaths)

    found = list(recoveries(run.result.folder))
    assert [(each.part, each.remedy, each.step) for each in found] == [("grader", "retry", 1)] * len(found)
    assert {each.cause.split("@")[0] for each in found} == {"graders[0]", "graders[1]"}
    assert found[0].seconds >= FAULT_COSTS.start_s
    assert found[-1].seconds > 0  # both are started together, as soon as the first is noticed
    assert run.weights == calm.weights


@pytest.mark.parametrize("staleness", [0, 1])
def test_without_restarts_the_death_of_a_grader_ends_the_run(
    tmp_path: Path, calm_runs: CalmRuns, staleness: int
) -> None:
    _, calm = calm_runs.of(Case(layout="split", staleness=staleness))
    deaths = [SimulatedDeath(at_s=0.5 * calm.committed_s[0], pool="graders", slot=slot) for slot in (0, 1)]
    recipe = fault_recipe(tmp_path / "fragile", "split", staleness, restarts=0)

    with pytest.raises(WorkerDiedError, match=r"(?s)graders\[\d\].*The run ends: placement\.restarts is 0"):
        run_with(recipe, deaths)
    assert not list(recoveries(RunFolder.of(recipe).path))


@pytest.mark.parametrize("pool", ["train", "rollout"])
def test_a_silent_worker_is_declared_dead_after_the_heartbeat_timeout(
    tmp_path: Path, calm_runs: CalmRuns, pool: str
) -> None:
    _, calm = calm_runs.of(Case(layout="split", staleness=0))
    silence = replace(SILENCE, at_s=calm.committed_s[1] + 0.5, pool=pool)

    run = run_with(fault_recipe(tmp_path / "silent", "split", 0), [silence])

    (recovery,) = recoveries(run.result.folder)
    assert "no sign of life for 12 s" in recovery.cause
    assert silence.at_s + 12.0 < run.ended_s < silence.at_s + silence.seconds  # nobody waits until it goes on
    assert run.weights == calm.weights


@pytest.mark.parametrize("staleness", [0, 1])
def test_nemo_rl_3470_a_generator_that_never_answers_again_parks_no_rollout(
    tmp_path: Path, calm_runs: CalmRuns, staleness: int
) -> None:
    """There, a rollout waited for a dead endpoint without a limit and kept its place, until nothing was generated any
    more, while every actor passed for healthy. Here its episodes run elsewhere, and every group is trained."""
    recipe, calm = calm_runs.of(Case(layout="split", staleness=staleness))
    silence = replace(SILENCE, at_s=calm.committed_s[0] + 0.5, pool="rollout", slot=1, seconds=1e9)

    run = run_with(fault_recipe(tmp_path / "parked", "split", staleness), [silence])

    check_groups(run, recipe)
    (recovery,) = recoveries(run.result.folder)
    assert recovery.part == "generator"
    assert recovery.remedy in ("respawn", "fewer")  # the run may have ended before another one had started
    assert "no sign of life for 12 s" in recovery.cause
    assert run.ended_s < calm.ended_s + 12.0 + 2 * FAULT_COSTS.start_s


def test_a_worker_that_is_silent_for_less_than_the_timeout_goes_on(tmp_path: Path, calm_runs: CalmRuns) -> None:
    _, calm = calm_runs.of(Case(layout="split", staleness=0))
    silence = replace(SILENCE, at_s=calm.committed_s[1] - 0.25, seconds=8.0)  # in an update

    run = run_with(fault_recipe(tmp_path / "silent", "split", 0), [silence])

    assert list(recoveries(run.result.folder)) == []
    assert run.committed_s[1] == pytest.approx(silence.at_s + 8.0)
    assert run.weights == calm.weights


def test_a_late_reply_is_waited_for(tmp_path: Path, calm_runs: CalmRuns) -> None:
    _, calm = calm_runs.of(Case(layout="split", staleness=0))
    delay = replace(DELAY, at_s=calm.committed_s[1] - 0.25, seconds=0.5, late_s=2.0)  # around the end of an update

    run = run_with(fault_recipe(tmp_path / "late", "split", 0), [delay])

    assert list(recoveries(run.result.folder)) == []
    assert run.committed_s[1] == pytest.approx(calm.committed_s[1] + 2.0)
    assert run.weights == calm.weights


def test_an_update_whose_reply_is_lost_is_done_again_and_counts_once(tmp_path: Path, calm_runs: CalmRuns) -> None:
    _, calm = calm_runs.of(Case(layout="split", staleness=0))
    loss = replace(LOSS, at_s=calm.committed_s[1] - 0.25)

    run = run_with(fault_recipe(tmp_path / "lost", "split", 0), [loss])

    (recovery,) = recoveries(run.result.folder)
    assert (recovery.part, recovery.step) == ("learner", 1)  # it dies when the update of step 2 is done
    assert run.weights == calm.weights


def test_a_slow_worker_is_waited_for(tmp_path: Path, calm_runs: CalmRuns) -> None:
    _, calm = calm_runs.of(Case(layout="split", staleness=0))

    run = run_with(fault_recipe(tmp_path / "slow", "split", 0), [replace(SLOWNESS, seconds=1000.0)])

    assert list(recoveries(run.result.folder)) == []
    assert run.ended_s > calm.ended_s + 3 * 4 * 0.5  # each update has a constant part of half a second
    assert run.weights == calm.weights


def test_a_run_that_is_stopped_and_resumed_trains_the_same(tmp_path: Path, calm_runs: CalmRuns) -> None:
    _, calm = calm_runs.of(Case(layout="elastic", staleness=0))
    stop = SimulatedStop(at_s=calm.committed_s[1] - 0.25)

    run = run_with(fault_recipe(tmp_path / "stopped", "elastic", 0), [stop])

    assert len(run.committed_s) == 1  # of the second part, which has step 3
    assert run.weights == calm.weights


# --- what random faults have found ---


def test_a_group_that_became_void_during_an_update_is_in_the_ledger_of_the_step_that_collects_it(
    calm_runs: CalmRuns,
) -> None:
    """Else the step before has it too, and a run that goes back to that step finds it in the ledger already."""
    case = Case(layout="split", staleness=1, variant=1)
    _, calm = calm_runs.of(case)

    calm_runs.with_faults(case, [replace(DEATH, at_s=calm.committed_s[0] + 0.3)])


def test_a_run_that_goes_back_and_is_stopped_before_its_next_step_resumes_where_it_was(calm_runs: CalmRuns) -> None:
    """The checkpoint of such a run has the position in the data, although this part of the run committed nothing."""
    case = Case(layout="colocated", staleness=0, variant=2)
    _, calm = calm_runs.of(case)
    at_s = calm.committed_s[0] + 0.5

    calm_runs.with_faults(case, [replace(DEATH, at_s=at_s), SimulatedStop(at_s=at_s + 0.25)])


def test_no_reward_is_lost_when_two_deaths_meet_the_same_grading(calm_runs: CalmRuns) -> None:
    case = Case(layout="split", staleness=0, variant=4)
    losses = [SimulatedLoss(at_s=at_s, pool="graders", slot=0) for at_s in (5.55, 10.47)]

    calm_runs.with_faults(case, losses)


def test_a_learner_of_a_resumed_run_dies_after_newer_steps_were_saved(calm_runs: CalmRuns) -> None:
    """The one that replaces it is built from the checkpoint that the run was resumed from."""
    case = Case(layout="split", staleness=4, variant=1)  # five steps, the second and the fourth are saved
    _, calm = calm_runs.of(case)
    stop = SimulatedStop(at_s=0.5 * calm.committed_s[0])
    deaths = [replace(DEATH, at_s=calm.ended_s + seconds) for seconds in (0.0, 2.0, 4.0, 6.0)]

    calm_runs.with_faults(case, [stop, *deaths])


@pytest.mark.parametrize("pool", ["train", "rollout", "graders"])
def test_a_worker_that_hangs_while_it_replaces_another_is_replaced_too(calm_runs: CalmRuns, pool: str) -> None:
    """It has no heartbeats yet: the deadline of its start ends it."""
    case = Case(layout="colocated" if pool == "train" else "split", staleness=0)
    _, calm = calm_runs.of(case)
    death = replace(DEATH, at_s=calm.committed_s[0] + 0.4, pool=pool)
    silence = replace(SILENCE, at_s=death.at_s + 1.3, pool=pool, seconds=1e6)  # a start takes 1.5 s

    run = calm_runs.with_faults(case, [death, silence])

    if pool == "rollout":
        assert run.ended_s < calm.ended_s + 10.0  # the other generator does the work
    else:
        assert run.ended_s > calm.ended_s + 100.0  # the deadline is 120 s


def test_a_learner_that_dies_while_a_generator_is_replaced_is_no_death_of_a_generator(calm_runs: CalmRuns) -> None:
    """The generator was replaced again and again, each time without weights, until it had died too often."""
    learner = SimulatedDeath(at_s=3.107840592504330, pool="train", slot=0)
    lost = SimulatedLoss(at_s=6.1840084799651684, pool="train", slot=0)
    generator = SimulatedDeath(at_s=6.4181899665594475, pool="rollout", slot=1)
    silence = SimulatedSilence(at_s=10.522233713539006, pool="rollout", slot=1, seconds=120.0)

    calm_runs.with_faults(Case(layout="split", staleness=0, variant=8), [learner, lost, generator, silence])


# --- starts ---


@pytest.mark.parametrize(("pool", "slot"), [("rollout", 1), ("runners", 0), ("graders", 1), ("train", 0)])
def test_a_worker_that_dies_while_others_still_start_is_replaced_before_the_run_begins(
    tmp_path: Path, calm_runs: CalmRuns, pool: str, slot: int
) -> None:
    """Its pool stands at 1.5 s. Another one is slow, so that nobody needs it for three more seconds."""
    case = Case(layout="split", staleness=0, method="turns")
    _, calm = calm_runs.of(case)
    slow = "graders" if pool == "train" else "train"
    faults: list[AnyFault] = [
        StartFault(part=0, fault=SimulatedSilence(at_s=0.5, pool=slow, slot=0, seconds=4.0)),
        StartFault(part=0, fault=SimulatedDeath(at_s=2.0, pool=pool, slot=slot)),
    ]

    run = run_with(case.recipe(tmp_path), faults)

    assert list(recoveries(run.result.folder)) == []  # the run had not begun
    assert run.committed_s[0] > calm.committed_s[0] + 2.5  # the slow pool stands at 4.5 s, and not at 1.5 s
    assert run.weights == calm.weights


@pytest.mark.parametrize(("pool", "at_s"), [("rollout", 3.2), ("train", 3.2), ("train", 3.7)])
def test_a_worker_that_dies_as_the_link_is_formed_is_replaced(
    tmp_path: Path, calm_runs: CalmRuns, pool: str, at_s: float
) -> None:
    """The learner's replies are late: place, code and role take it until 3.0 s. It has opened the link at 3.5 s and
    made it at 4.0 s."""
    case = Case(layout="split", staleness=0)
    _, calm = calm_runs.of(case)
    faults: list[AnyFault] = [
        StartFault(part=0, fault=SimulatedDelay(at_s=0.1, pool="train", slot=0, seconds=30.0, late_s=0.5)),
        StartFault(part=0, fault=SimulatedDeath(at_s=at_s, pool=pool, slot=0)),
    ]

    run = run_with(case.recipe(tmp_path), faults)

    assert run.weights == calm.weights


def test_a_pool_that_dies_three_times_in_its_start_ends_the_run(tmp_path: Path) -> None:
    """Its start takes 1.5 s, and begins again with every death."""
    recipe = fault_recipe(tmp_path, "split", 0)
    deaths = [SimulatedDeath(at_s=at_s, pool="rollout", slot=0) for at_s in (1.0, 2.0, 3.0)]

    with pytest.raises(WorkerDiedError, match="died while they started"):
        simulate_run(
            load_program(recipe.program), recipe, RunFolder.create(recipe), FAULT_COSTS, faults=deaths,
        )  # fmt: skip


def test_the_start_of_a_resumed_part_has_faults_too(tmp_path: Path, calm_runs: CalmRuns) -> None:
    case = Case(layout="elastic", staleness=0)
    _, calm = calm_runs.of(case)
    faults: list[AnyFault] = [
        SimulatedStop(at_s=calm.committed_s[1] - 0.25),
        StartFault(part=1, fault=SimulatedDeath(at_s=1.0, pool="rollout", slot=0)),
        StartFault(part=1, fault=SimulatedDeath(at_s=1.25, pool="train", slot=0)),
        StartFault(part=2, fault=SimulatedDeath(at_s=1.0, pool="train", slot=0)),  # there is no third part
    ]

    run = run_with(case.recipe(tmp_path), faults)

    undisturbed = run_with(case.recipe(tmp_path / "stopped"), faults[:1])
    # The part has one step. Its learner stands at 2.75 s, and not at 1.5 s.
    assert run.committed_s[-1] == pytest.approx(undisturbed.committed_s[-1] + 1.25)
    assert run.weights == undisturbed.weights == calm.weights


def test_schedules_have_faults_in_the_starts_of_all_parts(calm_runs: CalmRuns) -> None:
    schedules = [Schedule(calm_runs, seed, "grpo") for seed in range(8)]

    starts = [each for schedule in schedules for each in schedule.faults if isinstance(each, StartFault)]
    assert {each.part for each in starts} == {0, 1}
    assert all(0.0 < each.fault.at_s <= FAULT_COSTS.start_s + START_S for each in starts)
    for schedule in schedules:
        has_second = any(isinstance(each, StartFault) and each.part == 1 for each in schedule.faults)
        assert not has_second or any(isinstance(each, SimulatedStop) for each in schedule.faults)


def test_faults_of_a_start_let_the_run_begin() -> None:
    """The third death of a pool within its starts, a node that is away for long and a long silence are left out."""
    deaths = [SimulatedDeath(at_s=at_s, pool="rollout", slot=0) for at_s in (0.5, 1.0, 1.2)]
    away = SimulatedNodeLoss(at_s=1.3, node=0, seconds=200.0)
    silent = SimulatedSilence(at_s=1.4, pool="train", slot=0, seconds=120.0)
    late = [SimulatedDeath(at_s=at_s, pool="rollout", slot=0) for at_s in (4.7, 4.8)]  # after 1.6 + 2 x 1.5 s

    assert that_let_it_begin([*deaths, away, silent, *late]) == [*deaths[:2], *late]


# --- schedules ---


def test_the_same_faults_give_the_same_run(tmp_path: Path) -> None:
    recipes = [fault_recipe(tmp_path / name, "elastic", 2) for name in ("one", "other")]
    faults = random_faults(recipes[0], end_s=30.0, most=5, seed=7)

    one, other = (run_with(recipe, faults) for recipe in recipes)

    assert one.committed_s == other.committed_s
    assert one.weights == other.weights


def test_random_faults_are_of_all_kinds_and_in_all_pools(tmp_path: Path) -> None:
    recipe = fault_recipe(tmp_path, "split", 0)

    faults: list[SimulatedFault] = []
    for seed in range(100):
        faults += random_faults(recipe, end_s=60.0, most=6, seed=seed)

    kinds = {SimulatedDeath, SimulatedSilence, SimulatedDelay, SimulatedLoss, SimulatedSlowness, SimulatedStop}
    others = {SimulatedNotice, SimulatedNodeLoss, SimulatedDrain, SimulatedJoin}
    assert {type(fault) for fault in faults} == kinds | others
    slots = {(fault.pool, fault.slot) for fault in faults if hasattr(fault, "slot")}
    assert slots == {("train", 0), ("rollout", 0), ("rollout", 1), ("graders", 0), ("graders", 1)}
    assert all(fault.at_s >= 0.0 for fault in faults)
    turns = Case(layout="split", staleness=0, method="turns").recipe(tmp_path)
    of_runners = [each for seed in range(100) for each in random_faults(turns, end_s=60.0, most=6, seed=seed)]
    assert {each.slot for each in of_runners if getattr(each, "pool", None) == "runners"} == {0, 1}


@pytest.mark.parametrize("seed", range(40))
def test_random_faults_leave_it_at_so_many_deaths_of_a_worker(tmp_path: Path, seed: int) -> None:
    case = Case(layout="split", staleness=0, slots_per_node=4)

    faults = random_faults(case.recipe(tmp_path), end_s=60.0, most=20, seed=seed, slots_per_node=4, most_deaths=3)

    of_nodes = [each for each in faults if isinstance(each, SimulatedNodeLoss | SimulatedDrain)]
    kills = (SimulatedDeath, SimulatedLoss, SimulatedSilence, SimulatedNotice)
    of_workers = Counter((each.pool, each.slot) for each in faults if isinstance(each, kills))
    of_workers += Counter((each.pool, each.slot) for each in faults if isinstance(each, SimulatedDelay) for _ in "12")
    assert all(count <= 3 for count in of_workers.values())
    apart = [count for (pool, _), count in of_workers.items() if pool == "rollout"]
    assert max(apart, default=0) + len(of_nodes) <= 3
    assert all(each.node < 2 for each in of_nodes)


def test_the_shortest_part_of_faults_that_fails() -> None:
    faults: list[SimulatedFault] = [DEATH, SILENCE, LOSS, DELAY, SLOWNESS, SimulatedStop(at_s=1.0)]

    found = shortest(faults, lambda some: SILENCE in some and SLOWNESS in some)

    assert found == (SILENCE, SLOWNESS)


def test_a_run_that_hangs_fails_at_the_limit_of_the_virtual_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it heartbeats would go on forever."""
    from helpers import simulated_faults
    from podium.errors import ClusterError

    monkeypatch.setattr(simulated_faults, "LIMIT_S", 1.0)  # as if everything after it were a hang
    with pytest.raises(ClusterError, match="not ended after 1 virtual seconds"):
        run_with(fault_recipe(tmp_path, "split", 0), [SILENCE])
