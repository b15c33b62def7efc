# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts over a tensor axis, with and without groups of experts beside it, on 2 and 4 ranks over gloo:
gradients, norms, losses and weights of one rank, checkpoints that fit any of the meshes, and whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.engines import make_engine, one_rank
from helpers.meshes import LORA, MeshTask, OnMesh, mesh_rank, models_rank, name_of, of_model, require_same, same
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
MODEL = "qwen3_moe"  # on all meshes, and with an adapter; the others on some
SHAPES = {
    2: (MeshSizes(shard=2), MeshSizes(tensor=2)),
    4: (
        MeshSizes(tensor=4),
        MeshSizes(shard=2, tensor=2),
        MeshSizes(replicate=2, tensor=2),
        MeshSizes(context=2, tensor=2),
        MeshSizes(shard=2, tensor=2, experts=2),
        MeshSizes(context=2, tensor=2, experts=2),
    ),
}
TENSOR, GROUPS = MeshSizes(tensor=2), MeshSizes(shard=2, tensor=2, experts=2)
MIXED = {"first_k_dense_replace": 1, "num_hidden_layers": 3}  # a dense layer below mixtures
OTHERS: dict[str, tuple[str, dict[str, object]]] = {
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3": ("deepseek_v3", MIXED),
    "deepseek_v3 without latent queries": ("deepseek_v3", {"q_lora_rank": None}),
    "mixtral": ("mixtral", {"router_jitter_noise": 0.0}),
    "glm4_moe": ("glm4_moe", {**MIXED, "use_qk_norm": True}),
    "qwen2_moe": ("qwen3_moe", {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 16, "eos_token_id": 1}),
    "olmoe": ("qwen3_moe", {"model_type": "olmoe", "eos_token_id": 1}),
    "qwen3_moe with a dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
}
ADAPTED = (MODEL, "gpt_oss", "deepseek_v3")
NAMES = [(world, name_of(sizes)) for world, shapes in SHAPES.items() for sizes in shapes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    save_tiny_model(MODEL, folder / MODEL, num_experts=8, num_key_value_heads=4)
    for name, (base, changes) in OTHERS.items():
        save_tiny_model(base, folder / name, **changes)
    return folder


def launched(folder: Path, world: int, loads: tuple[Path, ...]) -> dict[str, OnMesh]:
    adapted = ADAPTED if world == 2 else ADAPTED[:1]
    task = MeshTask(
        shapes=SHAPES[world], models=(folder / MODEL,), adapted=tuple(folder / name for name in adapted),
        saves=folder / f"by-{world}", loads=loads,
    )  # fmt: skip
    shapes = (TENSOR,) if world == 2 else (GROUPS,)
    cases = {folder / name: shapes for name in OTHERS}
    found, others = launch(
        ranks_in_turn, ([(mesh_rank, (task,)), (models_rank, (cases,))],), ranks=world, restarts=0,
        stop_file=folder / "stop",
    )  # fmt: skip
    for (model, shape), result in others.items():
        found[shape].models[model] = result
    return found


@pytest.fixture(scope="module")
def of_2(folder: Path) -> dict[str, OnMesh]:
    return launched(folder, 2, ())


@pytest.fixture(scope="module")
def of_4(folder: Path, of_2: dict[str, OnMesh]) -> dict[str, OnMesh]:
    return launched(folder, 4, tuple(folder / "by-2" / name_of(sizes) for sizes in SHAPES[2]))


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_gradients_norms_losses_and_weights_are_those_of_one_rank(
    request: pytest.FixtureRequest, folder: Path, world: int, name: str
) -> None:
    found: OnMesh = request.getfixturevalue(f"of_{world}")[name]
    require_same(found.models[MODEL], of_model(folder / MODEL, one_rank()))
    assert found.adapted
    for model, wanted in found.adapted.items():
        require_same(wanted, of_model(folder / model, one_rank(), lora=LORA))


@pytest.mark.parametrize("model", OTHERS)
def test_other_architectures_are_those_of_one_rank(folder: Path, of_2: dict[str, OnMesh], model: str) -> None:
    require_same(of_2[name_of(TENSOR)].models[model], of_model(folder / model, one_rank()))


@pytest.mark.parametrize("model", OTHERS)
def test_other_architectures_with_groups_of_experts_are_those_of_one_rank(
    folder: Path, of_4: dict[str, OnMesh], model: str
) -> None:
    require_same(of_4[name_of(GROUPS)].models[model], of_model(folder / model, one_rank()))


def test_checkpoints_of_each_mesh_are_read_on_the_others_bit_for_bit(
    folder: Path, of_2: dict[str, OnMesh], of_4: dict[str, OnMesh]
) -> None:
    found = {**of_2, **of_4}
    for at, (world, name) in enumerate(NAMES):
        assert list(found[name].loaded) == [before for _, before in NAMES[:at]]
        for before, state in found[name].loaded.items():
            assert same(state, found[before].saved), f"{before} on {name}"
        reader = newest_usable(folder / f"by-{world}" / name)
        engine = make_engine(folder / MODEL, optimizer=OPTIMIZER, checkpoint=reader)
        restore_optimizer(engine, reader)
        assert same(whole_state(engine), found[name].saved), f"{name} on one rank"
    sizes = [each.num_saved_bytes for each in found.values()]
    assert max(sizes) < min(sizes) + 4 * 20_000  # a part that several ranks hold is saved once; files have headers


def test_a_run_has_the_losses_of_one_rank_and_continues_on_one(tmp_path: Path) -> None:
    model = save_tiny_model(MODEL, tmp_path / "model")
    tiny_tokenizer().save_pretrained(model)
    data = write_chats(tmp_path / "train.jsonl")
    evaluation = {"every": 4, "max_documents": 6, "generation": {"prompts": 2, "max_new_tokens": 4}}
    options = {
        "data": {"train": [{"path": str(data)}], "heldout": [{"path": str(data)}]}, "evaluation": evaluation,
        "model": {"path": str(model), "router_aux_loss_coef": 0.01, "activation_checkpointing": "layers"},
    }  # fmt: skip
    api.train(tiny_recipe(model, data, tmp_path, "alone", **options))
    placement = {"devices": 2, "policy": {"tensor": 2}}
    divided = tiny_recipe(model, data, tmp_path, "divided", placement=placement, **options)
    api.train(divided.model_copy(update={"steps": 5}))
    api.resume(tmp_path / "divided", overrides=[f"steps={STEPS}", "placement.policy=null", "placement.devices=1"])
    assert losses(tmp_path / "divided") == pytest.approx(losses(tmp_path / "alone"), rel=SAME)
