# SPDX-License-Identifier: Apache-2.0
"""Options that save memory in every kind of training: on-policy updates, preferences, distillation and scalar heads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.dense_steps import dealt, random_rows
from helpers.engines import make_engine, one_rank, random_documents
from helpers.on_policy import CASES, make_episodes, recording_engine, run_update
from helpers.runs import STEPS, losses, tiny_recipe
from helpers.tiny import save_tiny_folder, save_tiny_model, write_chats
from podium import api
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import pack
from podium.engine.optimizer import AdamW
from podium.engine.scoring import summed_logprobs
from podium.engine.sharding import place, place_scalar
from podium.engine.train_step import ObjectiveBatch, TrainEngine
from podium.programs.dpo import PreferenceMethod
from podium.recipe import ModelSection, OptimizerSection
from podium.recipe.dense import SigmoidPreference

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "all_but_attention"},
    {"activation_checkpointing": "layers", "offload_activations": True},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("model"))


def require_equal(results: list[dict[str, Tensor]]) -> None:
    wanted = results[0]
    assert any(bool(tensor.any()) for tensor in wanted.values())
    for found in results[1:]:
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_on_policy_update_has_the_same_gradient(folder: Path) -> None:
    episodes = make_episodes(folder)
    require_equal(
        [run_update(recording_engine(folder, **way), episodes, CASES["clipped"]).gradients[0] for way in WAYS]
    )


def test_a_preference_step_leads_to_the_same_weights(folder: Path) -> None:
    rows, results = random_rows("pairs"), []
    reference, _ = place(ModelSection(path=str(folder)), folder, one_rank(), seed=0, masters=False)
    for way in WAYS:
        engine = make_engine(folder, optimizer=OptimizerSection(lr=1e-2, offload=bool(way)), **way)
        method = PreferenceMethod(
            SigmoidPreference(), engine, partial(summed_logprobs, reference, one_rank()), max_tokens=40, max_length=256
        )
        tally = method.tally()
        batches = method.batches(dealt(rows, one_rank(), 40), tally)
        engine.objective_step(batches, normalizer=len(rows), lr=1e-2, tally=tally)[0].resolve()
        results.append({each.name: each.master for each in engine.optimizer.trained})
    require_equal(results)


def test_a_divergence_of_distributions_has_the_same_gradient(folder: Path) -> None:
    results = []
    for way in WAYS:
        engine = make_engine(folder, **way)
        batch = ObjectiveBatch(
            packed=pack(random_documents()), objective=lambda logits_CV, tokens: logits_CV.logsumexp(-1),
            kind="divergence",
        )  # fmt: skip
        engine.model.train()
        _, gradients, _, _ = engine._gradients([batch], 1.0)
        results.append({each.name: gradients[id(each)] for each in engine.optimizer.trained})
    require_equal(results)


def test_a_scalar_head_has_the_same_gradient(folder: Path) -> None:
    results = []
    for way in WAYS:
        mesh = one_rank()
        model, trained = place_scalar(ModelSection(path=str(folder), **way), folder, mesh, labels=1)
        engine = TrainEngine(model, trained, AdamW(trained, OptimizerSection(lr=1e-3)), mesh, None)
        with torch.no_grad():  # a new head begins at zero, and nothing below it would have a gradient
            model.hf.score.weight.fill_(0.1)
        batch = ObjectiveBatch(packed=pack(random_documents()), objective=lambda values_S: values_S.square())
        model.train()
        _, gradients, _, _ = engine._gradients([batch], 1.0)
        results.append({each.name: gradients[id(each)] for each in engine.optimizer.trained})
    require_equal(results)


@pytest.mark.slow
def test_micro_batches_share_the_options(folder: Path) -> None:
    documents, results = random_documents(), []
    for way in WAYS:
        engine = make_engine(folder, dtype="bfloat16", **way)
        batches = [pack(documents[:4]), pack(documents[4:])]
        gradients = engine.gradients(batches, token_cross_entropy, normalizer=1.0)[1]
        results.append({each.name: gradients[id(each)] for each in engine.optimizer.trained})
    require_equal(results)


@pytest.mark.slow
def test_a_run_that_changes_its_options_has_the_losses_of_one_without(tmp_path: Path) -> None:
    """The run saves with the optimizer's state in host memory, and goes on with it on the device."""
    model, data = save_tiny_folder(tmp_path / "model"), write_chats(tmp_path / "chats.jsonl")
    runs = tmp_path / "runs"
    api.train(tiny_recipe(model, data, runs, "plain"))
    options = {"activation_checkpointing": "layers", "offload_activations": True}
    api.train(tiny_recipe(model, data, runs, "parts", model=options, optimizer={"offload": True}, steps=4))
    api.resume(
        runs / "parts",
        overrides=[
            f"steps={STEPS}", "model.activation_checkpointing=selective", "model.offload_activations=false",
            "optimizer.offload=false",
        ],
    )  # fmt: skip
    assert losses(runs / "parts") == losses(runs / "plain")
