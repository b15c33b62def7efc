# SPDX-License-Identifier: Apache-2.0
"""Three ranks on two nodes keep copies of their shards for each other: a node is lost, and its ranks go on elsewhere
with the state that they had. Nodes are folders here; the copies go over gloo."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.ranks import mesh_of
from podium.engine import snapshot_copies
from podium.engine.checkpoint_files import Extras
from podium.engine.memory_snapshots import MemorySnapshots
from podium.engine.mesh import Mesh
from podium.engine.snapshot_copies import held_shards
from podium.errors import CheckpointError
from podium.models.tensor_shards import Box, TensorShard
from podium.spmd.launch import RankPlace, launch

pytestmark = pytest.mark.slow
ROWS = 5  # of each rank


class State:
    """A rank's rows of a matrix, and a number that all ranks have."""

    def __init__(self, mesh: Mesh) -> None:
        self.rows, self.count = torch.zeros(ROWS + mesh.rank, 3), torch.zeros(())
        starts = [ROWS * rank + rank * (rank - 1) // 2 for rank in range(mesh.world + 1)]
        self._box = Box((starts[mesh.rank], 0), (starts[mesh.rank + 1], 3))
        self._shape = (starts[-1], 3)

    def pieces(self) -> list[TensorShard]:
        return [
            TensorShard(name="weight/rows", local=self.rows, box=self._box, shape=self._shape),
            TensorShard(name="buffer/count", local=self.count, box=Box((), ()), shape=()),
        ]

    def set(self, step: int, rank: int) -> None:
        self.rows.copy_(torch.arange(self.rows.numel()).view_as(self.rows) + 100 * step + 1000 * rank)
        self.count.fill_(step)


def rank(place: RankPlace, folder: Path) -> dict[str, Any]:
    snapshot_copies._MESSAGE_BYTES = 64  # several messages for each shard
    with mesh_of(place) as mesh:

        def opened(*nodes: str) -> tuple[State, MemorySnapshots]:
            """What ranks that were just started on these nodes have."""
            state, node = State(mesh), nodes[mesh.rank]
            return state, MemorySnapshots(folder / node, mesh, node=node, pieces=state.pieces, copies=True)

        def take(state: State, snapshots: MemorySnapshots, *steps: int) -> None:
            for step in steps:
                state.set(step, mesh.rank)
                assert snapshots.take(step, Extras(values={"at": step}, arrays={})) is None
                snapshots.wait()
                mesh.barrier()

        def lose(node: str) -> None:
            mesh.barrier()
            if mesh.is_main:
                shutil.rmtree(folder / node)
            mesh.barrier()

        def is_restored(state: State, snapshots: MemorySnapshots, step: int) -> bool:
            reader = snapshots.read(step)
            reader.load(state.pieces())
            expected = State(mesh)
            expected.set(step, mesh.rank)
            equal = torch.equal(state.rows, expected.rows) and torch.equal(state.count, expected.count)
            return all(mesh.gather(equal and reader.values == {"at": step}))

        seen: dict[str, Any] = {}
        state, snapshots = opened("a", "a", "b")
        take(state, snapshots, 1, 2, 3)
        seen["held"] = {node: held_shards(folder / node) for node in "ab"}
        lose("b")
        state, snapshots = opened("a", "a", "c")
        seen["steps after b"] = snapshots.steps()
        seen["restored after b"] = is_restored(state, snapshots, 3)
        take(state, snapshots, 4, 5)
        seen["held on c"] = held_shards(folder / "c")
        lose("a")  # where two ranks were
        state, snapshots = opened("c", "d", "e")
        seen["restored after a"] = is_restored(state, snapshots, 4)
        snapshots.forget_after(4)
        seen["steps after a"] = snapshots.steps()
        take(state, snapshots, 5)
        mesh.barrier()
        seen["shards of c"] = sorted(each.name for each in (folder / "c" / "step-00000005").glob("*.safetensors"))
        for node in "cde":
            lose(node)
        _, snapshots = opened("c", "d", "e")
        seen["steps after all"] = snapshots.steps()
        with pytest.raises(CheckpointError, match="does not hold the whole state after step 5"):
            snapshots.read(5)
        return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("nodes")
    found: dict[str, Any] = launch(rank, (folder / "memory",), ranks=3, restarts=0, stop_file=folder / "stop")
    return found


def test_each_node_holds_its_shards_and_those_of_another(seen: dict[str, Any]) -> None:
    assert seen["held"] == {"a": {2: (0, 1, 2), 3: (0, 1, 2)}, "b": {2: (0, 1, 2), 3: (0, 1, 2)}}


def test_ranks_of_a_lost_node_get_their_shards_from_the_copies(seen: dict[str, Any]) -> None:
    assert seen["steps after b"] == (2, 3)
    assert seen["restored after b"]
    assert seen["held on c"][5] == (0, 1, 2)


def test_two_ranks_of_a_node_too_also_after_a_node_was_lost_before(seen: dict[str, Any]) -> None:
    assert seen["restored after a"]
    assert seen["steps after a"] == (4,)


def test_shards_of_ranks_that_moved_away_take_no_memory(seen: dict[str, Any]) -> None:
    # Its own, and that of which it keeps a copy.
    assert seen["shards of c"] == ["extras.safetensors", "rank-00000.safetensors", "rank-00002.safetensors"]


def test_without_any_node_there_is_none(seen: dict[str, Any]) -> None:
    assert seen["steps after all"] == ()
