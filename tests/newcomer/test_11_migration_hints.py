# SPDX-License-Identifier: Apache-2.0
"""People who come from verl, TRL, OpenRLHF or prime-rl write the keys they know. The refusal names Podium's key for the
program at hand and says how the value translates."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from helpers.recipes import recipe_values
from podium.errors import RecipeError
from podium.recipe import parse_recipe
from podium.recipe.keys import all_keys
from podium.recipe.migration import FIXED, KEYS, ON_POLICY, PROGRAMS, SECTIONS, WITHOUT, program_hint
from podium.recipe.programs import BUILT_IN, CUSTOM
from podium.recipe.suggesting import hint_for

KINDS = {**BUILT_IN, **CUSTOM}
_MENTIONED = re.compile(r"`([a-z_.0-9]+)`")


def _without_positions(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdigit())


def _values(program: str, **more: Any) -> dict[str, Any]:
    values = {**recipe_values(f"program={program}"), **more}
    if program in ("distill", "on_policy_distill"):
        values.setdefault("teachers", "models/teacher")
    if program in ("grpo", "ppo", "expert_iteration"):
        values.setdefault("reward", "exact_match")
    return values


def _refused(values: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(values)
    return str(caught.value)


def test_the_table_is_broad() -> None:
    assert len(KEYS) >= 80
    assert not KEYS.keys() & WITHOUT.keys()
    assert {*FIXED, *ON_POLICY} == set(KINDS)


@pytest.mark.parametrize("program", KINDS)
def test_a_hint_only_names_keys_that_the_program_has(program: str) -> None:
    known = set(all_keys(KINDS[program]))
    hints = {name: hint for name in KEYS if (hint := hint_for(name.split("."), KINDS[program])) is not None}

    assert len(hints) > 60
    for name, hint in hints.items():
        assert _without_positions(hint.key) in known, name
        for key in _MENTIONED.findall(hint.how):
            assert _without_positions(key) in known, (name, key)


def test_every_hint_is_given_to_some_program() -> None:
    given = {hint_for(name.split("."), kind) for name in KEYS for kind in KINDS.values()}
    assert {hint for hints in KEYS.values() for hint in hints} <= given


def test_what_nothing_stands_for_names_no_key() -> None:
    keys = {key for kind in KINDS.values() for key in all_keys(kind) if "." in key or "_" in key}
    for reason in WITHOUT.values():
        assert not keys & set(re.findall(r"[a-z_.]+", reason))


@pytest.mark.parametrize(
    ("program", "name", "key"),
    [
        ("grpo", "n", "rollout.samples_per_prompt"),
        ("grpo", "num_generations", "rollout.samples_per_prompt"),
        ("grpo", "beta", "algorithm.kl.coefficient"),
        ("dpo", "beta", "preference.beta"),
        ("distill", "beta", "distill.jsd_beta"),
        ("ppo", "init_kl_coef", "algorithm.kl.coefficient"),
        ("grpo", "train_batch_size", "rollout.prompts_per_step"),
        ("sft", "train_batch_size", "rows_per_step"),
        ("sft", "num_train_epochs", "epochs"),
        ("grpo", "max_completion_length", "rollout.max_new_tokens"),
        ("dpo", "max_completion_length", "data.max_length"),
        ("grpo", "temperature", "rollout.temperature"),
        ("distill", "temperature", "distill.temperature"),
        ("ppo", "critic_learning_rate", "critic.lr"),
        ("ppo", "lam", "algorithm.lam"),
        ("sft", "lora_r", "model.lora.rank"),
        ("sft", "bf16", "model.dtype"),
        ("dpo", "loss_type", "preference.loss"),
        ("grpo", "loss_type", "algorithm.reduction"),
        ("sft", "warmup_ratio", "optimizer.warmup_ratio"),
        ("grpo", "max_epochs", "algorithm.epochs"),
        ("sft", "max_epochs", "epochs"),
    ],
)
def test_a_key_of_another_project_is_answered_for_the_program(program: str, name: str, key: str) -> None:
    lines = [line for line in _refused(_values(program, **{name: 1})).splitlines() if line.startswith(f"  {name}: ")]
    assert len(lines) == 1
    assert re.search(rf" {re.escape(key)}[ .]", lines[0]), lines


@pytest.mark.parametrize(("program", "name"), [("sft", "num_generations"), ("grpo", "lam"), ("sft", "kl_coef")])
def test_a_program_without_the_key_gets_no_hint(program: str, name: str) -> None:
    assert hint_for([name], KINDS[program]) is None


def test_keys_in_sections_of_ours_and_of_others_are_answered_with_their_paths() -> None:
    verl = yaml.safe_load(
        """
        data: {train: a.jsonl, train_batch_size: 64, max_prompt_length: 512}
        actor_rollout_ref:
          model: {path: m}
          actor: {optim: {lr: 1e-6}, ppo_mini_batch_size: 16, kl_loss_coef: 0.001}
          rollout: {n: 5, name: vllm, tensor_model_parallel_size: 2}
        critic: {optim: {lr: 1e-5}, model: {path: c}}
        trainer: {total_epochs: 15, n_gpus_per_node: 8}
        """
    )
    message = _refused(_values("ppo", **verl))
    for path, key in {
        "data.train_batch_size": "rollout.prompts_per_step",
        "data.max_prompt_length": "data.max_length",
        "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.mini_batches",
        "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.coefficient",
        "actor_rollout_ref.rollout.n": "rollout.samples_per_prompt",
        "actor_rollout_ref.rollout.name": "rollout.engine",
        "actor_rollout_ref.model.path": "model.path",
        "critic.optim.lr": "critic.lr",
        "critic.model.path": "critic.path",
        "trainer.total_epochs": "epochs",
        "trainer.n_gpus_per_node": "placement.devices",
    }.items():
        line = next(line for line in message.splitlines() if line.startswith(f"  {path}: "))
        assert f" {key}" in line
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size: " in message
    assert {"actor_rollout_ref", "trainer"} <= set(SECTIONS)


def test_hints_reach_the_stages_of_a_pipeline() -> None:
    from podium.recipe.pipeline_loading import parse_pipeline

    stage = {key: value for key, value in recipe_values().items() if key != "run"}
    with pytest.raises(RecipeError, match=r"stages\.a\.learning_rate: .*optimizer\.lr"):
        parse_pipeline({"program": "pipeline", "stages": {"a": {**stage, "learning_rate": 1}}})


# --- programs ---


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("ppo_trainer", "ppo"), ("GRPOTrainer", "grpo"), ("train_ppo_ray", "ppo"), ("openrlhf.cli.train_sft", "sft"),
        ("kto", "dpo"), ("ORPO", "dpo"), ("simpo", "dpo"), ("rm", "reward_model"), ("RewardTrainer", "reward_model"),
        ("reward-model", "reward_model"), ("opd", "on_policy_distill"), ("gkd", "on_policy_distill"), ("rloo", "grpo"),
        ("dr_grpo", "grpo"), ("reinforce++", "grpo"), ("rejection_sampling", "expert_iteration"), ("main_ppo", "ppo"),
    ],
)  # fmt: skip
def test_a_program_of_another_project_is_answered_with_ours(name: str, program: str) -> None:
    hint = program_hint(name, BUILT_IN)
    assert hint is not None
    assert hint.program == program
    message = _refused(recipe_values(f"program={name}"))
    assert f"`program: {program}`" in message
    for key, value in hint.keys.items():
        assert f"`{key}: {value}`" in message


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_suggested_for_a_program_is_a_valid_recipe(name: str) -> None:
    hint = PROGRAMS[name]
    overrides = [f"{key}={value}" for key, value in hint.keys.items()]
    values = {**_values(hint.program), **recipe_values(f"program={hint.program}", *overrides)}
    assert parse_recipe(values).program == hint.program


def test_a_name_like_nothing_is_not_guessed() -> None:
    assert program_hint("zzz", BUILT_IN) is None
    assert "zzz" in _refused(recipe_values("program=zzz"))
