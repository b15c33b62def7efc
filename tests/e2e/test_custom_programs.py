# SPDX-License-Identifier: Apache-2.0
"""Programs of a user's own: they run, learn, resume and fail as built-in ones do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.on_policy import ledger, numbers, rl_recipe
from helpers.workspace import Outcome, Workspace

ON_POLICY = """
from podium.algorithms.advantages import group_relative

async def grpo(run):
    async for step in run.steps():
        advantages = group_relative(step.rewards_N, step.group_N)
        batch = step.batch(advantages)
        report = await run.policy.update(batch)
        await run.commit(step, batch, policy=report)

async def best_half(run):
    assert run.recipe.options == {"share": 0.5}
    async for step in run.steps():
        order = step.rewards_N.argsort()
        step = step.keep(sorted(order[int(len(order) * run.recipe.options["share"]):]))
        batch = step.batch(step.rewards_N)
        report = await run.policy.update(batch)
        await run.commit(step, batch, policy=report)

async def forgetful(run):
    async for step in run.steps():
        pass

async def unawaited(run):
    async for step in run.steps():
        batch = step.batch(step.rewards_N)
        await run.commit(step, batch, policy=run.policy.update(batch))

async def leaves(run):
    async for step in run.steps():
        await run.commit(step)
        break

async def wrong_shape(run):
    async for step in run.steps():
        step.batch([1.0])

def not_async(run):
    pass
"""
FIXED = """
from podium.algorithms.dense import token_cross_entropy
from podium.spmd.evaluation import mean_token_loss

def sft(run):
    for step in run.steps(mean_token_loss(run.engine, token_cross_entropy)):
        report = run.engine.train_step(
            step.micro_batches, token_cross_entropy, normalizer=step.global_tokens, lr=step.lr,
            stop_requested=run.stop_requested,
        )
        run.record(step, report)

def leaves(run):
    return

async def not_plain(run):
    pass
