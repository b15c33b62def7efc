# SPDX-License-Identifier: Apache-2.0
"""Routers of mixtures: recorded, replayed and balanced, against transformers and a model written down again."""

# T tokens · L layers with a router · E experts · K experts of a token

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from helpers.architectures import small_config
from helpers.engines import make_engine, num_trained, one_rank, random_documents, relative_l2
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.algorithms.router_statistics import RouterStatistics
from podium.data.documents import Document, PackedBatch, pack
from podium.data.routed_experts import Experts, RouterShape
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.errors import UnsupportedModelError
from podium.models.causal_lm import PackedCausalLM
from podium.models.packing import TokenBatch, to_device
from podium.models.routing import RouterSums, Routing, probabilities
from podium.recipe import ModelSection

CPU = torch.device("cpu")
FAMILIES = ("qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "mixtral")
LENGTHS = (7, 12, 12, 30)


def made(name: str, folder: Path, **changes: Any) -> PackedCausalLM:
    save_tiny_model(name, folder, **changes)
    model, _ = place(ModelSection(path=str(folder)), folder, one_rank(), seed=0)
    return model


def batch_of(documents: list[Document], routing: Routing | None = None, *, multiple: int = 1) -> TokenBatch:
    batch = to_device(pack(documents), CPU, multiple=multiple)
    return batch if routing is None else replace(batch, packing=replace(batch.packing, routing=routing))


def chosen(model: PackedCausalLM, documents: list[Document]) -> Tensor:
    """The model's own choices [L, T, K]."""
    assert model.routers is not None
    shape = model.routers.shape
    recorded = torch.zeros(shape.num_layers, len(batch_of(documents).tokens_T), shape.per_token, dtype=torch.uint8)
    with torch.no_grad():
        model(batch_of(documents, Routing(recorded_LTK=recorded)), None, "scores")
    return recorded


def others(shape: RouterShape, num_tokens: int) -> Experts:
    """Random choices, of distinct experts for each token and layer."""
    draw = np.random.default_rng(0)
    order = draw.random((num_tokens, shape.num_layers, shape.num_experts)).argsort(-1)
    return order[..., : shape.per_token].astype(shape.dtype)


def with_experts(documents: list[Document], experts_TLK: Experts) -> list[Document]:
    """The choices of all input positions, dealt to the documents."""
    ends = np.cumsum([document.num_inputs for document in documents])
    parts = np.split(experts_TLK, ends[:-1])
    return [replace(document, experts=part) for document, part in zip(documents, parts, strict=True)]


# --- replay ---


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_replays_its_own_choices_computes_what_it_computes_anyway(name: str, tmp_path: Path) -> None:
    """Bit for bit: the weights of experts follow from logits and choices exactly as the router computes them."""
    model, documents = made(name, tmp_path), random_documents(LENGTHS)
    with torch.no_grad():
        free = model(batch_of(documents), None, "scores")
        again = model(
            batch_of(with_experts(documents, chosen(model, documents).transpose(0, 1).numpy())), None, "scores"
        )
    assert torch.equal(free, again)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "olmoe"])
@pytest.mark.parametrize("norm", [False, True])
def test_weights_are_normalised_where_the_config_says_so(model_type: str, norm: bool) -> None:
    config = small_config(model_type)
    config.norm_topk_prob = norm
    torch.manual_seed(0)
    model = PackedCausalLM(transformers.AutoModelForCausalLM.from_config(config), 250)
    documents = random_documents(LENGTHS)
    with torch.no_grad():
        free = model(batch_of(documents), None, "scores")
        own = with_experts(documents, chosen(model, documents).transpose(0, 1).numpy())
        assert torch.equal(free, model(batch_of(own), None, "scores"))


class ForcedRouter(torch.nn.Module):
    """Qwen3-MoE's router written down again, with given experts."""

    def __init__(self, router: Any, experts_TK: Tensor) -> None:
        super().__init__()
        self.weight, self.experts_TK, self.norm = router.weight, experts_TK, router.norm_topk_prob

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        exponents = (logits - logits.max(-1, keepdim=True).values).exp()
        gates = torch.stack([row[chosen] for row, chosen in zip(exponents, self.experts_TK, strict=True)])
        total = gates.sum(-1, keepdim=True) if self.norm else exponents.sum(-1, keepdim=True)
        return logits, gates / total, self.experts_TK


