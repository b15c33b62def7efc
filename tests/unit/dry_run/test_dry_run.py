# SPDX-License-Identifier: Apache-2.0
"""A rank of 8 counts what it holds and which collectives it calls: by hand, and against the planner's formulas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.model_shapes import TINY_LLAMA, TINY_MOE, TINY_QWEN3, config_folder, dry_recipe
from podium.algorithms.dense import token_cross_entropy
from podium.dry_run.counting import CollectiveCounter
from podium.dry_run.fake_ranks import DryModel, dry_run, fake_mesh, fake_tensors
from podium.engine.optimizer import AdamW
from podium.engine.sharding import place_empty
from podium.engine.train_step import ObjectiveBatch, TrainEngine
from podium.errors import RecipeError
from podium.models.head import TokenObjective
from podium.models.verify import random_batch
from podium.planning.collectives import Collective, step_collectives
from podium.planning.devices import device_named
from podium.planning.fixed_data_plans import split_of
from podium.planning.model_shape import shape_of
from podium.recipe import OptimizerSection
from podium.recipe.policy_mesh import MeshSizes

H200 = device_named("H200")
ALL_AXES = {"replicate": 2, "shard": 2, "tensor": 2}
EIGHT_EXPERTS = {**TINY_MOE, "num_experts": 8}
THREE_HEADS = {**TINY_QWEN3, "num_attention_heads": 3, "num_key_value_heads": 1}
WINDOWS = {
    **TINY_QWEN3, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 16,
    "num_hidden_layers": 6, "sliding_window": 8, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip


def by_name(collectives: tuple[Collective, ...]) -> dict[str, tuple[int, int, int]]:
    return {f"{each.kind} {each.axis}": (each.ranks, each.calls, each.num_bytes) for each in collectives}


@pytest.mark.slow
def test_a_rank_of_eight_by_hand(tmp_path: Path) -> None:
    counted = dry_run(dry_recipe(config_folder(tmp_path / "m", TINY_LLAMA), 8, ALL_AXES), H200)

    matrices = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128  # q, o; k, v; gate, up, down
    layers = 2 * (matrices // 2 + 2 * 64)  # of a tensor rank: half of each matrix, and both norms whole
    outside = 2 * 256 * 64 // 2 + 64  # half of embedding and head, and the last norm
    held = (layers + outside) // 2
    first, last = counted.ranks
    assert (first.rank, last.rank) == (0, 7)
    assert first.model_parameters == 2 * (matrices + 2 * 64) + 2 * 256 * 64 + 64
    assert first.held_parameters == last.held_parameters == held
    assert (first.parameter_bytes, first.gradient_bytes, first.optimizer_bytes) == (4 * held, 4 * held, 8 * held)

    # Four ranks with different data take 128 tokens of 512 each, in two micro-batches.
    assert (counted.split.micro_batches, counted.split.tokens) == (2, 64)
    states = 64 * 64 * 2  # hidden states of a micro-batch in bfloat16
    # Forward: two sums a layer and the embedding's. Backward: the gradient of the input of q, k and v, and of that of
    # gate and up. The head: largest scores, two sums of each token, and the gradient of its input.
    sums = 2 * (2 + 2) + 1 + 1
    assert by_name(counted.collectives) == {
        "all-gather shard": (2, 2 * 5, 2 * 2 * (2 * layers + outside)),
        "reduce-scatter shard": (2, 2 * 3, 2 * 4 * (layers + outside)),
        "all-reduce replicate": (2, 2 * 3, 2 * 4 * held),
        "all-reduce tensor": (2, 2 * (sums + 2), 2 * (sums * states + 3 * 4 * 64)),
        "all-reduce all": (8, 1, 5 * 4),
    }
    assert not dist.is_initialized()


def test_a_mixture_on_a_tensor_axis_is_refused(tmp_path: Path) -> None:
    of_tensors = dry_recipe(config_folder(tmp_path / "m", TINY_MOE), 4, {"shard": 2, "tensor": 2})
    with pytest.raises(RecipeError, match=r"placement\.policy\.tensor: 2 cannot be counted .*tensor: 1"):
        dry_run(of_tensors, H200)


@pytest.mark.slow
def test_experts_of_a_rank_by_hand(tmp_path: Path) -> None:
    """Four ranks hold eight experts in two groups of two. A micro-batch has 64 tokens for two experts each."""
    folder = config_folder(tmp_path / "m", EIGHT_EXPERTS)
    counted = dry_run(dry_recipe(folder, 4, None, placement={"devices": 4, "experts": 2}), H200)

    experts = 2 * 8 * (2 * 32 * 64 + 64 * 32)  # of both layers: gate and up, down
    assert counted.ranks[0].held_parameters == counted.ranks[1].held_parameters
    assert counted.sizes == MeshSizes(shard=4, experts=2)
    found = by_name(counted.collectives)
    # Each gathers the half that two ranks share, forward and backward, in two micro-batches.
    assert found["all-gather expert_shard"] == (2, 2 * 2 * 2, 2 * 2 * experts // 2 * 2)
    assert found["reduce-scatter expert_shard"] == (2, 2 * 2, 2 * experts // 2 * 4)
    # In each layer numbers of tokens; then hidden states there and outputs back, and both gradients.
    states = 64 * 2 * 64 * 2
    assert found["all-to-all experts"] == (2, 2 * 2 * (1 + 2 + 2), 2 * 2 * (8 * 8 + 4 * states))
    assert "assumed: routers send as many tokens to each rank" in "\n".join(counted.lines())


@dataclass(frozen=True, slots=True)
class Case:
    config: dict[str, Any]
    policy: dict[str, int]
    model: dict[str, Any]
    experts: int = 1
    length: int = 64  # of a document


LAYERS, ADAPTER = {"activation_checkpointing": "layers"}, {"lora": {"rank": 8, "alpha": 8}}
CASES = {
    "checkpointed": Case(TINY_QWEN3, ALL_AXES, LAYERS),
    "adapter": Case(TINY_LLAMA, {"tensor": 2, "replicate": 2}, ADAPTER),
    "uneven": Case(TINY_MOE, {"shard": 8}, {}),  # 6 experts on 8 ranks
    "tied": Case({**TINY_QWEN3, "tie_word_embeddings": True}, {"tensor": 2}, {}),
    "experts": Case(EIGHT_EXPERTS, {"replicate": 2}, {}, 4),  # nothing of them is gathered
    "experts over context": Case(EIGHT_EXPERTS, {"context": 2}, LAYERS, 4),
    "experts and adapter": Case(EIGHT_EXPERTS, {"shard": 8}, {**ADAPTER, **LAYERS}, 2),
    "context": Case(TINY_QWEN3, {"context": 2, "tensor": 2}, {"activation_checkpointing": "all_but_attention"}),
    "context copies keys": Case(TINY_QWEN3, {"context": 4}, ADAPTER),  # of 2 heads for 4 ranks
    "ring": Case(THREE_HEADS, {"context": 8}, LAYERS),
    "ring of short documents": Case(THREE_HEADS, {"context": 4}, ADAPTER, length=20),
    "ring of windows": Case(WINDOWS, {"context": 4}, {}, length=32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_planner_agrees(tmp_path: Path, name: str) -> None:
    """Parameters, gradients and optimizer state of the rank that holds most to 2%, collectives to the byte."""
    case = CASES[name]
    step = {"tokens_per_step": 512, "micro_batch_tokens": 64}
    if case.length != 64:  # micro-batches of several
        step = {"tokens_per_step": 12 * case.length, "micro_batch_tokens": 3 * case.length}
    recipe = dry_recipe(
        config_folder(tmp_path / "m", case.config), 8, case.policy, model=case.model,
        data={"train": "rows.jsonl", "max_length": case.length},
        placement={"devices": 8, "policy": case.policy, "experts": case.experts}, **step,
    )  # fmt: skip
    counted = dry_run(recipe, H200)

    predicted = counted.predicted()
    assert predicted is not None
    first = counted.ranks[0]
    held = (first.parameter_bytes, first.gradient_bytes, first.optimizer_bytes)
    assert tuple(predicted[0].values()) == pytest.approx(held, rel=0.02)
    assert counted.collectives == step_collectives(
        shape_of(recipe.model), counted.sizes, passes=counted.split.micro_batches, tokens=counted.split.tokens,
        itemsize=2, checkpointed="activation_checkpointing" in case.model, length=counted.split.length,
    )  # fmt: skip
    if name == "uneven":  # ranks 6 and 7 have no expert in either layer
        experts = 2 * (2 * 32 * 64 + 64 * 32)
        assert counted.ranks[0].held_parameters - counted.ranks[1].held_parameters >= experts
    text = "\n".join(counted.lines())
    assert ("ranks hold unequal parts" in text) == (name == "uneven")
    assert ("keys travel around ranks of context" in text) == (name.startswith("ring"))
    assert "Untested on hardware" in text


@pytest.mark.slow
def test_few_layers_tell_what_many_have(tmp_path: Path) -> None:
    config = {**TINY_MOE, "num_hidden_layers": 7}
    recipe = dry_recipe(config_folder(tmp_path / "m", config), 8, {"replicate": 2}, model={"router_aux_loss_coef": 0.1})
    sizes = MeshSizes(replicate=2, shard=4)
    model, split = DryModel(recipe, 2), split_of(recipe, H200, sizes)

    assert model.count(0, sizes, split) == model.counted(model.config, 0, sizes, split)


@pytest.mark.slow
def test_micro_batches_repeat_their_collectives(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m", TINY_LLAMA)
    recipe, sizes = dry_recipe(folder, 8, ALL_AXES, tokens_per_step=768), MeshSizes(replicate=2, shard=2, tensor=2)
    expected = dry_run(recipe, H200)

    dry = DryModel(recipe, 2)
    with fake_mesh(0, sizes) as mesh, fake_tensors(dry.built(dry.config)) as model:
        trained = place_empty(model, dry.section, mesh)
        engine = TrainEngine(model, trained, AdamW(trained, OptimizerSection(lr=1e-5)), mesh, 1.0)
        batch = ObjectiveBatch(packed=random_batch(256, (64,)), objective=TokenObjective(token_cross_entropy))
        with CollectiveCounter(mesh, sizes) as counter:
            engine.objective_step([batch] * 3, normalizer=1.0, lr=1e-5)
    assert expected.split.micro_batches == 3
    assert counter.between() == expected.collectives


@dataclass(frozen=True, slots=True)
class Weighted:
    """An objective that holds numbers of each token, as those of policies do."""

    weights_S: Tensor
    temperature: float = 1.0
    entropy: float = 0.0
    watches_entropy: bool = False
    ties_tokens: bool = False

    def __call__(self, logprobs_C: Tensor, tokens: slice) -> Tensor:
        assert self.weights_S.dtype == logprobs_C.dtype == torch.float32
        return -logprobs_C * self.weights_S[tokens]


def test_sharded_bfloat16_does_not_round_what_objectives_hold(tmp_path: Path) -> None:
    folder, sizes = config_folder(tmp_path / "m", TINY_LLAMA), MeshSizes(shard=2)
    recipe = dry_recipe(folder, 2, None)

    dry = DryModel(recipe, 2)
    with fake_mesh(0, sizes) as mesh, fake_tensors(dry.built(dry.config)) as model:
        trained = place_empty(model, dry.section, mesh)
        engine = TrainEngine(model, trained, AdamW(trained, OptimizerSection(lr=1e-5)), mesh, 1.0)
        batch = ObjectiveBatch(packed=random_batch(256, (64,)), objective=Weighted(torch.ones(64)))
        _, seen = engine.objective_step([batch], normalizer=1.0, lr=1e-5)
    assert seen[0][0].shape == (64,)
