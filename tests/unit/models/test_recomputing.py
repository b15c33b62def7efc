# SPDX-License-Identifier: Apache-2.0
"""Selective activation checkpointing: the same gradient to the bit, and only cheap operations run again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.engines import full_gradient, make_engine, num_trained, random_documents, relative_l2
from helpers.tiny import SUPPORTED, save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import pack
from podium.engine.train_step import ObjectiveBatch, TrainEngine
from podium.models import attention
from podium.models.head import TokenObjective

WAYS = ("selective", "all_but_attention")
LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


FEW = ("gemma3", "gpt_oss", "qwen3_moe")
FAMILIES = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in SUPPORTED if name not in FEW)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_no_checkpointing_to_the_bit(tmp_path: Path, family: str) -> None:
    folder, batch = save_tiny_model(family, tmp_path), pack(random_documents())

    def gradients(way: str) -> dict[str, Tensor]:
        engine = make_engine(folder, activation_checkpointing=way)
        found = engine.gradients([batch], token_cross_entropy, normalizer=1.0)[1]
        return {each.name: found[id(each)] for each in engine.optimizer.trained if id(each) in found}

    plain = gradients("none")
    for way in WAYS:
        found = gradients(way)
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_gradients_of_adapters_are_too(folder: Path) -> None:
    pytest.importorskip("peft")
    documents, lora = random_documents(), {"rank": 4}
    engine = make_engine(folder, lora=lora)
    for each in engine.optimizer.trained:  # B begins at zero, and A would have no gradient
        each.master.normal_(generator=torch.Generator().manual_seed(0))
    plain, values = full_gradient(engine, documents), [each.master for each in engine.optimizer.trained]
    assert plain.norm() > 0
    for way in (*WAYS, "layers"):
        engine = make_engine(folder, lora=lora, activation_checkpointing=way)
        for each, value in zip(engine.optimizer.trained, values, strict=True):
            each.master.copy_(value)
        assert torch.equal(full_gradient(engine, documents), plain)


@pytest.mark.parametrize("way", WAYS)
def test_dropout_is_repeated(tmp_path: Path, way: str) -> None:
    folder, gradients = save_tiny_model("gpt2", tmp_path), []
    for model in ({}, {"activation_checkpointing": way}):
        engine = make_engine(folder, dropout=True, **model)
        torch.manual_seed(3)
        gradients.append(full_gradient(engine, random_documents()))
    assert relative_l2(gradients[1], gradients[0]) < 1e-5


class Counted(TorchDispatchMode):
    """Operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def of_backward(engine: TrainEngine) -> Counter[str]:
    """What the backward pass runs."""
    engine.model.train()
    batch = pack(random_documents((24, 24)))
    value = engine._forward(ObjectiveBatch(packed=batch, objective=TokenObjective(token_cross_entropy)))[0]
    with Counted() as counted:
        value.backward()
    return counted.counts


def test_only_what_is_not_kept_runs_again(folder: Path) -> None:
    kernel, products = "_scaled_dot_product_flash_attention_for_cpu", 7  # q, k, v, o, gate, up, down
    runs = {way: of_backward(make_engine(folder, activation_checkpointing=way)) for way in ("none", *WAYS, "layers")}

    plain = runs["none"]["mm"]
    assert plain == 2 * products * LAYERS
    # Nobody needs the output of the last product: the layer is not computed to its end.
    repeated = (products - 1) * LAYERS
    assert {way: counts["mm"] - plain for way, counts in runs.items()} == {
        "none": 0, "selective": 0, "all_but_attention": repeated, "layers": repeated
    }  # fmt: skip
    assert {way: counts[kernel] for way, counts in runs.items()} == {
        "none": 0, "selective": 0, "all_but_attention": 0, "layers": LAYERS
    }  # fmt: skip
    cheap = [runs[way]["silu"] for way in runs]
    assert cheap == [0, LAYERS, LAYERS, LAYERS]


class Held:
    """Bytes of the outputs that the policy keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch.utils import checkpoint

        self.shapes: list[tuple[int, ...]] = []
        inside = checkpoint._VersionWrapper.__init__

        def note(wrapper: Any, value: Any) -> None:
            if isinstance(value, Tensor):
                self.shapes.append(tuple(value.shape))
            inside(wrapper, value)

        monkeypatch.setattr(checkpoint._VersionWrapper, "__init__", note)


def test_the_wide_product_of_an_adapter_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as wide as the layer and sums over the rank alone."""
    pytest.importorskip("peft")
    batch = pack(random_documents((24, 24)))
    held = Held(monkeypatch)
    engine = make_engine(folder, activation_checkpointing="selective")
    full_gradient(engine, random_documents((24, 24)))
    alone = Counter(held.shapes)
    held.shapes.clear()
    full_gradient(
        make_engine(folder, activation_checkpointing="selective", lora={"rank": 3}), random_documents((24, 24))
    )
    found = Counter(held.shapes)
    inner = (len(batch.tokens_T), 3)
    assert found.pop(inner) == 7 * LAYERS
    assert found == alone


def test_evaluation_computes_a_layer_as_it_is(folder: Path) -> None:
    documents = random_documents()
    plain, engine = make_engine(folder), make_engine(folder, activation_checkpointing="selective")
    wanted = plain.loss_sum([pack(documents)], token_cross_entropy)
    assert torch.equal(engine.loss_sum([pack(documents)], token_cross_entropy), wanted)
    assert engine.model.training


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_compiled_layers_have_the_same_gradient(folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is inside the compiled layer. On CPU attention is not compiled otherwise; here it is, as on CUDA."""
    undisabled = attention._by_document._torchdynamo_orig_callable
    monkeypatch.setattr(attention, "_by_document", undisabled)
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda layer: compile(layer, backend="aot_eager"))
    documents = random_documents((24, 24, 24))
    wanted = full_gradient(make_engine(folder), documents)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = make_engine(folder, activation_checkpointing=way, compile="on")
    assert relative_l2(full_gradient(engine, documents), wanted) < 1e-5
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    report = engine.train_step([pack(documents)], token_cross_entropy, normalizer=num_trained(documents), lr=1e-3)
    assert report.resolve().loss > 0


@pytest.mark.slow
def test_compiled_layers_with_attention_apart_have_the_same_gradient(folder: Path) -> None:
    """Where attention cannot be compiled, the layer runs as it is."""
    documents = random_documents()
    wanted = full_gradient(make_engine(folder), documents)
    torch._dynamo.reset()
    engine = make_engine(folder, activation_checkpointing="selective", compile="on")
    assert relative_l2(full_gradient(engine, documents), wanted) < 1e-5