"""


@pytest.fixture
def user(workspace: Workspace) -> Workspace:
    (workspace.path / "on_policy.py").write_text(ON_POLICY)
    (workspace.path / "fixed.py").write_text(FIXED)
    return workspace


def _custom(name: str) -> dict[str, Any]:
    return {"program": f"on_policy.py:{name}", "signal": "on_policy"}


def _done(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome


def test_grpo_written_by_a_user_is_grpo(user: Workspace) -> None:
    _done(user.podium("train", rl_recipe(user, "built_in")))
    _done(user.podium("train", rl_recipe(user, "custom", **_custom("grpo"))))

    assert numbers(user.path / "runs/custom") == numbers(user.path / "runs/built_in")
    assert ledger(user.path / "runs/custom") == ledger(user.path / "runs/built_in")


def test_sft_written_by_a_user_is_sft(user: Workspace) -> None:
    _done(user.podium("train", user.recipe("built_in")))
    _done(user.podium("train", user.recipe("custom", program="fixed.py:sft", signal="fixed")))

    assert user.metric("custom", "loss") == user.metric("built_in", "loss")


@pytest.mark.slow
def test_options_and_kept_episodes_reach_program_and_ledger(user: Workspace) -> None:
    recipe = rl_recipe(user, "half", **_custom("best_half"), options={"share": 0.5})

    _done(user.podium("train", recipe))

    rows = ledger(user.path / "runs/half")
    assert len(rows) == 3 * 16
    assert sum(row[5] == "consumed" for row in rows) == 3 * 8
    assert user.metric("half", "episodes/learned_from") == {1: 8.0, 2: 8.0, 3: 8.0}


@pytest.mark.slow
def test_a_custom_program_resumes_exactly(user: Workspace) -> None:
    steps = {"steps": 4, "checkpoint": {"every": 2, "keep": 9, "background": False}}
    _done(user.podium("train", rl_recipe(user, "whole", **_custom("grpo"), **steps)))
    again = Path(shutil.copytree(user.path / "runs/whole", user.path / "runs/again"))

    _done(user.podium("resume", "runs/again", "--step", "2"))

    assert numbers(again) == numbers(user.path / "runs/whole")
    assert ledger(again) == ledger(user.path / "runs/whole")


@pytest.mark.slow
def test_a_program_that_failed_is_fixed_and_the_run_continues(user: Workspace) -> None:
    steps = {"steps": 4, "checkpoint": {"every": 2, "keep": 9, "background": False}}
    _done(user.podium("train", rl_recipe(user, "whole", **_custom("grpo"), **steps)))
    broken = ON_POLICY.replace(
        "async for step in run.steps():", "async for step in run.steps():\n        1 / (3 - step.number)"
    )
    (user.path / "on_policy.py").write_text(broken)
    assert user.process("train", rl_recipe(user, "broken", **_custom("grpo"), **steps)).code != 0

    (user.path / "on_policy.py").write_text(ON_POLICY)
    _done(user.process("resume", "runs/broken"))

    assert numbers(user.path / "runs/broken") == numbers(user.path / "runs/whole")
    files = {each["path"] for each in json.loads((user.path / "runs/broken/run.json").read_text())["lineage"]["inputs"]}
    assert any(file.endswith("on_policy.py:grpo") for file in files)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    # fast: tests/unit/controller/test_on_policy_run.py and test_steps.py
    ["forgetful", "unawaited", *(pytest.param(each, marks=pytest.mark.slow) for each in ("leaves", "wrong_shape"))],
)
def test_a_program_that_misuses_its_run_is_stopped_in_words(user: Workspace, program: str) -> None:
    outcome = user.podium("train", rl_recipe(user, program, **_custom(program)))

    assert outcome.code == 2, outcome
    assert ("await run.policy.update" if program == "unawaited" else "step") in outcome.err
    assert "Traceback" not in outcome.err


def test_a_program_on_fixed_data_that_leaves_early_is_stopped_in_words(user: Workspace) -> None:
    outcome = user.podium("train", user.recipe("leaves", program="fixed.py:leaves", signal="fixed"))

    assert outcome.code == 2, outcome
    assert "run.steps()" in outcome.err


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"program": "on_policy.py:grpo"}, "signal"),
        ({"program": "on_policy.py:missing", "signal": "on_policy"}, "program"),
        ({"program": "missing.py:grpo", "signal": "on_policy"}, "program"),
        ({"program": "grpo", "signal": "on_policy"}, "signal"),
        ({"program": "on_policy.py:grpo", "signal": "sometimes"}, "signal"),
    ],
)
def test_a_recipe_that_does_not_fit_its_program_is_refused(user: Workspace, changes: dict[str, Any], key: str) -> None:
    for verb in ("check", "train"):
        user.refused(user.podium(verb, rl_recipe(user, "wrong", **changes)), f"{key}: ")


def test_the_kind_of_function_must_fit_the_signal(user: Workspace) -> None:
    for verb in ("check", "train"):
        user.refused(user.podium(verb, rl_recipe(user, "wrong", **_custom("not_async"))), "program: ", "async")
        wrong = user.recipe("wrong", program="fixed.py:not_plain", signal="fixed")
        user.refused(user.podium(verb, wrong), "program: ", "async")


def test_a_program_without_rewards_is_warned_of(user: Workspace) -> None:
    outcome = user.podium("check", rl_recipe(user, "plain", **_custom("grpo"), reward=[]))

    assert "warning: reward: " in outcome.out


@pytest.mark.slow
@pytest.mark.serial
def test_a_custom_program_runs_on_two_ranks_and_on_two_ray_workers(user: Workspace) -> None:
    two = {"device": "cpu", "threads": 1, "onednn": False, "devices": 2}
    _done(user.process("train", user.recipe("ranks", program="fixed.py:sft", signal="fixed", placement=two)))
    _done(user.process("train", user.recipe("plain", placement=two)))
    assert user.metric("ranks", "loss") == user.metric("plain", "loss")

    ray = {**two, "launcher": "ray"}
    _done(user.process("train", rl_recipe(user, "workers", **_custom("grpo"), placement=ray)))
    _done(user.process("train", rl_recipe(user, "inline")))
    workers, inline = (numbers(user.path / "runs" / name) for name in ("workers", "inline"))
    assert [workers[step]["reward/mean"] for step in (1, 2, 3)] == [inline[step]["reward/mean"] for step in (1, 2, 3)]