@pytest.mark.parametrize("norm", [False, True])
def test_replayed_log_probs_and_gradients_are_those_of_a_model_with_these_experts(norm: bool, tmp_path: Path) -> None:
    """One document through plain transformers, whose routers were replaced. The gradient reaches them as well."""
    engine = make_engine(save_tiny_model("qwen3_moe", tmp_path, norm_topk_prob=norm))
    model, documents = engine.language_model, random_documents((21,))
    assert model.routers is not None
    experts = others(model.routers.shape, 21)
    assert (np.sort(experts) != np.sort(chosen(model, documents).transpose(0, 1).numpy())).any()
    packed = pack(with_experts(documents, experts))
    total, gradients = engine.gradients([packed], token_cross_entropy, normalizer=1.0)

    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for layer, decoder in enumerate(plain.model.layers):
        decoder.mlp.gate = ForcedRouter(decoder.mlp.gate, torch.from_numpy(experts[:, layer].astype(np.int64)))
    logprobs = torch.log_softmax(plain(torch.from_numpy(packed.tokens_T.astype(np.int64))[None]).logits[0], -1)
    targets, weights = torch.from_numpy(packed.targets_T.astype(np.int64)), torch.from_numpy(packed.weights_T)
    loss = -(logprobs.gather(1, targets[:, None])[:, 0] * weights).sum()
    loss.backward()
    assert float(total) == pytest.approx(float(loss.detach()), rel=1e-5)
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    compared = [each for each in engine.optimizer.trained if each.name in wanted and "embed" not in each.name]
    routers = [each.name for each in compared if each.name.endswith("mlp.gate.weight")]
    assert len(routers) == model.routers.shape.num_layers
    for each in compared:
        rows = wanted[each.name].shape[0]
        assert relative_l2(gradients[id(each)][:rows], wanted[each.name]) < 1e-4, each.name


def test_positions_without_a_record_are_routed_as_ever(tmp_path: Path) -> None:
    model, documents = made("qwen3_moe", tmp_path), random_documents((9,))
    assert model.routers is not None
    recorded = np.zeros((2, 9, 2), np.uint8)
    experts = others(model.routers.shape, 9)
    experts[4:] = np.iinfo(np.uint8).max
    routing = Routing(replayed_TLK=torch.from_numpy(experts), recorded_LTK=torch.from_numpy(recorded))
    with torch.no_grad():
        mixed = model(batch_of(documents, routing), None, "scores")
        own = model(batch_of(documents), None, "scores")
    assert np.array_equal(recorded.swapaxes(0, 1)[:4], experts[:4])
    first = chosen(model, documents)[0].numpy()  # of later layers, states differ
    assert np.array_equal(recorded[0, 4:], first[4:])
    assert not torch.equal(mixed, own)


def test_the_gradient_of_replayed_routers_is_that_of_finite_differences(tmp_path: Path) -> None:
    """Along the gradient itself, in which the loss changes most: routers compute in float32."""
    model, documents = made("qwen3_moe", tmp_path, norm_topk_prob=True), random_documents((8,))
    assert model.routers is not None
    batch = batch_of(with_experts(documents, others(model.routers.shape, 8)))
    gate = model.hf.model.layers[0].mlp.gate.weight
    weights = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        return (model.hidden(batch).double() * weights).sum()

    loss().backward()
    found = gate.grad.clone()
    step = found / found.norm() * 0.02
    with torch.no_grad():
        gate += step
        above = loss()
        gate -= 2 * step
        below = loss()
    assert float(above - below) / 0.04 == pytest.approx(float(found.norm()), rel=0.02)


def test_recomputed_layers_replay_too(tmp_path: Path) -> None:
    """Activation checkpointing runs every layer again in the backward pass."""
    folder = save_tiny_model("qwen3_moe", tmp_path)
    documents = random_documents(LENGTHS)
    shape = RouterShape(num_layers=2, num_experts=4, per_token=2)
    batch = pack(with_experts(documents, others(shape, sum(LENGTHS))))
    plain, recomputing = (make_engine(folder, activation_checkpointing=each) for each in ("none", "layers"))
    found = [
        torch.cat([g[id(e)].flatten() for e in engine.optimizer.trained])
        for engine in (plain, recomputing)
        for _, g in [engine.gradients([batch], token_cross_entropy, normalizer=10.0)]
    ]
    assert torch.equal(found[0], found[1])


