# SPDX-License-Identifier: Apache-2.0
"""Episodes in the run folder: an update can be computed again from them, whatever the method; and what is kept when."""

# L tokens of one episode

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.on_policy import numbers, rl_recipe
from helpers.processes import user_processes, wait_until
from helpers.tiny import save_tiny_model, tiny_tokenizer
from helpers.workspace import Workspace
from podium.runs.rollout_files import KeptEpisode, read_rollouts, rollout_path, rollout_steps

KEEP_ALL = {"rollouts": {"keep": "all"}}
LR, CLIP_LOW, CLIP_HIGH, BETA = 3e-3, 0.2, 0.28, 0.3
METHODS: dict[str, dict[str, Any]] = {
    # Two epochs: in the second one ratios are not 1, and some are clipped.
    "grpo": {"algorithm": {"epochs": 2, "clip_high": CLIP_HIGH}},
    "grpo, kl": {"algorithm": {"epochs": 2, "clip_high": CLIP_HIGH, "kl": {"coefficient": BETA, "estimator": "k3"}}},
    "reinforce++": {"algorithm": {"advantage": "reinforce_pp", "gamma": 0.9, "clip_high": CLIP_HIGH, "epochs": 2}},
    "ppo": {"program": "ppo", "algorithm": {"lam": 0.9, "gamma": 0.95, "clip_high": CLIP_HIGH, "epochs": 2}},
    "distillation": {
        "program": "on_policy_distill", "teachers": [{"path": "teacher"}], "reward": [],
        "algorithm": {"loss": "policy_gradient"},
    },
}  # fmt: skip


def trained(workspace: Workspace, name: str = "sums", /, **changes: Any) -> Path:
    outcome = workspace.podium("train", rl_recipe(workspace, name, **changes))
    assert outcome.code == 0, outcome
    assert "cannot" not in outcome.out + outcome.err
    return workspace.path / "runs" / name


# --- the update by hand: plain torch and transformers, nothing of Podium ---


def log_probs_of(model: Any, episode: KeptEpisode) -> torch.Tensor:
    """Of the trained tokens, under the model's weights."""
    tokens = torch.tensor(episode.tokens)
    logits = model(input_ids=tokens[:-1].unsqueeze(0)).logits[0].float()
    every = torch.log_softmax(logits, dim=-1).gather(-1, tokens[1:].unsqueeze(-1))[:, 0]
    return every[torch.tensor(episode.loss_mask)[1:]]


def of_trained(values: tuple[Any, ...], episode: KeptEpisode) -> torch.Tensor:
    picked = [value for value, is_trained in zip(values, episode.loss_mask, strict=True) if is_trained]
    assert None not in picked
    return torch.tensor(picked)


def loss_of(model: Any, episodes: list[KeptEpisode], algorithm: dict[str, Any]) -> torch.Tensor:
    total, count = torch.zeros(()), 0
    for episode in episodes:
        if not any(episode.loss_mask):
            continue
        log_probs, old = log_probs_of(model, episode), of_trained(episode.log_probs, episode)
        advantages = of_trained(episode.advantages, episode)
        if algorithm.get("loss") == "policy_gradient":
            losses = -advantages * log_probs
        else:
            ratio = (log_probs - old).exp()
            losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
        if "kl" in algorithm:
            away = of_trained(episode.reference_log_probs, episode) - log_probs
            losses = losses + BETA * (away.exp() - away - 1)
        total, count = total + losses.sum(), count + len(losses)
    return total / count


