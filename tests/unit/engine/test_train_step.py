# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: its gradient does not depend on how it was cut, and a non-finite one changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.engines import (
    flat_gradient,
    full_gradient,
    make_engine,
    num_trained,
    one_rank,
    random_documents,
    relative_l2,
)
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, PackedBatch, pack
from podium.data.splitting import split_step
from podium.engine.train_step import TrainEngine
from podium.recipe import OptimizerSection

SAME = 1e-5


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "mistral"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainEngine:
    return make_engine(save_tiny_model(request.param, tmp_path_factory.mktemp("model")))


def by_budget(documents: Sequence[Document], budget: int) -> list[PackedBatch]:
    plan = split_step([document.num_inputs for document in documents], num_ranks=1, max_tokens=budget)
    return [pack([documents[index] for index in part]) for part in plan.micro_batches[0]]


@pytest.mark.parametrize("budget", [40, 64, 100])
def test_any_micro_batch_budget_gives_the_same_gradient(engine: TrainEngine, budget: int) -> None:
    documents = random_documents()
    batches = by_budget(documents, budget)
    assert len(batches) > 1
    wanted = full_gradient(engine, documents)
    assert relative_l2(flat_gradient(engine, batches, num_trained(documents)), wanted) < SAME


def test_one_document_at_a_time_gives_the_gradient_of_all_packed(engine: TrainEngine) -> None:
    documents = random_documents()
    alone = [pack([document]) for document in documents]
    wanted = full_gradient(engine, documents)
    assert relative_l2(flat_gradient(engine, alone, num_trained(documents)), wanted) < SAME


def test_micro_batches_without_documents_add_nothing(engine: TrainEngine) -> None:
    documents = random_documents()
    batches = [pack([]), pack(documents), pack([])]
    wanted = full_gradient(engine, documents)
    assert relative_l2(flat_gradient(engine, batches, num_trained(documents)), wanted) < SAME


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(10)), cuts=st.sets(st.integers(1, 9), max_size=4))
def test_any_order_of_rows_and_any_cut_gives_the_same_gradient(
    engine: TrainEngine, order: list[int], cuts: set[int]
) -> None:
    documents = random_documents()
    shuffled = [documents[index] for index in order]
    bounds = [0, *sorted(cuts), len(documents)]
    batches = [pack(shuffled[start:stop]) for start, stop in pairwise(bounds)]
    wanted = full_gradient(engine, documents)
    assert relative_l2(flat_gradient(engine, batches, num_trained(documents)), wanted) < SAME


def test_padding_rows_of_the_vocabulary_get_no_gradient_and_stay_zero(engine: TrainEngine) -> None:
    documents = random_documents()
    _, gradients = engine.gradients([pack(documents)], token_cross_entropy, normalizer=1.0)
    padded = [each for each in engine.optimizer.trained if each.shape[0] == 256]
    assert padded
    for each in padded:
        assert not gradients[id(each)][250:].any()
    engine.train_step([pack(documents)], token_cross_entropy, normalizer=num_trained(documents), lr=1e-3)
    assert all(not each.master[250:].any() for each in padded)


def test_a_tower_that_no_token_reaches_is_not_decayed(tmp_path: Path) -> None:
    """Text does not pass a vision tower: no gradient comes there, not even zeros, and its parameters stay."""
    optimizer = OptimizerSection(lr=1e-2, weight_decay=0.5)
    engine = make_engine(save_tiny_model("gemma3_multimodal", tmp_path), optimizer=optimizer)
    before = {each.name: each.master.clone() for each in engine.optimizer.trained}
    documents = random_documents()
    for batches in ([pack(documents)], [pack(documents[:3]), pack(documents[3:])]):
        engine.train_step(batches, token_cross_entropy, normalizer=num_trained(documents), lr=1e-2).resolve()
    same = {each.name for each in engine.optimizer.trained if torch.equal(each.master, before[each.name])}
    assert same == {name for name in before if "vision_tower" in name or "multi_modal_projector" in name}
    assert engine.optimizer.missed_updates() == dict.fromkeys(sorted(same, key=list(before).index), 2)


