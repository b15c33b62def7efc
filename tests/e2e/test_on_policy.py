# SPDX-License-Identifier: Apache-2.0
"""On-policy recipes from the command line: every program, what it records, and the same numbers wherever it runs."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.on_policy import ledger, numbers, rl_recipe, said_by
from helpers.tiny import save_tiny_model, tiny_config, tiny_tokenizer
from helpers.workspace import Workspace

# What every step of an on-policy run records (docs/metrics.md).
ALWAYS = {
    "lr", "reward/mean", "reward/std", "reward/max", "reward/min", "groups", "groups/solved_all", "groups/solved_none",
    "groups/solved_some", "groups/solve_rate", "groups/uniform", "episodes", "episodes/failed", "episodes/dropped",
    "episodes/learned_from", "episodes/truncated", "response/mean", "response/max", "response/min", "prompt/mean",
    "staleness/mean", "staleness/max", "loss", "grad_norm", "skipped", "optimizer_steps", "entropy", "kl/behavior",
    "clip/high", "clip/low", "clip/fraction", "ratio/mean", "ratio/max", "ratio/ess", "advantage/mean",
    "advantage/std", "gap/mean", "gap/max", "imbalance", "micro_steps", "trained_tokens", "step_s", "idle_s", "tokens",
    "tokens_per_s", "rollout/generated_tokens", "rollout/tokens_per_s", "update/tokens_per_s", "mfu", "update/mfu",
    "time/rollout_s", "time/grade_s", "time/update_s", "time/publish_s", "prompts/too_long", "epoch",
}  # fmt: skip
EPISODES = 16  # of one step of `rl_recipe`
# What two runs that differ only in where they run have in common.
COMPARED = (
    "reward/mean", "reward/std", "response/mean", "prompt/mean", "trained_tokens", "loss", "grad_norm", "entropy",
    "advantage/mean", "advantage/std", "ratio/mean", "groups/uniform", "episodes/learned_from", "epoch",
)  # fmt: skip

OWN_PIECES = """
import torch

def halved(rewards_N, group_N):
    return (rewards_N - rewards_N.mean()) / 2

def squared(tokens):
    ratio = (tokens.logprobs_S - tokens.old_logprobs_S).exp()
    return -tokens.advantages_S * ratio + 0.1 * (ratio - 1) ** 2
