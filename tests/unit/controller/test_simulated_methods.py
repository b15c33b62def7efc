# SPDX-License-Identifier: Apache-2.0
"""Methods with further models and with environments on the simulated cluster: seconds that can be computed by hand,
what is learned from what, and runs that go on where they were stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.simulated_runs import (
    METHOD_COSTS,
    METHODS,
    groups_by_step,
    method,
    metrics_by_step,
    recipe_of,
    simulated,
    updates_behind,
)
from podium.controller.simulation.costs import CostModel, EnvironmentCost, GenerationCost, LogNormal, UpdateCost
from podium.errors import ClusterError, RolloutError
from podium.recipe import OnPolicyRecipe

# One token a second in every lane, answers of 10 tokens, one second for an update of 10 tokens or a forward of 20.
PLAIN = CostModel(
    generation=GenerationCost(weights_s=1.0), answer_tokens=LogNormal(median=10.0), update=UpdateCost(token_s=0.1),
    score_token_s=0.05,
)  # fmt: skip
TWO_TURNS = EnvironmentCost(
    turns=LogNormal(median=2.0), call_s=LogNormal(median=3.0), reply_tokens=LogNormal(median=4.0)
)
ONE = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_running": 2}
SPLIT = {"layout": "split", "devices": 2}


def recipe(folder: Path, name: str, **changes: Any) -> OnPolicyRecipe:
    """A recipe of one of the methods. A change replaces keys of a section."""
    values = method(name, folder)
    for key, change in changes.items():
        values[key] = {**values.get(key, {}), **change} if isinstance(change, dict) else change
    return recipe_of(folder, **values)


def seconds(folder: Path, name: str, costs: CostModel = PLAIN, **changes: Any) -> list[float]:
    """When each of three steps was committed; two episodes of 10 tokens, on one device."""
    run = simulated(recipe(folder, name, **{"rollout": ONE, "steps": 3, **changes}), costs)
    return [pytest.approx(each) for each in run.committed_s]


def test_a_reference_scores_every_token_before_the_update(tmp_path: Path) -> None:
    """10 s of generation, a forward of 20 tokens, and an update of them."""
    assert seconds(tmp_path, "kl") == [13.0, 26.0, 39.0]
    assert metrics_by_step(tmp_path / "runs" / "simulated")[2]["time/score_s"] == pytest.approx(1.0)


def test_every_teacher_scores_every_token(tmp_path: Path) -> None:
    assert seconds(tmp_path, "distill") == [14.0, 28.0, 42.0]


def test_a_reward_model_scores_when_its_episodes_have_ended(tmp_path: Path) -> None:
    assert seconds(tmp_path, "reward model") == [13.0, 26.0, 39.0]
    assert metrics_by_step(tmp_path / "runs" / "simulated")[2]["time/grade_s"] == pytest.approx(1.0)


def test_a_critic_estimates_and_learns_before_the_policy(tmp_path: Path) -> None:
    """A forward, 4 s of the critic's update, and 2 s of the policy's."""
    costs = replace(PLAIN, critic=UpdateCost(token_s=0.2))
    assert seconds(tmp_path, "ppo", costs) == [17.0, 34.0, 51.0]


def test_a_critic_costs_as_much_as_the_policy_unless_the_model_says_otherwise(tmp_path: Path) -> None:
    assert seconds(tmp_path, "ppo") == [15.0, 30.0, 45.0]


def test_every_epoch_passes_over_all_tokens(tmp_path: Path) -> None:
    """Two epochs: 10 s, a forward of 1 s, and twice 2 s of critic and policy."""
    changes: dict[str, Any] = {"algorithm": {"epochs": 2, "mini_batches": 1}, "critic": {"warmup_steps": 0}}
    assert seconds(tmp_path, "ppo, epochs", **changes) == [19.0, 38.0, 57.0]


def test_steps_that_warm_the_critic_up_make_no_version(tmp_path: Path) -> None:
    """Two steps of 10 s of generation, a forward and the critic's update; then the policy is updated too."""
    committed_s = seconds(tmp_path, "ppo", rollout=ONE, steps=5, critic={"warmup_steps": 2})

    assert committed_s == [13.0, 26.0, 41.0, 56.0, 71.0]
    versions = {
        step: [row[2] for row in rows] for step, rows in groups_by_step(tmp_path / "runs" / "simulated").items()
    }
    assert versions == {
        1: [0], 2: [0], 3: [0], 4: [3], 5: [4],  # a version has the number of its step
    }  # fmt: skip


def test_staleness_is_counted_in_updates_and_not_in_steps(tmp_path: Path) -> None:
    """While the critic warms up, nothing is stale however many steps ago it was sampled."""
    run = simulated(
        recipe(tmp_path, "ppo", rollout={**ONE, "staleness": 2}, placement=SPLIT, critic={"warmup_steps": 3}, steps=7),
        PLAIN,
    )

    groups = groups_by_step(run.result.folder)
    assert [rows[0][2] for rows in groups.values()] == [0, 0, 0, 0, 4, 5, 6]
    assert max(updates_behind(groups)) == 1
    assert max(trained - oldest for rows in groups.values() for _, oldest, trained in rows) == 4


