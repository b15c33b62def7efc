# SPDX-License-Identifier: Apache-2.0
"""Simulated runs with random faults, and what must hold for each. Torch-free."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, assert_never

from helpers.simulated_runs import METHOD_COSTS, METHODS, groups_by_step, method, recipe_of, updates_behind
from helpers.times import times_of
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
from podium.controller.layout import ROLLOUT
from podium.controller.simulation.controlled import SimulatedRun, simulate_run
from podium.controller.simulation.costs import SimulatedSlowness
from podium.controller.simulation.faults import (
    SILENT_AT_START_S,
    SimulatedFault,
    SimulatedStop,
    random_faults,
    random_start_faults,
    with_few_deaths,
)
from podium.observe import read_metrics
from podium.programs.controlled import load_program
from podium.recipe import OnPolicyRecipe
from podium.runs.folder import RunFolder

LAYOUTS: dict[str, dict[str, Any]] = {
    "colocated": {"layout": "colocated", "devices": 2},
    "split": {"layout": "split", "devices": 3, "rollout_devices": 2},
    "elastic": {"layout": "elastic", "devices": 3, "rollout_devices": 2},
}
PROMPTS, SAMPLES = 2, 2
# Saves, starts of workers and gradings take time, so that faults meet them; a third of the groups are uniform.
FAULT_COSTS = replace(
    METHOD_COSTS,
    grading_s=replace(METHOD_COSTS.answer_tokens, median=0.5, cap=5.0),
    save_s=1.0,
    start_s=1.5,
    uniform_share=0.3,
)
MOST_FAULTS = 6
# Of the virtual clock: a hang. Faults make a run of a minute longer by some minutes at most.
LIMIT_S = 10_000.0
# More than the faults of a schedule can end.
UNLIMITED = 100
RESTARTS = 3
# A pool is started so often before its run ends.
MOST_STARTS = 3
# How long a node is away in a start: others wait for its place for a minute.
AWAY_AT_START_S = 35.0
MOST_AT_START = 3
# After all workers have started: they build roles, connect and install weights.
START_S = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run that faults are injected into. The variant chooses its answers and further settings."""

    layout: str
    staleness: int
    variant: int = 0
    slots_per_node: int = 1  # generators of a node; there are two nodes
    restarts: int = UNLIMITED
    method: str = "grpo"  # of METHODS
    tensor: int = 1  # devices of each generator

    def recipe(self, folder: Path, **placement: Any) -> OnPolicyRecipe:
        """Some small steps; workers may die often. Variants evaluate and save every two steps, leave out uniform
        groups, let generators join, and differ in what new weights mean for running sequences."""
        changes = method(self.method, folder)
        if "environment" in changes:  # it does not fail while it is slow
            changes["environment"]["timeout_s"] = 500.0
        if self.variant % 2:
            changes |= {
                "evaluation": {"every": 2, "generation": {"prompts": 2}},
                "checkpoint": {"every": 2},
                "data": {"heldout": [{"path": str(folder / "train.jsonl")}]},
            }
        if self.variant % 3 == 1 and changes.get("program", "grpo") == "grpo":
            changes["algorithm"] = {**changes.get("algorithm", {}), "dynamic_sampling": True}
        joins: dict[str, Any] = {}
        if self.layout != "colocated":
            num_apart = 2 * self.slots_per_node
            joins = {"devices": num_apart + 1, "rollout_devices": num_apart}
            if self.variant % 4 >= 2:
                joins["max_rollout_devices"] = 2 * num_apart
        if self.tensor > 1:  # as many generators as before, and one that all learners hold together
            learners = 1 if self.layout == "split" else self.tensor
            joins = {key: self.tensor * count for key, count in joins.items() if key != "devices"}
            joins |= {"devices": learners + joins.get("rollout_devices", 0), "generator": {"tensor": self.tensor}}
        choices = ("recompute", "keep") if self.layout == "elastic" else ("recompute", "keep", "finish")
        in_flight = choices[self.variant // 2 % len(choices)]
        return recipe_of(
            folder, steps=max(3, self.staleness + 1), grading={"workers": 2}, **changes,
            placement={
                **LAYOUTS[self.layout], **joins, "restarts": self.restarts, "heartbeat_timeout_s": 12.0, **placement,
            },
            rollout={
                "staleness": self.staleness, "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES,
                **({"on_new_weights": in_flight} if self.staleness else {}),
            },
        )  # fmt: skip


def fault_recipe(folder: Path, layout: str, staleness: int, **placement: Any) -> OnPolicyRecipe:
    """The recipe of a case."""
    return Case(layout=layout, staleness=staleness).recipe(folder, **placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFault:
    """A fault while a part of a run starts. Parts are counted from 0, and each stop begins one more."""

    part: int
    fault: SimulatedFault  # its time is that of the part


AnyFault = SimulatedFault | StartFault
"""A fault of a run with all its parts."""


def run_with(
    recipe: OnPolicyRecipe, faults: Sequence[AnyFault] = (), *, seed: int = 0, folder: RunFolder | None = None,
    slots_per_node: int = 1,
) -> SimulatedRun:  # fmt: skip
    """The run of the recipe with these faults, in this folder (default: a new one). A run that was stopped is resumed
    until all its steps are done; times of faults go on from one part to the next."""
    folder = folder or RunFolder.create(recipe)
    resume_step: int | None = None
    program = load_program(recipe.program)
    left = [each for each in faults if not isinstance(each, StartFault)]
    for part in itertools.count():
        of_start = [each.fault for each in faults if isinstance(each, StartFault) and each.part == part]
        run = simulate_run(
            program, recipe, folder, FAULT_COSTS, seed=seed, resume_step=resume_step,
            faults=that_let_it_begin([*of_start, *left]), slots_per_node=slots_per_node, limit_s=LIMIT_S,
        )  # fmt: skip
        if run.result.step == recipe.steps:
            return run
        resume_step = run.result.step or None
        left = [replace(each, at_s=each.at_s - run.ended_s) for each in left if each.at_s > run.ended_s]
    raise AssertionError("it ends with its last step")


def that_let_it_begin(faults: Sequence[SimulatedFault]) -> list[SimulatedFault]:
    """Without those after which a run does not begin: the third death of one pool before all workers have started, a
    node that is away for most of a minute, and a silence that lasts nearly as long as the deadline of a start."""
    until_s, deaths = FAULT_COSTS.start_s + 0.1, Counter[str]()
    kept: list[SimulatedFault] = []
    for fault in sorted(faults, key=lambda each: each.at_s):
        if fault.at_s < until_s:
            pool, lasts_s = pool_of_death(fault), lasting_s(fault)
            is_away = isinstance(fault, SimulatedNodeLoss | SimulatedDrain) and lasts_s > AWAY_AT_START_S
            is_silent = isinstance(fault, SimulatedSilence) and lasts_s > SILENT_AT_START_S
            if is_away or is_silent or (pool is not None and deaths[pool] == MOST_STARTS - 1):
                continue
            if pool is not None:
                deaths[pool] += 1
            until_s += lasts_s + FAULT_COSTS.start_s
        kept.append(fault)
    return kept


def pool_of_death(fault: SimulatedFault) -> str | None:
    """The pool of which a worker may die of it; None: nobody dies."""
    match fault:
        case SimulatedNodeLoss() | SimulatedDrain():
            return ROLLOUT
        case SimulatedDeath() | SimulatedSilence() | SimulatedLoss() | SimulatedNotice():
            return fault.pool
        case SimulatedDelay() | SimulatedSlowness() | SimulatedStop() | SimulatedJoin():
            return None
        case other:
            assert_never(other)


def lasting_s(fault: SimulatedFault) -> float:
    """How much longer a start may take with it, beside starting a pool again."""
    match fault:
        case SimulatedDrain():
            return fault.grace_s + fault.seconds
        case SimulatedDelay():
            return fault.seconds + fault.late_s
        case SimulatedNodeLoss() | SimulatedSilence() | SimulatedSlowness():
            return fault.seconds
        case _:
            return 0.0


def check_groups(run: SimulatedRun, recipe: OnPolicyRecipe) -> None:
    """All steps were committed once, every group is in one of them, and none was older than allowed."""
    steps = groups_by_step(run.result.folder)
    every = list(range(1, recipe.steps + 1))
    assert sorted(steps) == every
    assert [line.step for line in read_metrics(run.result.folder / "metrics.jsonl") if "step_s" in line.values] == every
    assert all(len(groups) == PROMPTS for groups in steps.values())
    times = Counter(prompt for groups in steps.values() for prompt, _, _ in groups)
    assert set(times.values()) == {1}
    assert max(updates_behind(steps)) <= recipe.rollout.staleness


def methods_of(layout: str) -> list[str]:
    """Methods that a layout can have: a reward model would grade on devices that elastic lends."""
    scored = ("reward model", "turns, ppo")
    return [name for name in METHODS if layout != "elastic" or name not in scored]


def layout_of_seed(seed: int) -> str:
    """The layout of a seed's schedule: its first choice."""
    return Random(seed).choice(sorted(LAYOUTS))


class CalmRuns:
    """Runs without faults, each made once. A run with faults begins in a copy of its new folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()
        self._runs: dict[Case, tuple[OnPolicyRecipe, Path, SimulatedRun]] = {}

    def of(self, case: Case) -> tuple[OnPolicyRecipe, SimulatedRun]:
        """The recipe of a case, and its run without faults."""
        recipe, _, run = self._made(case)
        return recipe, run

    def with_faults(self, case: Case, faults: Sequence[AnyFault]) -> SimulatedRun:
        """The run of a case with these faults; its folder is removed."""
        recipe, new, calm = self._made(case)
        folder = self._folder / f"faults-{next(self._numbers)}"
        shutil.copytree(new, folder)
        try:
            run = run_with(
                recipe, faults, seed=case.variant, folder=RunFolder(path=folder), slots_per_node=case.slots_per_node
            )
            check_groups(run, recipe)
            if case.staleness == 0:
                assert run.weights == calm.weights
            # A part of the time has no known cause where a start is disturbed, and where devices follow an engine.
            if case.tensor == 1 and not any(isinstance(each, SimulatedStop | StartFault) for each in faults):
                times_of(run.result.folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return run

    def _made(self, case: Case) -> tuple[OnPolicyRecipe, Path, SimulatedRun]:
        if case not in self._runs:
            place = self._folder / f"calm-{len(self._runs)}"
            recipe = case.recipe(place)
            folder, new = RunFolder.create(recipe), place / "new"
            shutil.copytree(folder.path, new)
            run = run_with(recipe, seed=case.variant, folder=folder, slots_per_node=case.slots_per_node)
            check_groups(run, recipe)
            self._runs[case] = recipe, new, run
        return self._runs[case]


class Schedule:
    """A random case and random faults from a seed. `name`: of the method; default: from the seed too."""

    def __init__(self, calm: CalmRuns, seed: int, name: str | None = None) -> None:
        rng, layout = Random(seed), layout_of_seed(seed)
        rng.choice(sorted(LAYOUTS))  # the layout
        staleness = 0 if layout == "colocated" else rng.choice([0, 0, 1, 2, 3, 4])
        case = Case(layout=layout, staleness=staleness, variant=rng.randrange(12))
        if rng.random() < 0.4:  # as a user has it: nodes with several generators, and the default of restarts
            case = replace(case, slots_per_node=1 if layout == "colocated" else rng.choice((2, 4)), restarts=RESTARTS)
        # Apart from the other choices, which a seed has had since there was one method only.
        case = replace(case, method=name or Random(f"method {seed}").choice(methods_of(layout)))
        case = replace(case, tensor=Random(f"tensor {seed}").choice((1, 1, 1, 2)))
        self._calm, self.case = calm, case
        recipe, run = calm.of(self.case)
        most_deaths = None if case.restarts == UNLIMITED else case.restarts
        later: Sequence[SimulatedFault] = random_faults(
            recipe, begin_s=FAULT_COSTS.start_s, end_s=1.2 * run.ended_s, most=MOST_FAULTS, seed=seed,
            slots_per_node=case.slots_per_node, most_deaths=most_deaths,
        )  # fmt: skip
        starts = self._start_faults(recipe, seed)
        if most_deaths is not None:  # those of a start count too where they are noticed after it
            of_starts = [each.fault for each in starts]
            later = list(with_few_deaths([*of_starts, *later], most_deaths))
            starts = [each for each in starts if each.fault in later]
            later = [each for each in later if each not in of_starts]
        self.faults: tuple[AnyFault, ...] = (*starts, *later, *self._stops(run, starts, seed))

    def _start_faults(self, recipe: OnPolicyRecipe, seed: int) -> list[StartFault]:
        """Of the first part, the second, both or none: until their first weights are there."""
        parts = Random(f"starts {seed}").choice(((), (0,), (0,), (1,), (0, 1)))
        end_s = FAULT_COSTS.start_s + START_S
        return [
            StartFault(part=part, fault=fault)
            for part in parts
            for fault in random_start_faults(
                recipe, end_s=end_s, most=MOST_AT_START, seed=f"start {part} {seed}",
                slots_per_node=self.case.slots_per_node,
            )
        ]  # fmt: skip

    def _stops(self, calm: SimulatedRun, starts: Sequence[StartFault], seed: int) -> list[SimulatedFault]:
        """One that begins the part whose start is faulted."""
        if not any(each.part for each in starts):
            return []
        return [SimulatedStop(at_s=Random(f"stop {seed}").uniform(FAULT_COSTS.start_s, calm.ended_s))]

    def check(self, faults: Sequence[AnyFault] | None = None) -> None:
        """Runs with these faults (default: all), and checks what must hold."""
        self._calm.with_faults(self.case, self.faults if faults is None else faults)

    def fails(self, faults: Sequence[AnyFault]) -> bool:
        """Whether something does not hold with these faults."""
        try:
            self.check(faults)
        except Exception:
            return True
        return False