def test_experts_that_no_token_reached_in_a_step_are_decayed_like_the_others(tmp_path: Path) -> None:
    """All experts of a layer are one tensor, and its gradient has zeros for them: an update, as in torch."""
    engine = make_engine(save_tiny_model("qwen3_moe", tmp_path), optimizer=OptimizerSection(lr=1e-2, weight_decay=0.5))
    documents = random_documents((1,))
    _, gradients = engine.gradients([pack(documents)], token_cross_entropy, normalizer=1.0)
    [experts] = [each for each in engine.optimizer.trained if each.name.endswith("layers.1.mlp.experts.down_proj")]
    idle = [index for index, gradient in enumerate(gradients[id(experts)]) if not gradient.any()]
    assert idle
    before = experts.master.clone()
    engine.train_step([pack(documents)], token_cross_entropy, normalizer=1.0, lr=1e-2).resolve()
    torch.testing.assert_close(experts.master[idle], before[idle] * (1 - 1e-2 * 0.5))


def test_the_gradient_is_that_of_transformers_own_loss(tmp_path: Path) -> None:
    """An independent reference: plain transformers, one document at a time, cross-entropy by torch."""
    from transformers import AutoModelForCausalLM

    folder = save_tiny_model("llama", tmp_path)
    documents = random_documents((5, 12, 12))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    total = torch.zeros(())
    for document in documents:
        tokens = torch.from_numpy(document.tokens).long()
        kept = torch.from_numpy(document.trained[1:])
        logits = plain(tokens[None, :-1]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[kept], tokens[1:][kept], reduction="sum")
    (total / num_trained(documents)).backward()
    wanted = torch.cat([each.grad.flatten() for each in plain.parameters()])
    found = full_gradient(make_engine(folder, pad_vocab_to=1), documents)
    assert relative_l2(found, wanted) < SAME


def test_activation_checkpointing_gives_the_same_gradient(tmp_path: Path) -> None:
    folder, documents = save_tiny_model("gemma3", tmp_path), random_documents()
    plain = full_gradient(make_engine(folder), documents)
    recomputed = make_engine(folder, activation_checkpointing="layers")
    assert recomputed.model.hf.is_gradient_checkpointing
    assert relative_l2(full_gradient(recomputed, documents), plain) < SAME


def test_the_report_has_the_mean_loss_and_the_norm_before_clipping(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("llama", tmp_path), optimizer=OptimizerSection(lr=1e-2, clip_norm=1e-3))
    documents = random_documents()
    logprobs = torch.cat([_logprobs(engine, document) for document in documents])
    wanted = full_gradient(engine, documents).norm()
    report = engine.train_step(
        by_budget(documents, 64), token_cross_entropy, normalizer=num_trained(documents), lr=1e-2
    ).resolve()
    assert report.loss == pytest.approx(float(-logprobs.mean()), rel=1e-5)
    assert report.grad_norm == pytest.approx(float(wanted), rel=1e-5)
    assert (report.skipped, report.stop_requested) == (False, False)


def _logprobs(engine: TrainEngine, document: Document) -> Tensor:
    from podium.models.packing import to_device

    found: Tensor = engine.model(to_device(pack([document]), torch.device("cpu")), None, kind="logprobs")
    return found


def test_clipping_scales_the_whole_gradient_to_the_limit(tmp_path: Path) -> None:
    """Adam hides a gradient's scale, so its first moment shows it: (1 - beta1) · clipped gradient."""
    engine = make_engine(save_tiny_model("llama", tmp_path), optimizer=OptimizerSection(lr=1e-2, clip_norm=0.25))
    documents = random_documents()
    wanted = full_gradient(engine, documents)
    assert wanted.norm() > 0.25
    engine.train_step([pack(documents)], token_cross_entropy, normalizer=num_trained(documents), lr=1e-2)
    moments = torch.cat([moment.flatten() for moment in engine.optimizer.first_moments])
    assert relative_l2(moments, 0.1 * wanted * (0.25 / wanted.norm())) < SAME


def state(engine: TrainEngine) -> list[Tensor]:
    optimizer = engine.optimizer
    return [each.master for each in optimizer.trained] + optimizer.first_moments + optimizer.second_moments


