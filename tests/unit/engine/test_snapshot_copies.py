# SPDX-License-Identifier: Apache-2.0
"""On which nodes the shards of all ranks are."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from podium.engine.checkpoint_files import Extras, complete, write_json
from podium.engine.snapshot_copies import SHARD_BYTES, RankNodes, held_shards, whole_steps


def test_ranks_of_one_node_need_no_copies() -> None:
    nodes = RankNodes(("a", "a", "a"))
    assert [nodes.keeper_of(rank) for rank in range(3)] == [None] * 3
    assert nodes.held_by_node_of(1) == (0, 1, 2)


def test_the_next_node_keeps_copies_and_its_ranks_share_them() -> None:
    nodes = RankNodes(("a", "a", "a", "b", "b"))
    assert [nodes.keeper_of(rank) for rank in range(5)] == [3, 4, 3, 0, 1]
    assert nodes.kept_by(3) == (0, 2)
    assert nodes.on_node_of(4) == (3, 4)


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "a", "b"), ("a", "a", "b", "c"), ("c", "b", "b", "b", "a")])
def test_any_one_node_can_be_lost(names: tuple[str, ...]) -> None:
    nodes = RankNodes(names)
    for lost in set(names):
        left = [set(nodes.held_by_node_of(rank)) for rank, node in enumerate(names) if node != lost]
        assert set().union(*left) == set(range(len(names))), lost
    for rank, other in product(range(len(names)), repeat=2):
        assert (other in nodes.kept_by(rank)) == (nodes.keeper_of(other) == rank)


def test_a_step_is_whole_where_somebody_has_the_shard_of_every_rank() -> None:
    first, second = {4: (0, 1), 5: (0, 1), 6: (0,)}, {4: (2,), 5: (1, 2), 6: (1,)}
    assert whole_steps([first, first, second]) == (4, 5)
    assert whole_steps([second, second, second]) == ()


def test_a_folder_holds_what_has_an_index_and_a_record(tmp_path: Path) -> None:
    for step in (3, 4):
        partial = tmp_path / f".partial-{step}"
        partial.mkdir()
        write_json(partial / "rank-00001.json", {"pieces": {}, "files": {}, SHARD_BYTES: 5})
        (partial / "rank-00001.safetensors").write_bytes(b"shard")
        complete(tmp_path, partial, step, Extras(values={}, arrays={}), ranks=2)
    (tmp_path / "step-00000003" / "rank-00000.safetensors").touch()  # it is not complete
    (tmp_path / "step-00000004" / "checkpoint.json").unlink()
    assert held_shards(tmp_path) == {3: (1,)}
    assert held_shards(tmp_path / "nothing") == {}
