# SPDX-License-Identifier: Apache-2.0
"""Inputs of layers that wait in host memory: the same gradient, in the right order, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.engines import full_gradient, make_engine, random_documents
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import pack
from podium.engine.train_step import ObjectiveBatch, TrainEngine
from podium.models import activation_offload
from podium.models.activation_offload import ActivationOffload
from podium.models.head import TokenObjective

LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


def offloading(folder: Path, **model: object) -> TrainEngine:
    return make_engine(folder, activation_checkpointing="layers", offload_activations=True, **model)


def test_gradients_are_those_of_kept_activations_to_the_bit(folder: Path) -> None:
    documents = random_documents()
    assert torch.equal(full_gradient(offloading(folder), documents), full_gradient(make_engine(folder), documents))


@pytest.mark.parametrize("dropout", [False, True])
def test_dropout_or_not_the_same_tensors_wait(tmp_path: Path, dropout: bool) -> None:
    folder, gradients = save_tiny_model("gpt2", tmp_path), []
    for model in ({}, {"offload_activations": True}):
        engine = make_engine(folder, dropout=dropout, activation_checkpointing="layers", **model)
        torch.manual_seed(1)
        gradients.append(full_gradient(engine, random_documents()))
    assert torch.equal(gradients[0], gradients[1])


def test_each_input_comes_back_while_the_layer_after_it_is_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, events = offloading(folder), list[tuple[str, int]]()
    numbers: dict[int, int] = {}
    kind = activation_offload._Offloaded
    begin, take = kind.begin_return, kind.take

    def number(tensor: object) -> int:
        return numbers.setdefault(id(tensor), len(numbers))

    def note_begin(self: activation_offload._Offloaded) -> None:
        events.append(("begin", number(self)))
        begin(self)

    def note_take(self: activation_offload._Offloaded) -> torch.Tensor:
        events.append(("take", number(self)))
        return take(self)

    monkeypatch.setattr(kind, "begin_return", note_begin)
    monkeypatch.setattr(kind, "take", note_take)
    value = forward(engine)
    offload = engine.model.offload
    assert offload is not None
    assert offload.num_waiting == LAYERS
    for reference in offload._waiting:
        number(reference())
    value.backward()
    assert events == [("take", 2), ("begin", 1), ("take", 1), ("begin", 0), ("take", 0)]
    assert offload.num_waiting == 0


def test_a_graph_without_a_backward_pass_leaves_nothing(folder: Path) -> None:
    engine = offloading(folder)
    value = forward(engine)
    assert engine.model.offload is not None
    assert engine.model.offload.num_waiting == LAYERS
    del value
    assert engine.model.offload.num_waiting == 0


def test_evaluation_saves_nothing(folder: Path) -> None:
    engine = offloading(folder)
    engine.loss_sum([pack(random_documents())], token_cross_entropy)
    assert engine.model.offload is not None
    assert engine.model.offload.num_waiting == 0


def test_what_is_saved_outside_the_context_stays() -> None:
    offload, values = ActivationOffload(), torch.ones(3, requires_grad=True)
    with offload.saving():
        inside = values.exp()
    outside = values.exp()
    assert offload.num_waiting == 1
    (inside.sum() + outside.sum()).backward()
    assert torch.equal(values.grad, 2 * torch.ones(3).exp())  # type: ignore[arg-type]


def forward(engine: TrainEngine) -> torch.Tensor:
    engine.model.train()
    batch = ObjectiveBatch(packed=pack(random_documents()), objective=TokenObjective(token_cross_entropy))
    return engine._forward(batch)[0]
