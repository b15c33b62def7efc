# SPDX-License-Identifier: Apache-2.0
"""Mixtures whose experts are on several ranks: gradients, norms, losses and weights of one rank, checkpoints that fit
with and without, and whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.engines import make_engine, one_rank, relative_l2
from helpers.meshes import LORA, MeshTask, OfModel, OnMesh, mesh_rank, models_rank, name_of, of_model
from helpers.ranks import OPTIMIZER, ranks_in_turn, whole_state
from helpers.runs import STEPS, losses, tiny_recipe
from helpers.tiny import save_tiny_model, tiny_tokenizer, write_chats
from podium import api
from podium.engine.checkpoint import newest_usable
from podium.engine.resuming import restore_optimizer
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SAME = 1e-5
SHAPES = (
    MeshSizes(shard=4),
    MeshSizes(shard=4, experts=2),
    MeshSizes(shard=4, experts=4),
    MeshSizes(replicate=2, shard=2, experts=2),
    MeshSizes(shard=2, context=2, experts=2),
    MeshSizes(context=4, experts=4),
)
MODEL = "qwen3_moe"  # on all of them; the others on some
OTHERS = {
    "gpt_oss": SHAPES[1:3], "deepseek_v3": SHAPES[1:3], "mixtral": SHAPES[2:3], "glm4_moe": SHAPES[2:3],
    "olmoe": SHAPES[1:2], "qwen2_moe": SHAPES[1:2],
}  # fmt: skip
NAMES = [name_of(sizes) for sizes in SHAPES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save_tiny_model(MODEL, folder / MODEL, num_experts=8)
    for name in OTHERS:
        if name in ("olmoe", "qwen2_moe"):
            changes = {"model_type": name, "shared_expert_intermediate_size": 16, "eos_token_id": 1}
            save_tiny_model("qwen3_moe", folder / name, **changes)
        else:
            save_tiny_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def meshes(folder: Path) -> dict[str, OnMesh]:
    path, cases = folder / MODEL, {folder / name: shapes for name, shapes in OTHERS.items()}
    task = MeshTask(shapes=SHAPES, models=(path,), adapted=(path,), saves=folder / "saved")
    found, others = launch(
        ranks_in_turn, ([(mesh_rank, (task,)), (models_rank, (cases,))],), ranks=4, restarts=0,
        stop_file=folder / "stop",
    )  # fmt: skip
    for (model, shape), result in others.items():
        found[shape].models[model] = result
    return found


def require_same(found: OfModel, wanted: OfModel) -> None:
    assert relative_l2(found.gradient, wanted.gradient) < SAME
    assert relative_l2(found.lopsided, wanted.gradient) < SAME
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=SAME)
    assert found.losses == pytest.approx(wanted.losses, rel=SAME)
    assert found.version == wanted.version
    assert found.gap < 1e-4


@pytest.mark.parametrize("model", [MODEL, *OTHERS])
def test_gradients_norms_losses_and_published_weights_are_those_of_one_rank(
    folder: Path, meshes: dict[str, OnMesh], model: str
) -> None:
    wanted = of_model(folder / model, one_rank())
    for sizes in OTHERS.get(model, SHAPES):
        require_same(meshes[name_of(sizes)].models[model], wanted)


def test_an_adapter_beside_divided_experts_is_that_of_one_rank(folder: Path, meshes: dict[str, OnMesh]) -> None:
    wanted = of_model(folder / MODEL, one_rank(), lora=LORA)
    for name in NAMES:
        require_same(meshes[name].adapted[MODEL], wanted)


def test_checkpoints_are_read_with_and_without_divided_experts_bit_for_bit(
    folder: Path, meshes: dict[str, OnMesh]
) -> None:
    for at, name in enumerate(NAMES):
        assert list(meshes[name].loaded) == NAMES[:at]
        for before, state in meshes[name].loaded.items():
            for key, tensor in state.items():
                assert torch.equal(tensor, meshes[before].saved[key]), f"{key} of {before} on {name}"
        reader = newest_usable(folder / "saved" / name)
        engine = make_engine(folder / MODEL, optimizer=OPTIMIZER, checkpoint=reader)
        restore_optimizer(engine, reader)
        for key, tensor in whole_state(engine).items():
            assert torch.equal(tensor, meshes[name].saved[key]), f"{key} of {name} on one rank"


def test_a_part_that_several_ranks_hold_is_saved_once(meshes: dict[str, OnMesh]) -> None:
    sizes = [meshes[name].num_saved_bytes for name in NAMES]
    assert max(sizes) < min(sizes) + 4 * 20_000  # each rank's file has a header of its own


def test_a_run_has_the_losses_of_one_rank_and_continues_without_divided_experts(tmp_path: Path) -> None:
    model = save_tiny_model("qwen3_moe", tmp_path / "model")
    tiny_tokenizer().save_pretrained(model)
    data = write_chats(tmp_path / "train.jsonl")
    evaluation = {"every": 4, "max_documents": 6, "generation": {"prompts": 2, "max_new_tokens": 4}}
    options = {
        "data": {"train": [{"path": str(data)}], "heldout": [{"path": str(data)}]}, "evaluation": evaluation,
        "model": {"path": str(model), "router_aux_loss_coef": 0.01},
    }  # fmt: skip
    api.train(tiny_recipe(model, data, tmp_path, "alone", **options))
    divided = tiny_recipe(model, data, tmp_path, "divided", placement={"devices": 2, "experts": 2}, **options)
    api.train(divided.model_copy(update={"steps": 5}))
    api.resume(tmp_path / "divided", overrides=[f"steps={STEPS}", "placement.experts=1", "placement.devices=1"])
    assert losses(tmp_path / "divided") == pytest.approx(losses(tmp_path / "alone"), rel=SAME)
