# SPDX-License-Identifier: Apache-2.0
"""Runs whose judge is a model of the run: frozen weights beside the policy, or the policy itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.chain_model import save_chain_folder
from helpers.on_policy import numbers, rl_recipe
from helpers.workspace import Workspace
from podium.observe import read_metrics

RUBRIC = {"rubric": "7: good.", "answer_format": "line", "request": {"max_tokens": 12}}
PLACED = {
    "inline": {"launcher": "inline"},
    "two devices on Ray": {"launcher": "ray", "devices": 2},
    "split": {"launcher": "ray", "devices": 2, "layout": "split"},
}


def lines_of(run: Path) -> list[Any]:
    return [line.values for line in read_metrics(run) if "reward/mean" in line.values]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "where",
    [pytest.param("inline", id="inline"), pytest.param("two devices on Ray", id="ray", marks=pytest.mark.serial)],
)
def test_a_frozen_judge_grades_and_a_resumed_run_repeats_it(workspace: Workspace, where: str) -> None:
    judge = save_chain_folder(workspace.path / "judge", "score: 7")
    rewards = [
        {"function": "rewards.py:digits"},
        {"judge": {"model": str(judge), **RUBRIC, "cache": "run_folder"}, "name": "style", "weight": 0.5},
    ]
    recipe = rl_recipe(
        workspace, "judged", reward=rewards, steps=2, checkpoint={"every": 1}, placement=PLACED[where],
        data={"heldout": [{"path": "heldout.jsonl"}]}, evaluation={"every": 2},
    )  # fmt: skip
    assert workspace.podium("check", recipe, "--deep").code == 0, workspace.capture.readouterr()
    done = workspace.process("train", recipe)
    assert done.code == 0, done
    run = workspace.path / "runs/judged"
    before, first = lines_of(run), numbers(run)
    assert [line["reward/style/mean"] for line in before] == [0.7, 0.7]
    assert [line["judge/style/requests"] + line["judge/style/cache_hits"] for line in before] == [16.0, 16.0]
    for line in before:
        assert line["reward/mean"] == pytest.approx(line["reward/digits/mean"] + 0.35)
    heldout = [line.values for line in read_metrics(run) if "heldout/score" in line.values]
    assert heldout
    assert all(line["heldout/score"] >= 0.35 for line in heldout)
    assert {json.loads(line)["answer"] for file in (run / "judge_cache").iterdir() for line in file.open()} == {
        "score: 7"
    }

    assert workspace.process("resume", "runs/judged", "--step", "1").code == 0
    again = lines_of(run)[-1]
    assert again["judge/style/cache_hits"] == 16.0
    repeated = numbers(run)[2]
    assert (repeated["heldout/judge/style/requests"], repeated["heldout/judge/style/cache_hits"]) == (0.0, 8.0)
    assert _but_of_judging(repeated) == _but_of_judging(first[2])


def _but_of_judging(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without what says how often the judge was asked, which the cache changes."""
    return {name: value for name, value in metrics.items() if "judge/style/" not in name}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_policy_judges_its_own_answers(workspace: Workspace) -> None:
    policy = save_chain_folder(workspace.path / "policy", "score: 9")
    rewards = [{"judge": {"model": "policy", **RUBRIC}}]
    recipe = rl_recipe(
        workspace, "own", model={"path": str(policy)}, reward=rewards, steps=2,
        rollout={"max_new_tokens": 12, "prompts_per_step": 2},
    )  # fmt: skip
    done = workspace.process("train", recipe)
    assert done.code == 0, done
    lines = lines_of(workspace.path / "runs/own")
    assert [line["reward/judge/mean"] for line in lines] == [0.9, 0.9]
    # Each prompt's answers are the same, and another step has other weights, so that nothing is remembered.
    assert [line["judge/judge/requests"] for line in lines] == [2.0, 2.0]
    assert [line["judge/judge/cache_hits"] for line in lines] == [6.0, 6.0]


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(300)
def test_a_split_run_judges_on_the_learners_devices(workspace: Workspace) -> None:
    judge = save_chain_folder(workspace.path / "judge", "score: 3")
    recipe = rl_recipe(
        workspace, "split", reward=[{"judge": {"model": str(judge), **RUBRIC}}], steps=2, placement=PLACED["split"],
    )  # fmt: skip
    done = workspace.process("train", recipe)
    assert done.code == 0, done
    assert [line["reward/judge/mean"] for line in lines_of(workspace.path / "runs/split")] == [0.3, 0.3]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_judge_that_cannot_be_read_is_a_failed_reward_and_no_zero(workspace: Workspace) -> None:
    judge = save_chain_folder(workspace.path / "judge", "scored")
    recipe = rl_recipe(workspace, "unread", reward=[{"judge": {"model": str(judge), **RUBRIC}}], steps=1)
    done = workspace.process("train", recipe)
    assert done.code == 2
    assert "judge the judge's answer cannot be read: the last line is not `Score: N`" in done.err
    assert "max_failed_share" in done.err


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ({"model": "nowhere"}, "reward.0.judge.model: there is no folder nowhere"),
        ({"model": "policy", "cache": "run_folder"}, "the policy changes with every step"),
        ({"model": "policy", "memory_gib": 1}, "Set rollout.memory_gib"),
        ({"model": "m", "retries": 3}, "retries: is of a judge behind an endpoint"),
        ({"model": "m", "api_key_env": "KEY"}, "api_key_env: is of a judge behind an endpoint"),
        ({"model": "m", "request": {"response_format": {}}}, "request: response_format is of an endpoint"),
        ({"model": "m", "base_url": "http://127.0.0.1:1/v1", "max_length": 9}, "max_length: is of a judge in the run"),
    ],
)
def test_check_refuses_what_cannot_judge(workspace: Workspace, judge: dict[str, Any], words: str) -> None:
    recipe = rl_recipe(workspace, "wrong", reward=[{"judge": {"rubric": "r", **judge}}])
    outcome = workspace.podium("check", recipe)
    assert outcome.code == 2
    assert words in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("layout", ["split", "elastic"])
def test_check_refuses_a_policy_that_judges_while_generators_go_on(workspace: Workspace, layout: str) -> None:
    recipe = rl_recipe(
        workspace, "wrong", reward=[{"judge": {"rubric": "r", "model": "policy"}}],
        placement={"launcher": "ray", "devices": 2, "layout": layout},
    )  # fmt: skip
    outcome = workspace.podium("check", recipe)
    assert outcome.code == 2
    assert "reward.0.judge.model: the policy can judge only where learners and generators share" in outcome.err
