# SPDX-License-Identifier: Apache-2.0
"""Meshes of the axes replicate, shard, context and tensor on 2 and 4 ranks over gloo: gradients, norms, losses and
weights are those of one rank, and checkpoints fit any of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.engines import make_engine, one_rank
from helpers.meshes import LORA, MeshTask, OnMesh, mesh_rank, name_of, of_model, require_same, same, save
from helpers.ranks import OPTIMIZER, two_steps, whole_state
from helpers.tiny import save_tiny_model
from podium.engine.checkpoint import newest_usable
from podium.engine.resuming import restore_optimizer
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import launch

pytestmark = pytest.mark.slow
SHAPES = {
    2: (MeshSizes(replicate=2), MeshSizes(tensor=2), MeshSizes(context=2)),
    4: (
        MeshSizes(replicate=2, shard=2),
        MeshSizes(shard=2, tensor=2),
        MeshSizes(replicate=2, tensor=2),
        MeshSizes(tensor=4),
        MeshSizes(context=4),
        MeshSizes(shard=2, context=2),
        MeshSizes(replicate=2, context=2),
        MeshSizes(context=2, tensor=2),
    ),
}
NAMES = [(world, name_of(sizes)) for world, shapes in SHAPES.items() for sizes in shapes]
# Of all meshes; the others are of 2 ranks only.
MODELS = ("qwen3", "llama", "gemma3")
OTHERS = ("gemma2", "gemma", "glm4", "granite", "mistral", "olmo2", "phi3", "qwen2", "smollm3", "biased")
ADAPTED = ("llama", "gemma3", "biased", "phi3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    for name in (*MODELS, *OTHERS):
        changes = {"num_key_value_heads": 4} if name in MODELS else {}
        if name == "biased":
            changes = {"attention_bias": True, "mlp_bias": True}
        save_tiny_model("llama" if name == "biased" else name, folder / name, **changes)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> OnMesh:
    """One rank, in this process."""
    models = {name: of_model(folder / name, one_rank()) for name in (*MODELS, *OTHERS)}
    adapted = {name: of_model(folder / name, one_rank(), lora=LORA) for name in ADAPTED}
    engine = make_engine(folder / MODELS[0], optimizer=OPTIMIZER)
    two_steps(engine)
    save(engine, folder / "alone")
    size = sum(file.stat().st_size for file in (folder / "alone").rglob("*.safetensors"))
    return OnMesh(models=models, adapted=adapted, saved=whole_state(engine), loaded={}, num_saved_bytes=size)


def launched(folder: Path, world: int, models: tuple[str, ...], adapted: tuple[str, ...]) -> dict[str, OnMesh]:
    """Loads what the number of ranks before this one has saved."""
    before = world // 2
    loads = [folder / f"by-{before}" / name_of(sizes) for sizes in SHAPES.get(before, ())] or [folder / "alone"]
    task = MeshTask(
        shapes=SHAPES[world], models=tuple(folder / name for name in models),
        adapted=tuple(folder / name for name in adapted), saves=folder / f"by-{world}", loads=tuple(loads),
    )  # fmt: skip
    return launch(mesh_rank, (task,), ranks=world, restarts=0, stop_file=folder / "stop")


@pytest.fixture(scope="module")
def of_2(folder: Path, alone: OnMesh) -> dict[str, OnMesh]:
    return launched(folder, 2, (*MODELS, *OTHERS), ADAPTED)


@pytest.fixture(scope="module")
def of_4(folder: Path, of_2: dict[str, OnMesh]) -> dict[str, OnMesh]:
    return launched(folder, 4, MODELS, ADAPTED[:2])


@pytest.fixture(scope="module")
def meshes(of_2: dict[str, OnMesh], of_4: dict[str, OnMesh]) -> dict[int, dict[str, OnMesh]]:
    return {2: of_2, 4: of_4}


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_gradients_norms_losses_and_weights_are_those_of_one_rank(
    request: pytest.FixtureRequest, alone: OnMesh, world: int, name: str
) -> None:
    found: OnMesh = request.getfixturevalue(f"of_{world}")[name]
    for model, wanted in found.models.items():
        require_same(wanted, alone.models[model])


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_adapters_are_those_of_one_rank(request: pytest.FixtureRequest, alone: OnMesh, world: int, name: str) -> None:
    found: OnMesh = request.getfixturevalue(f"of_{world}")[name]
    assert found.adapted
    for model, wanted in found.adapted.items():
        require_same(wanted, alone.adapted[model])


def test_checkpoints_of_each_mesh_are_loaded_on_the_next_ones_bit_for_bit(
    meshes: dict[int, dict[str, OnMesh]], alone: OnMesh, folder: Path
) -> None:
    saved = {"alone": alone.saved}
    num_compared = 0
    for of_world in meshes.values():
        for name, found in of_world.items():
            for path, state in found.loaded.items():
                assert same(state, saved[path]), f"{path} on {name}"
                num_compared += 1
            saved[name] = found.saved
    wanted, before = 0, 1  # each loads what the number of ranks before it has saved, and what the meshes before it have
    for shapes in SHAPES.values():
        wanted += sum(before + at for at in range(len(shapes)))
        before = len(shapes)
    assert num_compared == wanted
    for world, name in NAMES:
        reader = newest_usable(folder / f"by-{world}" / name)
        engine = make_engine(folder / MODELS[0], optimizer=OPTIMIZER, checkpoint=reader)
        restore_optimizer(engine, reader)
        assert same(whole_state(engine), saved[name]), name


def test_a_part_that_several_ranks_hold_is_saved_once(meshes: dict[int, dict[str, OnMesh]], alone: OnMesh) -> None:
    for world, name in NAMES:
        # Each rank's file has a header of its own.
        assert meshes[world][name].num_saved_bytes < alone.num_saved_bytes + world * 20_000