def _nan(logprobs: Tensor) -> Tensor:
    return logprobs * float("nan")


def _infinite(logprobs: Tensor) -> Tensor:
    return logprobs / 0.0


def _infinite_gradient_of_a_finite_loss(logprobs: Tensor) -> Tensor:
    return (logprobs - logprobs.detach()).abs().clamp(min=0).sqrt()


@pytest.mark.parametrize("loss", [_nan, _infinite, _infinite_gradient_of_a_finite_loss])
def test_a_non_finite_loss_or_gradient_changes_nothing_and_is_reported(
    tmp_path: Path, loss: Callable[[Tensor], Tensor]
) -> None:
    engine = make_engine(save_tiny_model("llama", tmp_path))
    batches, count = [pack(random_documents())], num_trained(random_documents())
    engine.train_step(batches, token_cross_entropy, normalizer=count, lr=1e-2)
    before = [tensor.clone() for tensor in state(engine)]
    assert engine.train_step(batches, loss, normalizer=count, lr=1e-2).resolve().skipped
    assert all(torch.equal(now, was) for now, was in zip(state(engine), before, strict=True))
    after = engine.train_step(batches, token_cross_entropy, normalizer=count, lr=1e-2).resolve()
    assert not after.skipped


def test_a_request_to_stop_comes_back_with_the_report(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("llama", tmp_path))
    pending = engine.train_step([pack([])], token_cross_entropy, normalizer=1.0, lr=0.1, stop_requested=True)
    assert pending.resolve().stop_requested


def test_frozen_parameters_stay_and_the_others_train(tmp_path: Path) -> None:
    from podium.engine.optimizer import AdamW

    engine = make_engine(save_tiny_model("llama", tmp_path))
    trained = engine.optimizer.trained
    frozen = [each for each in trained if "embed_tokens" in each.name or "lm_head" in each.name]
    for each in frozen:
        each.parameter.requires_grad_(False)
    held = [each for each in trained if each.parameter.requires_grad]
    section = OptimizerSection(lr=1e-2)
    engine = TrainEngine(engine.model, held, AdamW(held, section), one_rank(), section.clip_norm)
    before = {each.name: each.master.clone() for each in trained}
    documents = random_documents()
    engine.train_step([pack(documents)], token_cross_entropy, normalizer=num_trained(documents), lr=1e-2)
    changed = {each.name for each in trained if not torch.equal(each.master, before[each.name])}
    assert changed == {each.name for each in held}


def test_held_out_loss_is_a_sum_without_gradients_and_leaves_training_mode(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("llama", tmp_path))
    documents = random_documents()
    whole = engine.loss_sum([pack(documents)], token_cross_entropy)
    parts = engine.loss_sum([pack(documents[:4]), pack(documents[4:])], token_cross_entropy)
    torch.testing.assert_close(whole, parts)
    assert engine.model.training
    assert all(each.parameter.grad is None for each in engine.optimizer.trained)


def test_bfloat16_compute_keeps_float32_masters_and_sums_gradients_in_float32(tmp_path: Path) -> None:
    """One device in bfloat16: what a GPU does, here on a model small enough for emulated bfloat16."""
    folder = save_tiny_model("llama", tmp_path, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    documents = random_documents((6, 9))
    exact = full_gradient(make_engine(folder), documents)
    engine = make_engine(folder, dtype="bfloat16")
    trained = engine.optimizer.trained
    assert all(each.has_own_master and each.master.dtype == torch.float32 for each in trained)
    batches = [pack([document]) for document in documents]
    found = flat_gradient(engine, batches, num_trained(documents))
    assert found.dtype == torch.float32
    assert relative_l2(found, exact) < 0.05
    assert all(each.parameter.grad is None for each in trained)
    before = [each.master.clone() for each in trained]
    engine.train_step(batches, token_cross_entropy, normalizer=num_trained(documents), lr=1e-5)
    for each, was in zip(trained, before, strict=True):
        assert torch.equal(each.parameter, each.master.bfloat16()), each.name
        assert not torch.equal(each.master, was), each.name