"""


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    save_tiny_model("llama", folder, seed=5, vocab_size=len(tiny_tokenizer()))
    return folder


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward-model")
    torch.manual_seed(6)
    config = tiny_config("llama", vocab_size=len(tiny_tokenizer()), num_labels=1)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def trained(workspace: Workspace, recipe: str, *more: str) -> dict[int, dict[str, float]]:
    """Runs to its end; returns the metrics by step."""
    outcome = workspace.podium("train", recipe, *more)
    assert outcome.code == 0, outcome
    assert "Traceback" not in outcome.out + outcome.err
    return numbers(workspace.path / "runs" / Path(recipe).stem)


def assert_finite(found: dict[int, dict[str, float]]) -> None:
    for step, values in found.items():
        wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
        assert not wrong, f"step {step}: {wrong}"


def test_grpo_records_every_step_every_episode_and_a_checkpoint(workspace: Workspace) -> None:
    outcome = workspace.podium("train", rl_recipe(workspace))
    run = workspace.path / "runs" / "sums"

    assert outcome.code == 0, outcome
    assert re.search(r"program: grpo, 3 steps .*\b4 prompts x 4 samples.*\b6 new tokens", outcome.out)
    assert "step 3: runs/sums" in outcome.out
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line.keys() >= ALWAYS | {"step", "time_s", "reward/digits/mean"}
        assert all(math.isfinite(value) for value in line.values())
        assert line["episodes"] == line["episodes/learned_from"] == EPISODES
        assert line["groups"] == 4
        assert line["rollout/generated_tokens"] == line["trained_tokens"] == line["response/mean"] * EPISODES
        assert line["gap/max"] < 1e-4  # the engine draws from the very policy that is trained
        assert line["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
        assert line["time/rollout_s"] + line["time/update_s"] < line["step_s"]
    rows = ledger(run)
    assert [row[:2] for row in rows] == [(draw, sample) for draw in range(12) for sample in range(4)]
    assert [row[4] for row in rows] == [1 + draw // 4 for draw in range(12) for _ in range(4)]
    assert {row[5] for row in rows} == {"consumed"}
    assert sum(row[6] for row in rows) == sum(line["trained_tokens"] for line in lines)
    for line in lines:
        own = [row[7] for row in rows if row[4] == line["step"]]
        assert sum(own) / len(own) == pytest.approx(line["reward/mean"])
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints", "console.log", "episodes.sqlite", "machine.jsonl", "metrics.jsonl", "recipe.yaml", "rollouts",
        "run.json", "run.lock", "timeline.jsonl",
    ]  # fmt: skip
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    assert json.loads((run / "run.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_an_exported_policy_answers(workspace: Workspace) -> None:
    trained(workspace, rl_recipe(workspace))

    exported = workspace.podium("export", "runs/sums", "out")
    answered = workspace.podium(
        "generate",
        "out",
        "--prompts",
        "heldout.jsonl",
        "--out",
        "answers.jsonl",
        "--max-new-tokens",
        "4",
        "--temperature",
        "0",
    )

    assert exported.code == 0, exported
    assert answered.code == 0, answered
    answers = [json.loads(line) for line in (workspace.path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 8
    before = transformers.AutoModelForCausalLM.from_pretrained(workspace.model)
    after = transformers.AutoModelForCausalLM.from_pretrained(workspace.path / "out")
    assert after.config.vocab_size == before.config.vocab_size
    moved = [
        float((new - old).detach().abs().max())
        for new, old in zip(after.parameters(), before.parameters(), strict=True)
    ]
    assert min(moved) > 0
    assert max(moved) < 3 * 3 * 3e-3  # three steps of AdamW, each of about the learning rate


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another(workspace: Workspace) -> None:
    first = trained(workspace, rl_recipe(workspace, "first"))
    again = trained(workspace, rl_recipe(workspace, "again"))
    other = trained(workspace, rl_recipe(workspace, "other", run={"seed": 1}))
    assert first == again
    assert first[1]["reward/mean"] != other[1]["reward/mean"]


@pytest.mark.slow
def test_micro_batches_change_neither_loss_nor_gradient(workspace: Workspace) -> None:
    whole = trained(workspace, rl_recipe(workspace, "whole"))
    cut = trained(workspace, rl_recipe(workspace, "cut", micro_batch_tokens=64, data={"max_length": 64}))
    assert cut[1]["micro_steps"] > whole[1]["micro_steps"] == 1
    assert_alike(cut, whole)


def test_the_epoch_of_a_step_is_that_of_its_own_prompts(workspace: Workspace) -> None:
    """Six rows, four a step: the second step takes the last two of the first pass and two of the second."""
    workspace.rows("train.jsonl", [{"prompt": f"what is {number}?"} for number in range(6)])
    found = trained(workspace, rl_recipe(workspace, data={"train": [{"path": "train.jsonl"}], "shuffle": False}))
    assert [values["epoch"] for values in found.values()] == [0, 1, 1]


def test_ppo_learns_a_critic_beside_the_policy(workspace: Workspace) -> None:
    recipe = rl_recipe(workspace, program="ppo", critic={"warmup_steps": 1, "lr": 3e-2}, algorithm={"epochs": 2})
    found = trained(workspace, recipe)
    run = workspace.path / "runs" / "sums"

    assert_finite(found)
    assert {"value/loss", "value/grad_norm", "value/explained_variance", "value/mean"} <= found[1].keys()
    # Values begin at 0, so that every token's return is its episode's reward.
    first = [row for row in ledger(run) if row[4] == 1]
    wanted = sum(tokens * reward for *_, tokens, reward in first) / sum(row[6] for row in first)
    assert found[1]["value/return_mean"] == pytest.approx(wanted, rel=1e-5)
    assert "loss" not in found[1]  # the critic learns alone first
    assert found[2]["optimizer_steps"] == 2
    # Whitened over the step's tokens.
    assert found[2]["advantage/mean"] == pytest.approx(0.0, abs=1e-5)
    assert found[2]["advantage/std"] == pytest.approx(1.0, rel=1e-4)
    assert [path.name for path in (run / "critic").iterdir()] == ["step-00000003"]


def test_the_critics_warm_up_is_no_warning(workspace: Workspace) -> None:
    outcome = workspace.podium("train", rl_recipe(workspace, program="ppo", critic={"warmup_steps": 1}, steps=2))
    assert outcome.code == 0, outcome
    assert "warning" not in outcome.out + outcome.err


@pytest.mark.slow  # fast: tests/golden[on-policy-distillation]
def test_distillation_moves_the_policy_towards_its_teacher(workspace: Workspace, teacher: Path) -> None:
    recipe = rl_recipe(
        workspace, program="on_policy_distill", reward=[], teachers=[{"path": str(teacher)}], steps=12,
        optimizer={"lr": 1e-2}, rollout={"prompts_per_step": 8}, algorithm={"loss": "policy_gradient"},
    )  # fmt: skip
    found = trained(workspace, recipe)

    assert_finite(found)
    # The mean advantage is minus the reverse KL at the sampled tokens.
    assert found[1]["advantage/mean"] < 0
    assert found[12]["advantage/mean"] > 0.7 * found[1]["advantage/mean"]


@pytest.mark.slow
def test_a_policy_that_is_its_own_teacher_has_nothing_to_learn(workspace: Workspace) -> None:
    recipe = rl_recipe(
        workspace, program="on_policy_distill", teachers=[{"path": str(workspace.model)}], steps=1,
        rollout={"temperature": 0.7},
    )  # fmt: skip
    found = trained(workspace, recipe)
    assert found[1]["advantage/mean"] == pytest.approx(0.0, abs=1e-5)
    assert found[1]["grad_norm"] == pytest.approx(0.0, abs=1e-4)
    assert found[1]["reward/mean"] > 0  # only logged


def test_expert_iteration_imitates_what_it_solved(workspace: Workspace) -> None:
    recipe = rl_recipe(
        workspace, program="expert_iteration", grading={"solved_at": 0.3}, algorithm={"keep_per_prompt": 2}
    )
    found = trained(workspace, recipe)
    rows = ledger(workspace.path / "runs" / "sums")

    assert_finite(found)
    for step, values in found.items():
        mine = [row for row in rows if row[4] == step]
        kept = [row for row in mine if row[5] == "consumed"]
        assert values["episodes/learned_from"] == len(kept)
        assert all(row[7] >= 0.3 for row in kept)
        solved = [sum(row[0] == draw and row[7] >= 0.3 for row in mine) for draw in {row[0] for row in mine}]
        assert len(kept) == sum(min(2, count) for count in solved) > 0
        assert values["loss"] > 1.0  # a cross-entropy, not a policy loss


def test_held_out_prompts_are_answered_and_scored(workspace: Workspace) -> None:
    recipe = rl_recipe(
        workspace, data={"train": [{"path": "train.jsonl"}], "heldout": [{"path": "heldout.jsonl"}]},
        evaluation={"every": 2, "at_start": True, "generation": {"max_new_tokens": 5, "prompts": 6, "samples": 3}},
        checkpoint={"every": 2, "keep_best": True}, steps=2,
    )  # fmt: skip
    outcome = workspace.podium("train", recipe)
    found = numbers(workspace.path / "runs" / "sums")

    assert outcome.code == 0, outcome
    for step in (0, 2):
        wanted = {
            "heldout/score",
            "heldout/length",
            "heldout/solved",
            "heldout/pass@1",
            "heldout/pass@2",
            "heldout/pass@3",
        }
        assert wanted <= found[step].keys()
    assert "heldout/score" not in found[1]
    record = json.loads((workspace.path / "runs/sums/checkpoints/step-00000002/checkpoint.json").read_text())
    assert record["heldout_loss"] == pytest.approx(-found[2]["heldout/score"])


VARIANTS: dict[str, dict[str, Any]] = {
    "dr.grpo": {"algorithm": {"advantage": "group_centered", "reduction": "constant"}},
    "dapo": {
        "algorithm": {
            "dynamic_sampling": True, "clip_high": 0.28, "overlong": {"buffer_tokens": 3}, "max_refills": 2,
            "reduction": "token_mean",
        }
    },
    "gspo": {"algorithm": {"loss": "sequence_clipped", "reduction": "sequence_mean_mean", "mini_batches": 2}},
    "cispo": {"algorithm": {"loss": "clipped_weights", "epochs": 2, "mini_batches": 2}},
    "rloo": {"algorithm": {"advantage": "leave_one_out", "loss": "policy_gradient"}},
    "opo": {"algorithm": {"advantage": "length_weighted"}},
    "reinforce++": {"algorithm": {"advantage": "reinforce_pp", "gamma": 0.9}},
    "reinforce++ baseline": {"algorithm": {"advantage": "reinforce_pp_baseline"}},
    "kl in the loss": {"algorithm": {"kl": {"coefficient": 0.1, "refresh_every": 1, "target": 0.01, "horizon": 100}}},
    "kl in the reward": {"algorithm": {"kl": {"coefficient": 0.1, "where": "reward"}}},
    "correction": {"algorithm": {"correction": {"kind": "sequence_mask", "low": 0.5}}},
    "no truncated": {"algorithm": {"mask_truncated": True}},
    "own pieces": {"algorithm": {"advantage": "pieces.py:halved", "loss": "pieces.py:squared"}},
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [each if each in ("dapo", "own pieces") else pytest.param(each, marks=pytest.mark.slow)
     for each in VARIANTS],
)  # fmt: skip
def test_methods_are_combinations_of_pieces(workspace: Workspace, name: str) -> None:
    (workspace.path / "pieces.py").write_text(OWN_PIECES)
    found = trained(workspace, rl_recipe(workspace, steps=2, **VARIANTS[name]))

    assert list(found) == [1, 2]
    assert_finite(found)
    algorithm = VARIANTS[name]["algorithm"]
    assert found[1]["grad_norm"] > 0
    assert found[1]["optimizer_steps"] == algorithm.get("epochs", 1) * algorithm.get("mini_batches", 1)
    match name:
        case "dapo":
            assert found[1]["episodes"] >= found[1]["episodes/learned_from"] > 0
            assert found[1]["reward/shaping/mean"] < 0
        case "kl in the loss":
            assert found[1]["kl/reference"] == pytest.approx(0.0, abs=1e-6)  # the policy is its reference still
            assert found[1]["kl/coefficient"] == 0.1  # it moves after the step
            assert found[2]["kl/coefficient"] < 0.1  # below its target
        case "correction":
            assert found[1]["correction/mean"] > 0
        case "no truncated":
            assert found[1]["trained_tokens"] < found[1]["rollout/generated_tokens"]


def test_a_reward_model_scores_beside_a_function(workspace: Workspace, reward_model: Path) -> None:
    rewards = [{"function": "rewards.py:digits", "weight": 0.5}, {"model": str(reward_model), "name": "taste"}]
    found = trained(workspace, rl_recipe(workspace, reward=rewards, steps=2))
    for values in found.values():
        assert values["reward/taste/std"] > 0
        assert values["reward/mean"] == pytest.approx(
            0.5 * values["reward/digits/mean"] + values["reward/taste/mean"], rel=1e-6
        )


@pytest.mark.slow
def test_the_reward_rises(workspace: Workspace) -> None:
    recipe = rl_recipe(
        workspace, steps=30, rollout={"prompts_per_step": 8, "samples_per_prompt": 8}, optimizer={"lr": 1e-2}
    )
    rewards = [values["reward/mean"] for values in trained(workspace, recipe).values()]
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:5]) / 5


@pytest.mark.slow
@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 30}])
def test_the_reward_rises_with_truncated_sampling(workspace: Workspace, truncation: dict[str, Any]) -> None:
    rollout = {"prompts_per_step": 8, "samples_per_prompt": 8, **truncation}
    found = trained(workspace, rl_recipe(workspace, steps=30, rollout=rollout, optimizer={"lr": 1e-2}))
    assert_finite(found)
    for values in found.values():
        assert 0 < values["correction/kept_mass"] < 1
        assert values["correction/mean"] == pytest.approx(values["correction/kept_mass"], abs=1e-6)
        assert values["correction/ess"] <= 1
        assert values["ratio/mean"] == pytest.approx(1.0, abs=1e-4)  # against the policy, not against its part
        assert abs(values["kl/behavior"]) < 1e-6
        assert "gap/mean" not in values
        # Each token keeps at least the share that is asked for.
        assert values["correction/kept_mass"] >= truncation.get("top_p", 0)
    rewards = [values["reward/mean"] for values in found.values()]
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:5]) / 5


def test_expert_iteration_has_no_weights_with_truncated_sampling(workspace: Workspace) -> None:
    found = trained(workspace, rl_recipe(workspace, program="expert_iteration", rollout={"top_p": 0.9}))
    for values in found.values():
        assert not {"correction/mean", "correction/kept_mass", "gap/mean"} & values.keys()


# --- on Ray ---


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No cluster but the test's own. Paths of Ray's sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def assert_alike(found: dict[int, dict[str, float]], wanted: dict[int, dict[str, float]]) -> None:
    assert found.keys() == wanted.keys()
    for step, values in wanted.items():
        for name in COMPARED:
            assert found[step].get(name) == pytest.approx(values.get(name), rel=1e-5, abs=1e-5), (step, name)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", ["grpo", "ppo"])
def test_two_workers_on_ray_have_the_numbers_of_one_inline(
    workspace: Workspace, ray_folder: None, program: str
) -> None:
    changes: dict[str, Any] = {"program": program, "algorithm": {"kl": {"coefficient": 0.1}}}
    inline = trained(workspace, rl_recipe(workspace, "inline", **changes))
    recipe = rl_recipe(workspace, "ray", **changes, placement={"launcher": "auto", "devices": 2})

    said = said_by("train", recipe, output=workspace.path / "said")

    assert re.search(r"devices: 2 x CPU, colocated: 2 .*, 2 .*\(native\)", said)
    assert "step 3: runs/ray" in said
    found = numbers(workspace.path / "runs" / "ray")
    assert_alike(found, inline)
    assert found[3]["kl/reference"] == pytest.approx(inline[3]["kl/reference"], rel=1e-3, abs=1e-7)
    assert [row[:7] for row in ledger(workspace.path / "runs/ray")] == [
        row[:7] for row in ledger(workspace.path / "runs/inline")
    ]
    if program == "ppo":
        assert found[3]["value/loss"] == pytest.approx(inline[3]["value/loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_generators_on_devices_of_their_own_have_the_numbers_of_shared_ones(
    workspace: Workspace, ray_folder: None
) -> None:
    inline = trained(workspace, rl_recipe(workspace, "inline"))
    placement = {"launcher": "ray", "devices": 2, "layout": "split", "rollout_devices": 1}

    said = said_by("train", rl_recipe(workspace, "split", placement=placement), output=workspace.path / "said")

    assert re.search(r"split: 1 .*, 1 .*\(native\)", said)
    assert_alike(numbers(workspace.path / "runs" / "split"), inline)