@pytest.mark.parametrize(
    "method", [name if name == "grpo, kl" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_loss_gradient_and_weights_of_a_step_follow_from_its_file(workspace: Workspace, method: str) -> None:
    changes = METHODS[method]
    if "teachers" in changes:
        save_tiny_model("llama", workspace.path / "teacher", seed=5, vocab_size=len(tiny_tokenizer()))
        tiny_tokenizer().save_pretrained(workspace.path / "teacher")
    run = trained(workspace, steps=1, run=KEEP_ALL, **changes)
    assert workspace.podium("export", "runs/sums", "after").code == 0
    metrics = numbers(run)[1]

    episodes = [episode for episode in read_rollouts(run, 1) if episode.trained]
    model = transformers.AutoModelForCausalLM.from_pretrained(workspace.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses, norms = [], []
    for _ in range(changes["algorithm"].get("epochs", 1)):
        optimizer.zero_grad()
        loss = loss_of(model, episodes, changes["algorithm"])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(loss.item())
        optimizer.step()

    assert len(episodes) == metrics["episodes/learned_from"] == 16
    assert sum(sum(episode.loss_mask) for episode in episodes) == metrics["trained_tokens"]
    assert sum(losses) / len(losses) == pytest.approx(metrics["loss"], abs=2e-6, rel=1e-4)
    assert sum(norms) / len(norms) == pytest.approx(metrics["grad_norm"], rel=1e-4)
    if len(losses) > 1:
        assert metrics["clip/fraction"] > 0  # the clip was a part of what was computed
    after = transformers.AutoModelForCausalLM.from_pretrained(workspace.path / "after", dtype=torch.float32)
    before = transformers.AutoModelForCausalLM.from_pretrained(workspace.model, dtype=torch.float32)
    for (name, mine), theirs, old in zip(
        model.named_parameters(), after.parameters(), before.parameters(), strict=True
    ):
        # Where a gradient is all but 0, AdamW's first step is its sign: rounding decides there.
        apart = (mine - theirs).abs() > 0.02 * LR
        assert apart.float().mean() < 0.01, name
        assert not torch.equal(theirs, old) or torch.equal(mine, old), name


# --- episodes of several turns ---

DIALOGUE = """
from podium.environments.protocol import Observation, Outcome

class Dialogue:
    async def reset(self, task):
        return Observation()

    async def step(self, turn):
        digits = sum(letter.isdigit() for letter in turn.text)
        return Outcome(messages=f"{digits} digits more?", reward=digits / 10)
"""


@pytest.mark.slow
def test_turns_of_an_agent_are_apart_and_only_its_own_tokens_are_trained(workspace: Workspace) -> None:
    (workspace.path / "dialogue.py").write_text(DIALOGUE)
    run = trained(workspace, steps=2, run=KEEP_ALL, environment={"environment": "dialogue.py:Dialogue", "max_turns": 3})

    turns = numbers(run)[2]["turns/mean"]
    episodes = list(read_rollouts(run, 2))
    said = [[each for each in episode.messages if each["role"] == "assistant"] for episode in episodes]
    assert np.mean([len(each) for each in said]) == turns > 1
    for episode in episodes:
        roles = [each["role"] for each in episode.messages]
        assert roles == (["user", "assistant"] * 9)[: len(roles)]
        for answer, reply in zip(episode.messages[1::2], episode.messages[2::2], strict=False):
            assert reply["content"] == f"{sum(letter.isdigit() for letter in answer['content'])} digits more?"
        own = "".join(text for text, mask in zip(episode.texts, episode.loss_mask, strict=True) if mask)
        assert re.sub(r"<\|\w+\|>", "", own) == "".join(
            each["content"] for each in episode.messages if each["role"] == "assistant"
        )
        for version, log_prob, advantage, mask in zip(
            episode.versions, episode.log_probs, episode.advantages, episode.loss_mask, strict=True
        ):
            assert (version == 1) == (log_prob is not None) == (advantage is not None) == mask
        assert episode.reward == pytest.approx(episode.rewards["digits"] + episode.rewards["environment"])


@pytest.mark.slow
def test_processes_of_user_code_end_with_their_run_and_not_with_the_garbage_collector(workspace: Workspace) -> None:
    (workspace.path / "dialogue.py").write_text(DIALOGUE)
    gc.collect()
    gc.disable()
    try:
        trained(workspace, steps=1, environment={"environment": "dialogue.py:Dialogue", "max_turns": 2})
        wait_until(lambda: not user_processes(), "the end of rewards and environments", deadline_s=10)
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_resumed_run_has_the_files_of_an_unbroken_one(workspace: Workspace) -> None:
    steps = {"checkpoint": {"every": 2, "keep": 9}, "run": {"rollouts": {"per_step": 8}}}
    whole = trained(workspace, "whole", steps=5, **steps)
    broken = trained(workspace, "broken", steps=5, **steps)
    folder = broken / "rollouts"
    damaged = rollout_path(folder, 4).read_bytes()
    rollout_path(folder, 4).write_bytes(b"x")

    outcome = workspace.podium("resume", "runs/broken", "--step", "2", "--set", "run.rollouts.per_step=16")

    assert outcome.code == 0, outcome
    assert rollout_steps(folder) == [1, 2, 3, 4, 5]
    assert rollout_path(folder, 2).read_bytes() == rollout_path(whole / "rollouts", 2).read_bytes()
    assert rollout_path(folder, 4).read_bytes() != damaged  # twice as many episodes
    again = {(each.group, each.sample): each for each in read_rollouts(broken, 4)}
    assert len(again) == 16
    for each in read_rollouts(whole, 4):
        assert again[each.group, each.sample] == each


def test_a_recipe_that_keeps_something_else_is_refused(workspace: Workspace) -> None:
    outcome = workspace.podium("train", rl_recipe(workspace, run={"rollouts": {"keep": "some"}}))
    workspace.refused(outcome, "run.rollouts.keep", "all", "sample", "none")
    outcome = workspace.podium("train", rl_recipe(workspace, run={"rollouts": {"per_step": 0}}))
    workspace.refused(outcome, "run.rollouts.per_step")
    outcome = workspace.podium("train", workspace.recipe("sums", run={"rollouts": {"keep": "all"}}))
    workspace.refused(outcome, "run.rollouts")