def test_turns_of_an_episode_alternate_with_its_tools(tmp_path: Path) -> None:
    """Twice 10 s for an answer and 3 s for its tool; an update of 2 x 24 tokens, the tools' among them."""
    costs = replace(PLAIN, environment=TWO_TURNS)

    assert seconds(tmp_path, "turns", costs) == [30.8, 61.6, 92.4]
    metrics = metrics_by_step(tmp_path / "runs" / "simulated")[2]
    assert metrics["rollout/generated_tokens"] == 40.0
    assert metrics["turns/mean"] == 2.0


def test_a_tool_of_one_episode_leaves_the_generator_to_the_others(tmp_path: Path) -> None:
    """One lane: the second episode answers while the first one waits for its tool, and the other way round. 10 s each:
    first answers until 10 and 20, second ones until 30 and 40, and the last tool."""
    costs = replace(PLAIN, environment=TWO_TURNS)
    committed_s = seconds(tmp_path, "turns", costs, rollout={**ONE, "max_running": 1}, steps=1)
    assert committed_s == [pytest.approx(43.0 + 4.8)]


def test_an_episode_ends_at_the_limit_of_turns(tmp_path: Path) -> None:
    """Two of five answers, with 3 s for both tools."""
    costs = replace(PLAIN, environment=replace(TWO_TURNS, turns=LogNormal(median=5.0)))
    assert seconds(tmp_path, "turns", costs, environment={"max_turns": 2}, steps=1) == [30.8]


def test_an_episode_ends_where_a_reply_has_no_room(tmp_path: Path) -> None:
    """13 tokens leave room for 3 after the first answer."""
    costs = replace(PLAIN, environment=TWO_TURNS)
    assert seconds(tmp_path, "turns", costs, environment={"max_episode_tokens": 13}, steps=1) == [15.0]


def test_a_tool_that_takes_longer_than_its_deadline_fails_its_episode(tmp_path: Path) -> None:
    costs = replace(PLAIN, environment=replace(TWO_TURNS, call_s=LogNormal(median=61.0)))
    with pytest.raises(RolloutError, match="took longer than 60 s"):
        simulated(recipe(tmp_path, "turns", rollout=ONE), costs)


@pytest.mark.parametrize("placement", [{"devices": 2}, {"layout": "split", "devices": 3, "rollout_devices": 2}])
def test_an_environment_of_one_turn_that_takes_no_time_changes_nothing(
    tmp_path: Path, placement: dict[str, Any]
) -> None:
    """Requests of runners are answered like prompts: the same lengths at the same times, and the same updates. One
    generator for each prompt, and lanes for all of its episodes: runners do not balance what they ask for."""
    rollout = {"prompts_per_step": 2}
    plain, turns = (
        simulated(recipe(tmp_path / name, name, placement=placement, rollout=rollout), replace(PLAIN, publish_s=0.25))
        for name in ("grpo", "turns")
    )
    assert turns.committed_s == pytest.approx(plain.committed_s)
    assert turns.weights == plain.weights


@pytest.mark.slow
def test_the_critic_and_the_reference_decide_what_the_policy_learns(tmp_path: Path) -> None:
    """Else nobody would notice that they were replaced by others."""
    warm = {each: simulated(recipe(tmp_path / f"w{each}", "ppo", critic={"warmup_steps": each})) for each in (1, 2)}
    plain, refreshed = (simulated(recipe(tmp_path / name, name)) for name in ("kl", "kl, refreshed"))
    swapped = recipe(tmp_path / "swapped", "distill")
    swapped = swapped.model_copy(update={"teachers": swapped.teacher_sections[::-1]})

    assert warm[1].weights != warm[2].weights
    assert plain.weights != refreshed.weights
    assert simulated(swapped).weights != simulated(recipe(tmp_path / "same", "distill")).weights


def test_an_adaptive_coefficient_moves(tmp_path: Path) -> None:
    run = simulated(recipe(tmp_path, "kl, adaptive"), METHOD_COSTS)
    coefficients = [line["kl/coefficient"] for line in metrics_by_step(run.result.folder).values()]
    assert coefficients[0] == 0.1
    assert len(set(coefficients)) == len(coefficients)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_is_resumed_ends_with_the_same_weights(tmp_path: Path, name: str) -> None:
    """Critic and reference go on from their own checkpoints, on two learners."""
    changes: dict[str, Any] = {"placement": {"devices": 2}, "checkpoint": {"every": 2, "keep": 9}, "steps": 6}
    whole = recipe(tmp_path, name, **changes)
    run = simulated(whole, METHOD_COSTS)

    again = simulated(whole, METHOD_COSTS, resume_step=4)

    assert again.weights == run.weights
    assert len(again.committed_s) == 2
    assert sorted(metrics_by_step(run.result.folder)) == list(range(1, 7))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo, kl", "distill", "turns, ppo"])
def test_no_method_imports_torch(tmp_path: Path, name: str) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from helpers.simulated_runs import METHOD_COSTS, method, recipe_of, simulated\n"
        "folder = Path(sys.argv[1])\n"
        "run = simulated(recipe_of(folder, **method(sys.argv[2], folder), steps=3), METHOD_COSTS)\n"
        "assert run.result.step == 3\n"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), name], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_agents_are_refused(tmp_path: Path) -> None:
    agent = {"agent_command": ["run-agent", "{task}"], "max_turns": 4}
    with pytest.raises(ClusterError, match="agents"):
        simulated(recipe_of(tmp_path, environment=agent))
