# SPDX-License-Identifier: Apache-2.0
"""Every product of the axes replicate, shard, context and tensor that gives 8 ranks, over gloo: one start of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from helpers.engines import make_engine, one_rank
from helpers.meshes import LORA, MeshTask, OnMesh, mesh_rank, name_of, of_model, require_same, same, save
from helpers.ranks import OPTIMIZER, ranks_in_turn, two_steps, whole_state
from helpers.tiny import save_tiny_model
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import launch

# Two busy processors start and run 8 ranks in minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
WAIT_S = 1200.0
SHAPES = tuple(
    MeshSizes(replicate=replicate, shard=shard, context=context, tensor=tensor)
    for replicate, shard, context, tensor in itertools.product((1, 2, 4, 8), repeat=4)
    if replicate * shard * context * tensor == 8
)
# Of the other models: each axis, and each pair of axes, at least once.
FEW = (
    MeshSizes(replicate=2, shard=2, tensor=2),
    MeshSizes(replicate=2, context=2, tensor=2),
    MeshSizes(shard=2, context=2, tensor=2),
    MeshSizes(replicate=2, shard=2, context=2),
)
OTHERS = ("qwen3", "gemma3")
ADAPTED = "llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eight")
    save_tiny_model("llama", folder / "llama", num_attention_heads=8, num_key_value_heads=8)
    for name in OTHERS:
        save_tiny_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> OnMesh:
    """One rank, in this process."""
    models = {name: of_model(folder / name, one_rank()) for name in ("llama", *OTHERS)}
    adapted = {ADAPTED: of_model(folder / ADAPTED, one_rank(), lora=LORA)}
    engine = make_engine(folder / "llama", optimizer=OPTIMIZER)
    two_steps(engine)
    save(engine, folder / "alone")
    return OnMesh(models=models, adapted=adapted, saved=whole_state(engine), loaded={}, num_saved_bytes=0)


@pytest.fixture(scope="module")
def eight(folder: Path, alone: OnMesh) -> tuple[dict[str, OnMesh], dict[str, OnMesh]]:
    """(Llama on all meshes, the others on few)."""
    every = MeshTask(
        shapes=SHAPES, models=(folder / "llama",), adapted=(), saves=folder / "every", loads=(folder / "alone",),
        newest=1, timeout_s=WAIT_S,
    )  # fmt: skip
    few = MeshTask(
        shapes=FEW, models=tuple(folder / name for name in OTHERS), adapted=(folder / ADAPTED,), saves=folder / "few",
        newest=1, timeout_s=WAIT_S,
    )  # fmt: skip
    calls = [(mesh_rank, (every,)), (mesh_rank, (few,))]
    of_every, of_few = launch(ranks_in_turn, (calls,), ranks=8, restarts=0, stop_file=folder / "stop")
    return of_every, of_few


@pytest.mark.parametrize("name", [name_of(sizes) for sizes in SHAPES])
def test_llama_is_that_of_one_rank(
    eight: tuple[dict[str, OnMesh], dict[str, OnMesh]], alone: OnMesh, name: str
) -> None:
    require_same(eight[0][name].models["llama"], alone.models["llama"])


@pytest.mark.parametrize("name", [name_of(sizes) for sizes in FEW])
def test_other_models_and_an_adapter_are_those_of_one_rank(
    eight: tuple[dict[str, OnMesh], dict[str, OnMesh]], alone: OnMesh, name: str
) -> None:
    for model in OTHERS:
        require_same(eight[1][name].models[model], alone.models[model])
    require_same(eight[1][name].adapted[ADAPTED], alone.adapted[ADAPTED])


def test_each_mesh_reads_the_checkpoint_of_the_one_before_bit_for_bit(
    eight: tuple[dict[str, OnMesh], dict[str, OnMesh]], alone: OnMesh
) -> None:
    before, saved = "alone", alone.saved
    for name, found in eight[0].items():
        assert list(found.loaded) == [before]
        assert same(found.loaded[before], saved), f"{before} on {name}"
        before, saved = name, found.saved
