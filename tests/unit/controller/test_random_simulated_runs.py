# SPDX-License-Identifier: Apache-2.0
"""Random recipes of every method on random layouts, with random costs. The controller audits every decision of the
scheduler while they run."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from helpers.simulated_faults import methods_of
from helpers.simulated_runs import METHOD_COSTS, groups_by_step, method, recipe_of, simulated, updates_behind
from podium.controller.simulation.controlled import SimulatedRun
from podium.controller.simulation.costs import CostModel, EnvironmentCost, GenerationCost, LogNormal, UpdateCost
from podium.recipe import OnPolicyRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRun:
    """A recipe, as changes of the usual one, and its costs."""

    name: str
    learners: int
    changes: dict[str, Any]
    costs: CostModel

    def recipe(self, folder: Path) -> OnPolicyRecipe:
        """The recipe in this folder."""
        values = method(self.name, folder)
        for key, change in self.changes.items():
            values[key] = {**values.get(key, {}), **change} if isinstance(change, dict) else change
        return recipe_of(folder, **values)


def placement(rng: Random, layout: str, learners: int) -> dict[str, Any]:
    """So many learners, with up to three generators of their own where the layout has them."""
    if layout == "colocated":
        return {"layout": layout, "devices": learners}
    generators = rng.randint(1, 3)
    return {"layout": layout, "devices": learners + generators, "rollout_devices": generators}


def random_run(seed: int) -> RandomRun:
    """What may be chosen without an error."""
    rng = Random(seed)
    layout = rng.choice(("colocated", "split", "elastic"))
    name, learners = rng.choice(methods_of(layout)), rng.randint(1, 3)
    staleness = 0 if layout == "colocated" else rng.choice((0, 0, 1, 2, 3))
    prompts, samples = rng.randint(learners, 4), rng.randint(2, 4)
    rollout = {"prompts_per_step": prompts, "samples_per_prompt": samples, "max_running": rng.randint(1, 8)}
    if staleness:
        ways = ("recompute", "keep") if layout == "elastic" else ("recompute", "keep", "finish")
        rollout |= {"staleness": staleness, "on_new_weights": rng.choice(ways)}
    changes: dict[str, Any] = {
        "rollout": rollout, "placement": placement(rng, layout, learners),
        "steps": rng.randint(max(2, staleness + 1), 4), "grading": {"workers": rng.randint(1, 3)},
        "run": {"seed": rng.randrange(100)},
    }  # fmt: skip
    if rng.random() < 0.5:
        changes["algorithm"] = {"epochs": rng.randint(1, 2), "mini_batches": rng.randint(1, 2)}
    if "ppo" in name:
        changes["critic"] = {"warmup_steps": rng.randint(0, 1)}
    if "turns" in name:
        changes["environment"] = {
            "runners": rng.randint(1, 3), "concurrency": rng.choice((2, 64)), "max_turns": rng.randint(1, 4),
        }  # fmt: skip
        if rng.random() < 0.3:
            changes["environment"]["max_episode_tokens"] = rng.randint(10, 200)
    return RandomRun(name=name, learners=learners, changes=changes, costs=random_costs(rng))


def random_costs(rng: Random) -> CostModel:
    """Long and short answers, updates, gradings and tools, in every relation to each other."""
    return replace(
        METHOD_COSTS,
        generation=GenerationCost(weights_s=rng.choice((0.001, 0.02)), lane_s=0.002, prefill_tokens_s=500.0),
        answer_tokens=LogNormal(median=rng.choice((5.0, 40.0)), sigma=rng.choice((0.0, 1.0)), cap=400.0),
        update=UpdateCost(token_s=rng.choice((0.0, 0.002, 0.02)), constant_s=rng.choice((0.0, 0.5))),
        grading_s=LogNormal(median=rng.choice((0.0, 0.5)), sigma=rng.choice((0.0, 1.0)), cap=5.0),
        graders=rng.choice((None, 1)),
        score_token_s=rng.choice((0.0, 0.001, 0.01)),
        environment=EnvironmentCost(
            turns=LogNormal(median=rng.choice((1.0, 2.0, 3.0)), sigma=rng.choice((0.0, 0.7))),
            call_s=LogNormal(median=rng.choice((0.0, 0.5, 3.0)), sigma=1.0, cap=20.0),
            reply_tokens=LogNormal(median=rng.choice((0.0, 8.0))),
        ),
    )


def check(run: SimulatedRun, recipe: OnPolicyRecipe) -> None:
    """All steps have all their groups, each once and none older than allowed. All but those that only warm a critic up
    have a version of their own."""
    steps = groups_by_step(run.result.folder)
    assert run.result.step == recipe.steps == len(run.committed_s)
    assert list(run.committed_s) == sorted(run.committed_s)
    assert sorted(steps) == list(range(1, recipe.steps + 1))
    assert all(len(groups) == recipe.rollout.prompts_per_step for groups in steps.values())
    trained = [prompt for groups in steps.values() for prompt, _, _ in groups]
    assert len(set(trained)) == len(trained)
    assert max(updates_behind(steps)) <= recipe.rollout.staleness
    if not recipe.rollout.staleness:
        assert trained == sorted(trained)
    critic = recipe.critic_section
    warmup = 0 if critic is None else critic.warmup_steps
    for step, groups in steps.items():
        before = step - 1
        assert {version for _, _, version in groups} == {before if before > warmup or not warmup else 0}


def _check_seeds(folder: Path, seeds: range) -> None:
    for seed in seeds:
        random, place = random_run(seed), Path(tempfile.mkdtemp(dir=folder))
        try:
            recipe = random.recipe(place)
            run = simulated(recipe, random.costs, seed=seed)
            check(run, recipe)
        except Exception as error:
            error.add_note(f"seed {seed}: {random}")
            raise
        shutil.rmtree(place)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_runs_of_random_recipes(tmp_path: Path, part: int) -> None:
    """5 each."""
    _check_seeds(tmp_path, range(75 + 5 * part, 75 + 5 * (part + 1)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_runs_of_random_recipes(tmp_path: Path, part: int) -> None:
    _check_seeds(tmp_path, range(1000 + 20 * part, 1000 + 20 * (part + 1)))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_more_runs_of_random_recipes(tmp_path: Path, part: int) -> None:
    _check_seeds(tmp_path, range(10_000 + 500 * part, 10_000 + 500 * (part + 1)))


@pytest.mark.parametrize("seed", range(12))
def test_without_staleness_the_layout_does_not_change_what_is_learned(tmp_path: Path, seed: int) -> None:
    """So many learners learn the same in every layout, however long everything takes and however many generators and
    runners there are."""
    random, rng = random_run(seed), Random(seed)
    weights = {}
    for layout in ("colocated", "split", "elastic"):
        if random.name not in methods_of(layout):
            continue
        rollout = {key: random.changes["rollout"][key] for key in ("prompts_per_step", "samples_per_prompt")}
        changes = {
            **random.changes,
            "placement": placement(rng, layout, random.learners),
            "rollout": {**rollout, "max_running": rng.randint(1, 8)},
        }
        # Lengths are part of what is learned, and the cost of a token decides how an update is split.
        given = random.costs
        costs = replace(
            random_costs(rng), answer_tokens=given.answer_tokens, environment=given.environment, update=given.update,
            uniform_share=0.2,
        )  # fmt: skip
        weights[layout] = simulated(replace(random, changes=changes).recipe(tmp_path / layout), costs).weights
    assert len(weights) >= 2
    assert len(set(weights.values())) == 1, weights
