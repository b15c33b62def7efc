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
from podium.recipe.migration import FIXED, KEYS, ON_POLICY, SECTIONS, WITHOUT
from podium.recipe.migration_programs import PROGRAMS, TELLING, guessed_program, program_hint
from podium.recipe.migration_values import VALUES
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


def _line(message: str, key: str) -> str:
    return next(line for line in message.splitlines() if line.startswith(f"  {key}"))


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
        ("grpo", "max_head_offpolicyness", "rollout.staleness"),
        ("ppo", "max_async_level", "rollout.staleness"),
        ("grpo", "max_off_policy_steps", "rollout.staleness"),
        ("on_policy_distill", "async_steps", "rollout.staleness"),
        ("grpo", "in_flight_weight_updates", "rollout.on_new_weights"),
        ("grpo", "use_tis", "algorithm.correction"),
        ("grpo", "tis_clip", "algorithm.correction.cap"),
        ("ppo", "use_decoupled_loss", "algorithm.proximal"),
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


def test_sections_of_asynchronous_trainers_are_answered_with_their_paths() -> None:
    written = yaml.safe_load(
        """
        async_training: {staleness_threshold: 0.5, partial_rollout: true}
        grpo: {async_grpo: {max_trajectory_age_steps: 1, recompute_kv_cache_after_weight_updates: true}}
        trainer: {fully_async: {max_staleness_steps: 2}}
        algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 2.0, bypass_mode: true}}
        """
    )
    message = _refused(_values("grpo", **written))
    for path, key in {
        "async_training.staleness_threshold": "rollout.staleness",
        "async_training.partial_rollout": "rollout.on_new_weights",
        "grpo.async_grpo.max_trajectory_age_steps": "rollout.staleness",
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates": "rollout.on_new_weights",
        "trainer.fully_async.max_staleness_steps": "rollout.staleness",
        "algorithm.rollout_correction.rollout_is": "algorithm.correction.kind",
        "algorithm.rollout_correction.rollout_is_threshold": "algorithm.correction.cap",
        "algorithm.rollout_correction.bypass_mode": "algorithm.proximal",
    }.items():
        assert re.search(rf" {re.escape(key)}[ .]", _line(message, f"{path}: ")), path


def test_expert_iteration_is_not_told_to_use_staleness() -> None:
    line = _line(_refused(_values("expert_iteration", max_async_level=1)), "max_async_level")
    assert re.search(r"expert_iteration has nothing like it.* rollout\.staleness of grpo", line)


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("algorithm.correction=tis", r"algorithm\.correction\.kind: .*\btoken_truncate\?"),
        ("algorithm.correction=true", r"algorithm\.correction: .*\bauto\b.*rollout\.staleness"),
    ],
)
def test_values_about_stale_tokens_are_answered(override: str, fact: str) -> None:
    assert re.search(fact, _refused({**recipe_values("program=grpo", override), "reward": "exact_match"}))


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


VERL = """
data: {train_files: a.parquet, train_batch_size: 64}
algorithm: {adv_estimator: ADVANTAGE}
actor_rollout_ref: {rollout: {n: 5}, actor: {ulysses_sequence_parallel_size: 2}}
trainer: {total_epochs: 15, critic_warmup: 3, project_name: sums}
"""


@pytest.mark.parametrize(
    ("values", "program"),
    [
        (VERL.replace("ADVANTAGE", "gae"), "ppo"),
        (VERL.replace("ADVANTAGE", "rloo"), "grpo"),
        ("{actor_rollout_ref: {rollout: {n: 5}}}", "grpo"),
        ("{actor_rollout_ref: {rollout: {n: 5}}, critic: {optim: {lr: 1e-5}}}", "ppo"),
        ("{num_generations: 8, n: 1}", "grpo"),
        ("{num_ppo_epochs: 4, n: 1}", "ppo"),
        ("{n_samples_per_prompt: 4, critic_pretrain: m}", "ppo"),
    ],
)
def test_without_a_program_the_keys_tell_which_it_is(values: str, program: str) -> None:
    message = _refused(yaml.safe_load(values))

    assert f"`program: {program}`" in _line(message, "program")
    assert "rollout.samples_per_prompt" in message


@pytest.mark.parametrize(
    ("key", "program"),
    [
        ("dataset_text_field", "sft"),
        ("precompute_ref_log_probs", "dpo"),
        ("center_rewards_coefficient", "reward_model"),
        ("kd_coef", "distill"),
    ],
)
def test_a_key_that_one_kind_of_trainer_has_tells_the_program(key: str, program: str) -> None:
    hint = hint_for([key], KINDS[program])
    assert hint is not None
    assert hint.key in _line(_refused({key: 1}), key)
    assert f"`program: {program}`" in _refused({key: 1})


@pytest.mark.parametrize("values", [{"learning_rate": 1}, {"num_generations": 2, "kd_coef": 1}, {"options": {"n": 2}}])
def test_keys_of_no_trainer_or_of_several_do_not_tell_the_program(values: dict[str, Any]) -> None:
    assert guessed_program(values) is None
    assert "`program: " not in _refused(values)


def test_every_telling_key_has_a_hint_or_a_reason() -> None:
    for program, names in TELLING.items():
        for name in names:
            assert name in WITHOUT or hint_for([name], KINDS[program]) is not None, (program, name)


def test_a_program_of_another_project_does_not_hide_the_other_keys() -> None:
    message = _refused({**recipe_values("program=GRPOTrainer"), "num_generations": 2})
    assert "rollout.samples_per_prompt" in _line(message, "num_generations")