def test_a_dense_model_has_no_routers_and_a_mixture_of_another_kind_has_a_reason(tmp_path: Path) -> None:
    dense, unknown = made("qwen3", tmp_path / "a"), made("phimoe", tmp_path / "b")
    assert (dense.routers, dense.router_problem) == (None, None)
    assert unknown.routers is None
    assert "Phimoe" in (unknown.router_problem or "")
    for name in ("a", "b"):
        with pytest.raises(UnsupportedModelError, match="router_aux_loss_coef"):
            balanced(tmp_path / name, 0.1)


# --- statistics and the load-balancing loss ---


def test_statistics_of_a_load_written_down() -> None:
    """Two layers, four experts, two a token, four tokens. The first layer is even; in the second all tokens go to
    experts 0 and 1, with probabilities of 0.5, 0.3, 0.1 and 0.1 each."""
    even = [2, 2, 2, 2, 1.0, 1.0, 1.0, 1.0, 4 * 1.2, 1, 8]
    uneven = [4, 4, 0, 0, 2.0, 1.2, 0.4, 0.4, 4 * 0.8, 3, 8]
    found = RouterStatistics.of(np.array([even, uneven]), 4.0)
    assert found.max_load == pytest.approx((1.0 + 2.0) / 2)
    assert found.dead_experts == pytest.approx(2 / 8)
    assert found.entropy == pytest.approx((1.2 + 0.8) / 2)
    # 4 · 4 · (0.5 · 0.25) = 2 and 4 · (0.5 + 0.3) = 3.2
    assert found.aux_loss == pytest.approx((2.0 + 3.2) / 2)
    assert found.mismatch == pytest.approx(4 / 16)
    assert set(found.metrics()) - {"router/mismatch"} == set(replace(found, mismatch=None).metrics())


def watched(model: PackedCausalLM, documents: list[Document], *, multiple: int = 1) -> RouterStatistics:
    assert model.routers is not None
    batch = batch_of(documents, multiple=multiple)
    num_real = sum(document.num_inputs for document in documents)
    sums = RouterSums.empty(model.routers.shape, (torch.arange(len(batch.tokens_T)) < num_real).float())
    with torch.no_grad():
        model(replace(batch, packing=replace(batch.packing, routing=Routing(sums=sums))), None, "scores")
    return RouterStatistics.of(sums.sums_LC.double().numpy(), num_real)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_loss_of_a_layer_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Which pools layers before it multiplies; given one layer at a time, it computes Podium's mean."""
    model, documents = made(name, tmp_path, num_hidden_layers=2), random_documents((25,))
    assert model.routers is not None
    logits: list[Tensor] = []
    routers = [each for each in model.hf.modules() if type(each).__name__.endswith("TopKRouter")]
    hooks = [each.register_forward_hook(lambda _m, _i, out: logits.append(out[0])) for each in routers]
    found = watched(model, documents)
    for hook in hooks:
        hook.remove()
    shape = model.routers.shape
    wanted = [load_balancing_loss_func((each,), shape.num_experts, shape.per_token) for each in logits]
    assert found.aux_loss == pytest.approx(float(np.mean([float(each) for each in wanted])), rel=1e-5)
    entropy = [torch.distributions.Categorical(logits=each).entropy().mean() for each in logits]
    assert found.entropy == pytest.approx(float(np.mean([float(each) for each in entropy])), rel=1e-5)


def test_padding_does_not_count(tmp_path: Path) -> None:
    model, documents = made("qwen3_moe", tmp_path), random_documents(LENGTHS)
    plain, padded = watched(model, documents), watched(model, documents, multiple=64)
    assert padded.aux_loss == pytest.approx(plain.aux_loss, rel=1e-5)
    assert padded.entropy == pytest.approx(plain.entropy, rel=1e-5)
    assert (padded.max_load, padded.dead_experts) == (plain.max_load, plain.dead_experts)


