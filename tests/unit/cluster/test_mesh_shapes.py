# SPDX-License-Identifier: Apache-2.0
"""Ranks of a mesh, and the registry of who sits where now."""

import dataclasses
import re

import pytest

from podium.cluster.identity import WorkerId
from podium.cluster.meshes import AXES, MeshRegistry, MeshShape, RoleMesh
from podium.errors import PlacementError


def worker(slot, incarnation=0, pool="learn"):
    return WorkerId(pool, slot, "node-a", "cpu", incarnation)


TWO_BY_TWO = RoleMesh(role="learner", pool="learn", shape=MeshShape(replica=2, shard=2), slots=(4, 5, 0, 1))
SCORER = RoleMesh(role="scorer", pool="learn", shape=MeshShape(), slots=(4,))
REGISTRY = MeshRegistry(
    meshes={"learner": TWO_BY_TWO, "scorer": SCORER},
    workers={("learn", slot): worker(slot) for slot in (0, 1, 4, 5)},
)


def test_a_shape_has_a_rank_for_every_shard_of_every_replica():
    assert MeshShape(replica=2, shard=3).world == 6


def test_a_shape_prints_only_the_axes_that_are_longer_than_one():
    assert str(MeshShape(replica=2, shard=4)) == "replica 2 × shard 4"
    assert str(MeshShape(shard=4)) == "shard 4"
    assert str(MeshShape()) == "1 worker"


def test_neighbours_may_get_the_same_data():
    shape = MeshShape(shard=6, same_data=2)
    assert (shape.world, shape.data_ranks, str(shape)) == (6, 3, "shard 6 (2 on the same data)")


@pytest.mark.parametrize("same_data", [0, 4])
def test_those_on_the_same_data_divide_the_mesh(same_data):
    with pytest.raises(PlacementError, match=f"mesh of 6 workers .* {same_data} of them"):
        MeshShape(shard=6, same_data=same_data)


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_of_no_length_is_refused(axis):
    with pytest.raises(PlacementError, match=f"{axis} 0"):
        MeshShape(**{axis: 0})


@pytest.mark.parametrize("slots", [(0, 1, 2), (0, 1, 2, 3, 4), (0, 1, 2, 2)])
def test_a_role_needs_as_many_different_slots_as_its_mesh_has_workers(slots):
    with pytest.raises(PlacementError) as refused:
        RoleMesh(role="learner", pool="learn", shape=MeshShape(replica=2, shard=2), slots=slots)
    given = re.escape(str(list(slots)))
    assert re.search(rf"role learner .*replica 2 × shard 2 = 4 .*{given}.*pool learn\b", str(refused.value))


def test_the_slots_of_a_mesh_are_taken_in_rank_order():
    assert [TWO_BY_TWO.rank_of(slot) for slot in (4, 5, 0, 1)] == [0, 1, 2, 3]


def test_the_registry_says_who_plays_a_role_in_rank_order():
    assert REGISTRY.workers_of("learner") == (worker(4), worker(5), worker(0), worker(1))


def test_who_has_taken_a_slot_is_current_and_who_sat_there_before_is_not():
    reborn = dataclasses.replace(worker(5), node="node-b", incarnation=1)
    after = REGISTRY.with_workers([reborn])
    assert after.is_current(reborn)
    assert not after.is_current(worker(5))
    assert after.is_current(worker(4))
    assert after.worker("learn", 5) == reborn
    assert after.workers_of("learner") == (worker(4), reborn, worker(0), worker(1))
    # A registry is a value: the old one still tells how it was.
    assert REGISTRY.is_current(worker(5))
    assert not REGISTRY.is_current(reborn)


def test_nobody_is_current_in_a_slot_that_was_never_taken():
    assert not REGISTRY.is_current(worker(2))


def test_a_role_that_is_not_in_the_layout_is_named_with_those_that_are():
    with pytest.raises(PlacementError, match=r"'critic'.* learner, scorer"):
        REGISTRY.mesh("critic")
    with pytest.raises(PlacementError, match=r"'critic'.* none\b"):
        MeshRegistry(meshes={}, workers={}).mesh("critic")