def test_a_key_that_only_other_programs_have_is_answered_with_them() -> None:
    line = _line(_refused(yaml.safe_load(VERL.replace("ADVANTAGE", "rloo"))), "trainer.critic_warmup")
    assert "critic.warmup_steps of ppo" in line
    assert "critic.warmup_steps" in _line(_refused(yaml.safe_load(VERL.replace("ADVANTAGE", "gae"))), "trainer.critic_")


@pytest.mark.parametrize(
    ("key", "fact"),
    [("trainer.project_name", "WANDB_PROJECT"), ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "Remove")],
)
def test_a_key_that_nothing_stands_for_is_answered_with_the_reason(key: str, fact: str) -> None:
    assert fact in _line(_refused(yaml.safe_load(VERL.replace("ADVANTAGE", "rloo"))), key)


@pytest.mark.parametrize(
    ("name", "listed"), [("num_train_epochs", False), ("max_steps", False), ("learning_rate", True)]
)
def test_steps_are_not_missing_beside_a_key_that_stands_for_the_length(name: str, listed: bool) -> None:
    values = {key: value for key, value in recipe_values().items() if key != "steps"}
    assert ("\n  steps: " in _refused({**values, name: 3})) == listed
    assert "\n  steps: " not in _refused(yaml.safe_load(VERL.replace("ADVANTAGE", "rloo")))


# --- values ---


def _kinds_with(key: str) -> list[str]:
    return [name for name, kind in BUILT_IN.items() if key in all_keys(kind)]


@pytest.mark.parametrize("key", VALUES)
def test_every_suggested_value_is_one_that_the_key_takes(key: str) -> None:
    program = "grpo" if "grpo" in _kinds_with(key) else _kinds_with(key)[0]
    for name, hint in VALUES[key].items():
        for mentioned in _MENTIONED.findall(hint.how):
            assert _kinds_with(mentioned), (name, mentioned)
        if hint.value is None:
            assert hint.how, name
        else:
            values = {**_values(program), **recipe_values(f"program={program}", f"{key}='{hint.value}'")}
            if key == "algorithm.kl.estimator":
                values["algorithm"]["kl"] |= {"coefficient": 0.1}
            if key == "placement.layout":
                values["placement"]["devices"] = 2
            assert parse_recipe(values).program == program, name


@pytest.mark.parametrize(
    ("override", "suggested"),
    [
        ("algorithm.advantage=rloo", "leave_one_out"),
        ("algorithm.advantage=grpo", "group_relative"),
        ("algorithm.advantage=reinforce_plus_plus", "reinforce_pp"),
        ("algorithm.advantage=gae", "ppo"),
        ("algorithm.loss=gspo", "sequence_clipped"),
        ("algorithm.loss=vanilla", "clipped"),
        ("algorithm.loss=dapo", "algorithm.clip_high"),
        ("algorithm.reduction=token-mean", "token_mean"),
        ("algorithm.reduction=seq-mean-token-sum", "sequence_sum_mean"),
        ("run.loggers=[console]", "metrics.jsonl"),
        ("run.loggers=console", "metrics.jsonl"),
        ("optimizer=adamw_torch", "AdamW"),
        ("optimizer.schedule=constant_with_warmup", "optimizer.warmup_steps"),
        ("optimizer.schedule=cosin", "cosine"),
        ("model.dtype=bf16", "bfloat16"),
        ("model.dtype=torch.bfloat16", "bfloat16"),
        ("model.dtype=fp32", "float32"),
        ("model.activation_checkpointing=true", "layers"),
    ],
)
def test_a_value_of_another_project_is_answered_once_with_ours(override: str, suggested: str) -> None:
    key = override.partition("=")[0]
    message = _refused({**_values("grpo"), **recipe_values("program=grpo", override), "reward": "exact_match"})

    assert "(1 problem)" in message
    assert suggested in _line(message, key).rpartition("found ")[2]


def test_a_value_of_another_program_is_not_suggested() -> None:
    assert "Did you mean" not in _refused(recipe_values("algorithm.loss=gspo"))


def test_a_preference_of_another_project_is_answered_with_ours() -> None:
    assert "sigmoid?" in _refused(recipe_values("program=dpo", "preference.loss=dpo"))


@pytest.mark.parametrize("value", ["mine.py", "mine.py:", "a/mine"])
def test_what_looks_like_a_file_is_answered_as_an_import_path(value: str) -> None:
    message = _refused({**_values("grpo"), "algorithm": {"loss": value}})
    assert "(1 problem)" in message
    assert "file.py:function" in _line(message, "algorithm.loss")
    assert "sequence_clipped" not in message


def test_the_value_of_another_projects_key_is_translated_with_it() -> None:
    assert "leave_one_out" in _line(_refused(_values("grpo", algorithm={"adv_estimator": "rloo"})), "algorithm.adv")
    assert "bfloat16" in _line(_refused(_values("sft", torch_dtype="bf16")), "torch_dtype")


@pytest.mark.parametrize(("key", "where"), [("kl_loss_type", "loss"), ("kl_penalty", "reward")])
def test_estimators_that_are_suggested_for_a_kl_are_taken_there(key: str, where: str) -> None:
    line = _line(_refused(_values("grpo", **{key: "kl"})), key)
    estimators = set(re.findall(r"\bk[123](?:_straight)?\b", line))

    assert f"`algorithm.kl.where` {where}" in line
    assert ("k1" in estimators) == (where == "reward")
    for estimator in estimators:
        kl = {"coefficient": 0.1, "where": where, "estimator": estimator}
        assert parse_recipe(_values("grpo", algorithm={"kl": kl})).program == "grpo"