def balanced(folder: Path, coefficient: float, **model: Any) -> TrainEngine:
    engine = make_engine(folder, **model)
    return TrainEngine(
        engine.model, engine.optimizer.trained, engine.optimizer, engine.mesh, None, router_aux_loss_coef=coefficient
    )


def flat(engine: TrainEngine, batches: list[PackedBatch], normalizer: float) -> Tensor:
    _, gradients = engine.gradients(batches, token_cross_entropy, normalizer=normalizer)
    return torch.cat([gradients[id(each)].flatten() for each in engine.optimizer.trained])


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_loss_adds_the_gradient_of_its_formula(name: str, tmp_path: Path) -> None:
    """Of E · Σ f · P with f as constants, differentiated by torch, in all parameters before the last router."""
    folder = save_tiny_model(name, tmp_path)
    documents, coefficient = random_documents(LENGTHS), 0.5
    without, with_loss = balanced(folder, 0.0), balanced(folder, coefficient)
    count = float(num_trained(documents))
    added = flat(with_loss, [pack(documents)], count) - flat(without, [pack(documents)], count)

    model = without.language_model
    assert model.routers is not None
    seen: list[tuple[Tensor, Tensor]] = []
    routers = [each for each in model.hf.modules() if type(each).__name__.lower().endswith("topkrouter")]
    for each in routers:
        each.register_forward_hook(lambda _m, _i, out: seen.append((out[0], out[2])))
    model.hidden(batch_of(documents))
    losses = []
    for logits_TE, experts_TK in seen:
        p_E = probabilities(logits_TE, is_sigmoid=name == "deepseek_v3").mean(0)
        f_E = torch.nn.functional.one_hot(experts_TK, model.routers.shape.num_experts).float().sum(1).mean(0)
        losses.append(model.routers.shape.num_experts * (f_E * p_E).sum())
    parameters = [each.parameter for each in without.optimizer.trained]
    grads = torch.autograd.grad(coefficient * torch.stack(losses).mean(), parameters, allow_unused=True)
    wanted = torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, grads, strict=True)]
    )
    assert wanted.norm() > 1e-4
    assert relative_l2(added, wanted) < 1e-3  # a small difference of two large gradients


def test_the_loss_does_not_depend_on_micro_batches_or_recomputation(tmp_path: Path) -> None:
    """f is over the whole step: a mean of the micro-batches' own losses would differ."""
    folder = save_tiny_model("qwen3_moe", tmp_path)
    documents = random_documents(LENGTHS)
    count = float(num_trained(documents))
    engine = balanced(folder, 2.0)
    wanted = flat(engine, [pack(documents)], count)
    parts = [pack(documents[:1]), pack(documents[1:2]), pack([]), pack(documents[2:])]
    assert relative_l2(flat(engine, parts, count), wanted) < 1e-5
    recomputing = balanced(folder, 2.0, activation_checkpointing="layers")
    assert relative_l2(flat(recomputing, parts, count), wanted) < 1e-5
    assert relative_l2(flat(balanced(folder, 0.0), parts, count), wanted) > 1e-3
    reports = [
        engine.train_step(batches, token_cross_entropy, normalizer=count, lr=0.0).resolve()
        for batches in ([pack(documents)], parts)
    ]
    assert reports[0].routers is not None
    assert reports[1].routers is not None
    for name, value in reports[0].routers.metrics().items():
        assert reports[1].routers.metrics()[name] == pytest.approx(value, rel=1e-5), name


def test_balancing_balances(tmp_path: Path) -> None:
    """Trained on nothing else, uneven routers become even."""
    folder = save_tiny_model("qwen3_moe", tmp_path, num_experts=8)
    engine, documents = balanced(folder, 10.0), random_documents(LENGTHS)
    losses = []
    for _ in range(30):
        report = engine.train_step([pack(documents)], lambda logprobs: 0 * logprobs, normalizer=1.0, lr=3e-3).resolve()
        assert report.routers is not None
        losses.append(report.routers.aux_loss)
    assert losses[-1] < losses[0] - 0.02
    assert losses[-1] >= 2.0 - 1e-3  # as many as experts per token: nothing is more even than even
