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
from typing import Any

from helpers.simulated_runs import METHOD_COSTS, METHODS, groups_by_step, method, recipe_of, updates_behind
from helpers.times import times_of
from podium.controller.simulation.controlled import SimulatedRun, simulate_run
from podium.controller.simulation.faults import SimulatedFault, SimulatedStop, random_faults
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


def run_with(
    recipe: OnPolicyRecipe, faults: Sequence[SimulatedFault] = (), *, seed: int = 0, folder: RunFolder | None = None,
    slots_per_node: int = 1,
) -> SimulatedRun:  # fmt: skip
    """The run of the recipe with these faults, in this folder (default: a new one). A run that was stopped is resumed
    until all its steps are done; times of faults go on from one part to the next, but for those of its start: a run
    whose workers die three times before it begins does not begin."""
    folder = folder or RunFolder.create(recipe)
    resume_step: int | None = None
    program = load_program(recipe.program)
    while True:
        run = simulate_run(
            program, recipe, folder, FAULT_COSTS, seed=seed, resume_step=resume_step, faults=faults,
            slots_per_node=slots_per_node, limit_s=LIMIT_S,
        )  # fmt: skip
        if run.result.step == recipe.steps:
            return run
        resume_step = run.result.step or None
        began_s = run.ended_s + FAULT_COSTS.start_s
        faults = [replace(each, at_s=each.at_s - run.ended_s) for each in faults if each.at_s > began_s]


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

    def with_faults(self, case: Case, faults: Sequence[SimulatedFault]) -> SimulatedRun:
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
            if not any(isinstance(each, SimulatedStop) for each in faults):
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
        self.faults = random_faults(
            recipe, begin_s=FAULT_COSTS.start_s, end_s=1.2 * run.ended_s, most=MOST_FAULTS, seed=seed,
            slots_per_node=case.slots_per_node, most_deaths=None if case.restarts == UNLIMITED else case.restarts,
        )  # fmt: skip

    def check(self, faults: Sequence[SimulatedFault] | None = None) -> None:
        """Runs with these faults (default: all), and checks what must hold."""
        self._calm.with_faults(self.case, self.faults if faults is None else faults)

    def fails(self, faults: Sequence[SimulatedFault]) -> bool:
        """Whether something does not hold with these faults."""
        try:
            self.check(faults)
        except Exception:
            return True
        return False
