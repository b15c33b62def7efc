# SPDX-License-Identifier: Apache-2.0
"""Runs whose episodes are played by agents, through the gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.agents import AGENTS
from helpers.on_policy import ledger, numbers, rl_recipe
from helpers.workspace import Workspace
from podium.data.trajectories import TrajectoryBlock, TrajectoryIds
from podium.runs.rollout_files import read_rollouts
from podium.runs.step_files import NO_DIGEST, read_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

COMMAND = """
import asyncio, json, os, sys
import agents

task = json.loads(sys.argv[1])
assert task["row"]["messages"]
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
assert url == os.environ["ANTHROPIC_BASE_URL"] + "/v1" and key == os.environ["ANTHROPIC_API_KEY"]
messages = task["messages"]
for _ in range(2):
    status, answer = asyncio.run(agents.ask(url, key, messages))
    assert status == 200, answer
    messages = [*messages, agents.said(answer), {"role": "user", "content": "more"}]
print("some output")
print(json.dumps({"reward": 0.25}))
"""


def trained(workspace: Workspace, name: str, agent: str, **changes: Any) -> Path:
    (workspace.path / "agents.py").write_text(AGENTS)
    values: dict[str, Any] = {
        "environment": {"agent": f"agents.py:{agent}"}, "reward": [], "steps": 2,
        "run": {"rollouts": {"keep": "all"}}, **changes,
    }  # fmt: skip
    outcome = workspace.podium("train", rl_recipe(workspace, name, **values))
    assert outcome.code == 0, outcome
    return workspace.path / "runs" / name


def test_an_agent_of_several_turns_is_trained_and_a_second_run_is_the_same(workspace: Workspace) -> None:
    runs = [trained(workspace, name, "several_turns") for name in ("one", "two")]

    steps = numbers(runs[0])
    for step in (1, 2):
        found = steps[step]
        assert found["turns/mean"] == 3
        assert found["environment/trained_tokens"] == found["environment/sampled_tokens"] > 3
        assert found["environment/sequences"] == 1
        assert found["grad_norm"] > 0
    assert [row[5] for row in ledger(runs[0])].count("consumed") == 32
    assert numbers(runs[1]) == steps
    assert ledger(runs[1]) == ledger(runs[0])


def differences(first: Path, second: Path) -> list[tuple[Any, ...]]:
    """(step, metric, both values) of every number that differs."""
    one, other = numbers(first), numbers(second)
    assert one.keys() == other.keys()
    return [
        (step, name, one[step].get(name), other[step].get(name))
        for step in one
        for name in sorted(one[step].keys() | other[step].keys())
        if one[step].get(name) != other[step].get(name)
    ]


def recorded(run: Path) -> tuple[TrajectoryBlock, np.ndarray]:
    """The episodes of the first step and their advantages: rewards less the mean of their group."""
    file, _ = read_step(run / "steps", 1, NO_DIGEST)
    columns = ("offsets", "tokens_T", "loss_mask_T", "behavior_logprobs_T", "versions_T", "starts_T")
    ids = TrajectoryIds(file.arrays["sampled.ids"])
    block = TrajectoryBlock(ids=ids, **{column: file.arrays[f"sampled.{column}"] for column in columns})
    rewards_N, groups = file.arrays["sampled.rewards_N"], ids.array_N4[:, 0]
    means = np.array([rewards_N[groups == group].mean() for group in groups])
    return block, rewards_N - means


def test_the_gradient_of_a_tree_is_that_of_its_sequences_by_hand(workspace: Workspace) -> None:
    """The episodes on disk give the gradient norm of the first step with plain transformers."""
    algorithm = {"advantage": "group_centered", "loss": "policy_gradient"}
    run = trained(workspace, "tree", "summarises", steps=1, rollout={"record": True}, algorithm=algorithm)
    block, advantages = recorded(run)
    assert block.starts_T is not None
    sampled = int(block.loss_mask_T.sum())
    found = numbers(run)[1]
    assert found["environment/sequences"] == 3
    assert found["environment/trained_tokens"] * len(block.ids) == sampled

    model = transformers.AutoModelForCausalLM.from_pretrained(workspace.model, dtype=torch.float32)
    loss = torch.zeros(())
    for row, advantage in enumerate(advantages):
        for begin, end in block.sequences(row):
            tokens = torch.from_numpy(block.tokens_T[begin:end].astype(np.int64))
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            mask = torch.from_numpy(block.loss_mask_T[begin + 1 : end].copy())
            loss = loss - float(advantage) * logprobs[mask].sum() / sampled
    loss.backward()
    norm = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).norm()
    assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert float(norm) > 1e-3


def advantages_by_hand(file: Any, credit: str, discount: float) -> tuple[Any, Any, list[float]]:
    """(row, last token, advantage) of every turn, branch by branch: returns less the mean of the group."""
    row_K, token_K, parent_K = (file.arrays[f"sampled.turns.{name}_K"] for name in ("row", "token", "parent"))
    reward_K, rewards_N = file.arrays["sampled.turns.reward_K"], file.arrays["sampled.rewards_N"]
    groups = file.arrays["sampled.ids"][:, 0]
    paths: dict[int, list[list[int]]] = {}
    for row in range(len(rewards_N)):
        turns = np.flatnonzero(row_K == row).tolist()
        parent = {turn: turns[parent_K[turn]] if parent_K[turn] >= 0 else None for turn in turns}
        for last in sorted(set(turns) - set(parent.values())):
            path = [last]
            while (before := parent[path[0]]) is not None:
                path.insert(0, before)
            paths.setdefault(row, []).append(path)
    values: dict[int, float] = {}
    means = {}
    for row, branches in paths.items():
        rest = rewards_N[row] - reward_K[row_K == row].sum()
        # Two roots, of which the second has a fork behind it.
        fractions = [0.5 / sum(other[0] == branch[0] for other in branches) for branch in branches]
        assert sorted(fractions) == [0.25, 0.25, 0.5]
        sums: dict[int, list[tuple[float, float]]] = {}
        mean = 0.0
        for branch, fraction in zip(branches, fractions, strict=True):
            own = [float(reward_K[turn]) for turn in branch]
            own[-1] += float(rest)
            for place, turn in enumerate(branch):
                later = own if credit == "branch" else [reward * discount**at for at, reward in enumerate(own[place:])]
                sums.setdefault(turn, []).append((fraction, sum(later)))
        for turn, parts in sums.items():
            values[turn] = sum(share * value for share, value in parts) / sum(share for share, _ in parts)
        for branch, fraction in zip(branches, fractions, strict=True):
            own_values = [values[branch[-1]]] if credit == "branch" else [values[turn] for turn in branch]
            mean += fraction * sum(own_values) / len(own_values)
        means[row] = mean
    of_group = {group: np.mean([means[row] for row in means if groups[row] == group]) for group in set(groups.tolist())}
    advantages = [values[turn] - of_group[int(groups[row_K[turn]])] for turn in range(len(row_K))]
    return row_K, token_K, [float(each) for each in advantages]


@pytest.mark.parametrize("credit", ["turn", "branch"])
def test_the_gradient_of_turns_and_branches_is_that_by_hand(workspace: Workspace, credit: str) -> None:
    """A tree with rewards of turns. The episodes on disk give the gradient norm with plain transformers."""
    discount = 0.5 if credit == "turn" else 1.0
    algorithm = {
        "advantage": "group_centered", "loss": "policy_gradient", "credit": credit, "turn_discount": discount,
    }  # fmt: skip
    run = trained(workspace, credit, "rewards_turns", steps=1, rollout={"record": True}, algorithm=algorithm)
    block, _ = recorded(run)
    file, _ = read_step(run / "steps", 1, NO_DIGEST)
    row_K, token_K, advantages = advantages_by_hand(file, credit, discount)
    assert len(advantages) == 5 * len(block.ids)
    assert len({round(each, 6) for each in advantages}) > 20
    sampled = int(block.loss_mask_T.sum())

    model = transformers.AutoModelForCausalLM.from_pretrained(workspace.model, dtype=torch.float32)
    loss = torch.zeros(())
    for row in range(len(block.ids)):
        first = int(block.offsets[row])
        of_row = np.flatnonzero(row_K == row)
        for begin, end in block.sequences(row):
            tokens = torch.from_numpy(block.tokens_T[begin:end].astype(np.int64))
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            for place in np.flatnonzero(block.loss_mask_T[begin + 1 : end]).tolist():
                turn = next(turn for turn in of_row if token_K[turn] >= begin + 1 + place - first)
                loss = loss - advantages[turn] * logprobs[place] / sampled
    loss.backward()
    norm = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).norm()
    assert numbers(run)[1]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert float(norm) > 1e-3


def test_an_agent_in_a_thread_learns_the_same_as_a_coroutine(workspace: Workspace) -> None:
    runs = [trained(workspace, agent, agent) for agent in ("several_turns", "in_a_thread")]
    first, second = (numbers(run) for run in runs)
    assert second == first


def test_a_command_is_an_agent_and_evaluations_play_it_too(workspace: Workspace) -> None:
    (workspace.path / "agents.py").write_text(AGENTS)
    (workspace.path / "cli.py").write_text(COMMAND)
    evaluation = {"at_start": True, "every": 1, "generation": {"prompts": 4}}
    environment = {"agent_command": [sys.executable, "cli.py", "{task}"], "concurrency": 4}
    data = {"heldout": [{"path": "train.jsonl"}]}
    run = trained(workspace, "command", "", steps=1, data=data, evaluation=evaluation, environment=environment)
    found = numbers(run)[1]
    assert found["turns/mean"] == 2
    assert found["reward/mean"] == pytest.approx(0.25)  # what the program prints
    assert found["episodes/failed"] == 0
    assert numbers(run)[0]["heldout/score"] == pytest.approx(0.25)


def test_rewards_of_the_recipe_grade_what_the_agent_did_not(workspace: Workspace) -> None:
    run = trained(workspace, "graded", "graded_by_the_recipe", reward=[{"function": "rewards.py:digits"}])
    for episode in read_rollouts(run, 1):
        text = str(episode.messages[-1]["content"])
        assert episode.reward == pytest.approx(sum(each.isdigit() for each in text) / max(1, len(text)))


@pytest.mark.parametrize("fault", ["raise", "hang", "silent", "exit"])
def test_a_fault_costs_its_episodes_and_not_the_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("AGENT_FAULT", fault)
    run = trained(
        workspace, fault, "fails", environment={"agent": "agents.py:fails", "timeout_s": 8.0},
        grading={"on_error": "zero", "max_failed_share": 0.9},
    )  # fmt: skip
    failed = [episode for step in (1, 2) for episode in read_rollouts(run, step) if episode.error]
    others = [episode for step in (1, 2) for episode in read_rollouts(run, step) if not episode.error]
    assert failed
    assert {"raise": "a bug of the agent", "hang": "took longer", "silent": "without an answer", "exit": "exit code 7"}[
        fault
    ] in str(failed[0].error)
    assert {len([each for each in episode.messages if each["role"] == "assistant"]) for episode in others} == {3}
    assert len(failed) + len(others) == 32


def test_a_tree_is_replayed_and_a_resumed_run_goes_on_as_if_nothing_had_happened(workspace: Workspace) -> None:
    optimizer = {"lr": 3e-3, "schedule": "constant"}
    whole, part = (
        trained(workspace, name, "summarises", steps=steps, rollout={"record": True}, optimizer=optimizer)
        for name, steps in (("whole", 3), ("part", 2))
    )

    replayed = workspace.podium("replay", str(part))
    assert replayed.code == 0, replayed
    resumed = workspace.podium("resume", str(part), "--set", "steps=3")
    assert resumed.code == 0, resumed

    assert differences(part, whole) == []
    assert ledger(part) == ledger(whole)


@pytest.mark.parametrize("launcher", ["ray"])
def test_agents_on_ray_with_stale_tokens(workspace: Workspace, launcher: str) -> None:
    """Generators beside the learner, two runners, and episodes over several versions of the weights."""
    environment = {"agent": "agents.py:summarises", "runners": 2}
    run = trained(
        workspace, "ray", "", steps=3, rollout={"staleness": 1}, environment=environment,
        placement={"launcher": launcher, "devices": 2, "layout": "split"},
    )  # fmt: skip
    found = numbers(run)
    for step in (1, 2, 3):
        assert found[step]["environment/trained_tokens"] == found[step]["environment/sampled_tokens"] > 0
        assert found[step]["episodes/failed"] == 0
        assert found[step]["environment/sequences"] == 3
