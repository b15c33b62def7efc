# SPDX-License-Identifier: Apache-2.0
"""Dropout and router noise of a model: off wherever log-probs are compared, on where the recipe asks for it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.adapters import save_peft_adapter
from helpers.dense_steps import dealt, random_rows
from helpers.engines import full_gradient, make_engine, num_trained, one_rank, random_documents, relative_l2
from helpers.on_policy import CASES, make_episodes, recording_engine, run_update
from helpers.recipes import make_recipe
from helpers.runs import STEPS, losses, tiny_recipe
from helpers.tiny import save_tiny_folder, save_tiny_model, tiny_config, write_chats
from podium import api
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import pack
from podium.engine.checkpoint import newest_usable
from podium.engine.optimizer import AdamW
from podium.engine.scoring import score, scoring_batches, summed_logprobs, values
from podium.engine.sharding import place, place_scalar
from podium.engine.train_step import ObjectiveBatch, TrainEngine
from podium.errors import RecipeError
from podium.programs.dpo import PreferenceMethod
from podium.recipe import ModelSection, OptimizerSection
from podium.recipe.changes import changes
from podium.recipe.dense import SigmoidPreference

# gpt2: nn.Dropout and attention dropout; seed_oss: F.dropout; starcoder2: of embeddings too; mixtral: jitter of the
# router's input; phimoe: samples its experts.
NOISY = ("gpt2", "seed_oss", "starcoder2", "mixtral", "phimoe")
CHANGES = {"phimoe": {"router_jitter_noise": 0.5, "input_jitter_noise": 0.2}}
CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": "layers"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_tiny_model(name, tmp_path_factory.mktemp(name), **CHANGES.get(name, {})) for name in NOISY}


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, CHECKPOINTED], ids=["stored", "recomputed"])
@pytest.mark.parametrize("name", NOISY)
def test_the_first_update_on_a_policys_own_tokens_has_ratio_one(
    folders: dict[str, Path], name: str, model: dict[str, Any]
) -> None:
    episodes, engine = make_episodes(folders[name]), recording_engine(folders[name], **model)
    own = score(engine.language_model, engine.mesh, episodes.block)
    block = replace(episodes.block, behavior_logprobs_T=own.values_T)
    note = run_update(engine, replace(episodes, block=block), CASES["clipped"]).note
    assert engine.model.training
    assert note.statistics.max_ratio == pytest.approx(1.0, abs=1e-4)
    assert note.statistics.mean_ratio == pytest.approx(1.0, abs=1e-4)
    assert note.gap.largest < 1e-4


@pytest.mark.parametrize("name", NOISY)
def test_dpo_against_itself_is_ln_2(folders: dict[str, Path], name: str) -> None:
    engine, rows = make_engine(folders[name]), random_rows("pairs")
    reference, _ = place(ModelSection(path=str(folders[name])), folders[name], one_rank(), seed=0, masters=False)
    method = PreferenceMethod(
        SigmoidPreference(beta=10.0),
        engine,
        partial(summed_logprobs, reference, one_rank()),
        max_tokens=40,
        max_length=256,
    )
    tally = method.tally()
    batches = method.batches(dealt(rows, one_rank(), 40), tally)
    report = engine.objective_step(batches, normalizer=len(rows), lr=0.0, tally=tally)[0].resolve()
    assert report.loss == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.parametrize("name", NOISY)
def test_a_critic_learns_from_the_values_that_it_estimates(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    config = tiny_config(name, num_labels=1, pad_token_id=0, **CHANGES.get(name, {}))
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    mesh = one_rank()
    model, trained = place_scalar(ModelSection(path=str(tmp_path)), tmp_path, mesh, labels=1)
    engine = TrainEngine(model, trained, AdamW(trained, OptimizerSection(lr=1e-3)), mesh, None)
    block = make_episodes(save_tiny_model("llama", tmp_path / "llama")).block
    estimated_T = values(model, mesh, block).values_T
    (batch,) = scoring_batches(block, max_tokens=4096)
    batches = [ObjectiveBatch(packed=batch.packed, objective=lambda values_S: values_S.square())]
    _, seen = engine.objective_step(batches, normalizer=1.0, lr=0.0)
    assert np.abs(estimated_T).max() > 1e-3
    np.testing.assert_allclose(seen[0][0].numpy(), estimated_T[batch.places_S], atol=1e-5)


@pytest.mark.parametrize("name", NOISY)
def test_dropout_acts_in_training_where_it_is_requested_and_never_in_evaluation(
    folders: dict[str, Path], name: str
) -> None:
    engine, documents = make_engine(folders[name], dropout=True), random_documents()
    quiet = engine.loss_sum([pack(documents)], token_cross_entropy)
    assert torch.equal(quiet, engine.loss_sum([pack(documents)], token_cross_entropy))
    assert engine.model.training
    torch.manual_seed(0)
    noisy = {
        engine.train_step([pack(documents)], token_cross_entropy, normalizer=1.0, lr=0.0).resolve().loss
        for _ in range(2)
    }
    assert len(noisy | {float(quiet)}) == 3


@pytest.mark.parametrize("name", NOISY)
def test_activation_checkpointing_repeats_the_same_dropout(folders: dict[str, Path], name: str) -> None:
    gradients = []
    for model in ({}, CHECKPOINTED):
        engine = make_engine(folders[name], dropout=True, **model)
        torch.manual_seed(3)
        gradients.append(full_gradient(engine, random_documents()))
    assert relative_l2(gradients[1], gradients[0]) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "seed_oss"])
def test_checkpointed_layers_are_recomputed_without_dropout_too(folders: dict[str, Path], name: str) -> None:
    """Also after an evaluation, which puts the model into eval mode and back."""
    engine, documents = make_engine(folders[name], **CHECKPOINTED), random_documents()
    layer, calls = engine.model.layers[0], []
    layer.register_forward_pre_hook(lambda *_: calls.append(layer.training))
    wanted = full_gradient(make_engine(folders[name]), documents)
    assert relative_l2(full_gradient(engine, documents), wanted) < 1e-5
    assert calls == [False, False]
    engine.loss_sum([pack(documents)], token_cross_entropy)
    assert relative_l2(full_gradient(engine, documents), wanted) < 1e-5
    assert calls == [False] * 5


def test_an_adapters_dropout_does_not_switch_on_that_of_its_base(folders: dict[str, Path], tmp_path: Path) -> None:
    adapter = save_peft_adapter(folders["seed_oss"], tmp_path, target_modules=["q_proj"])
    documents = random_documents()

    def loss(**lora: Any) -> float:
        engine = make_engine(folders["seed_oss"], lora={"adapter": str(adapter), **lora})
        torch.manual_seed(0)
        step = engine.train_step(
            [pack(documents)], token_cross_entropy, normalizer=float(num_trained(documents)), lr=0.0
        )
        return step.resolve().loss

    assert loss() == loss()
    assert abs(loss(dropout=0.5) - loss()) > 1e-4
    assert abs(loss(dropout=1e-6) - loss()) < 1e-4


@pytest.mark.slow
def test_a_resumed_run_with_dropout_continues_bit_for_bit(tmp_path: Path) -> None:
    model, data = save_tiny_folder(tmp_path / "gpt2", "gpt2"), write_chats(tmp_path / "train.jsonl")
    runs = tmp_path / "runs"
    for name, dropout in (("whole", True), ("parts", True), ("without", False)):
        section = {"path": str(model), "dropout": dropout}
        recipe = tiny_recipe(model, data, runs, name, model=section)
        api.train(recipe.model_copy(update={"steps": 4}) if name == "parts" else recipe)
    api.resume(runs / "parts", overrides=[f"steps={STEPS}"])
    assert losses(runs / "parts") == losses(runs / "whole")
    mine, theirs = (newest_usable(runs / name / "checkpoints").folder for name in ("parts", "whole"))
    assert (mine / "rank-00000.safetensors").read_bytes() == (theirs / "rank-00000.safetensors").read_bytes()
    assert losses(runs / "without") != losses(runs / "whole")
    api.export(runs / "without", tmp_path / "exported")
    exported = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (exported["attn_pdrop"], exported["resid_pdrop"]) == (0.1, 0.1)


PROGRAMS = {
    "dpo": ("program=dpo",),
    "distill": ("program=distill", "teachers=[{path: models/teacher}]"),
    "grpo": ("program=grpo", "reward=[{function: 'mine.py:score'}]"),
    "ppo": ("program=ppo", "reward=[{function: 'mine.py:score'}]"),
    "on_policy_distill": ("program=on_policy_distill", "teachers=[{path: models/teacher}]"),
    "expert_iteration": ("program=expert_iteration", "reward=[{function: 'mine.py:score'}]"),
}


@pytest.mark.parametrize(
    ("change", "key"),
    [("model.dropout=true", r"model\.dropout"), ("model.lora={dropout: 0.1}", r"model\.lora\.dropout")],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_compare_log_probs_refuse_dropout(program: str, change: str, key: str) -> None:
    with pytest.raises(RecipeError, match=rf"{key}: {program} .*log-probs.*sft and reward_model\b"):
        make_recipe(*PROGRAMS[program], change)


@pytest.mark.parametrize("program", ["sft", "reward_model"])
def test_programs_of_one_model_take_dropout(program: str) -> None:
    assert make_recipe(f"program={program}", "model.dropout=true", "model.lora={dropout: 0.1}").model.dropout


def test_with_dropout_the_layout_has_a_say_in_the_result() -> None:
    for dropout, breaks in ((False, [None]), (True, ["the steps already taken used the old value"])):
        old = make_recipe(f"model.dropout={str(dropout).lower()}", "micro_batch_tokens=4096")
        new = old.model_copy(update={"micro_batch_tokens": 2048})
        assert [each.breaks for each in changes(old, new)] == breaks
