# SPDX-License-Identifier: Apache-2.0
"""Ranks and coordinates, data ranks and their sources, and the registry of who sits where now."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.cluster.identity import Coordinates, WorkerId
from podium.cluster.meshes import AXES, MeshRegistry, MeshShape, RoleMesh
from podium.errors import PlacementError

SIZE = st.integers(1, 4)
SHAPES = st.builds(MeshShape, replica=SIZE, shard=SIZE, context=SIZE, tensor=SIZE)


@st.composite
def meshes(draw):
    shape = draw(SHAPES)
    slots = draw(st.permutations(range(shape.world + 3)))[: shape.world]
    return RoleMesh(role="learner", pool="learn", shape=shape, slots=tuple(slots))


def by_coordinates(mesh):
    """Slot -> coordinates, counted by hand: replica slowest, tensor fastest."""
    counted = itertools.product(*(range(mesh.shape.size(axis)) for axis in AXES))
    return {slot: Coordinates(*at) for slot, at in zip(mesh.slots, counted, strict=True)}


def worker(slot, incarnation=0, pool="learn"):
    return WorkerId(pool, slot, "node-a", "cpu", incarnation)


TWO_BY_TWO = RoleMesh(role="learner", pool="learn", shape=MeshShape(shard=2, tensor=2), slots=(4, 5, 0, 1))
SCORER = RoleMesh(role="scorer", pool="learn", shape=MeshShape(), slots=(4,))
REGISTRY = MeshRegistry(
    meshes={"learner": TWO_BY_TWO, "scorer": SCORER},
    workers={("learn", slot): worker(slot) for slot in (0, 1, 4, 5)},
)


def test_tensor_counts_fastest_then_context_then_shard_then_replica():
    shape = MeshShape(replica=2, shard=3, context=2, tensor=4)
    assert shape.world == 48
    assert shape.num_data_ranks == 6
    assert shape.per_data_rank == 8
    assert shape.coordinates(0) == Coordinates(0, 0, 0, 0)
    assert shape.coordinates(3) == Coordinates(0, 0, 0, 3)
    assert shape.coordinates(4) == Coordinates(0, 0, 1, 0)
    assert shape.coordinates(8) == Coordinates(0, 1, 0, 0)
    assert shape.coordinates(24) == Coordinates(1, 0, 0, 0)
    # 24 + 2·8 + 1·4 + 3
    assert shape.rank(Coordinates(replica=1, shard=2, context=1, tensor=3)) == 47
    assert shape.coordinates(47) == Coordinates(1, 2, 1, 3)


@settings(deadline=None)
@given(SHAPES)
def test_every_rank_has_its_own_coordinates_and_they_lead_back(shape):
    found = [shape.coordinates(rank) for rank in range(shape.world)]
    assert [shape.rank(at) for at in found] == list(range(shape.world))
    assert found == sorted(set(found))
    assert all(0 <= place < shape.size(axis) for at in found for place, axis in zip(at, AXES, strict=True))


def test_a_shape_prints_only_the_axes_that_are_longer_than_one():
    assert str(MeshShape(replica=2, tensor=4)) == "replica 2 × tensor 4"
    assert str(MeshShape()) == "1 worker"


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_of_no_length_is_refused(axis):
    with pytest.raises(PlacementError, match=f"a mesh has {axis} 0; every axis has at least 1"):
        MeshShape(**{axis: 0})


@pytest.mark.parametrize("slots", [(0, 1, 2), (0, 1, 2, 3, 4), (0, 1, 2, 2)])
def test_a_role_needs_as_many_different_slots_as_its_mesh_has_workers(slots):
    with pytest.raises(PlacementError) as refused:
        RoleMesh(role="learner", pool="learn", shape=MeshShape(shard=2, tensor=2), slots=slots)
    assert str(refused.value) == (
        f"role learner asks for shard 2 × tensor 2 = 4 workers and is given the slots {list(slots)} of pool learn. "
        "Give it 4 different slots, or another mesh."
    )


def test_the_slots_of_a_mesh_are_taken_in_rank_order():
    assert [TWO_BY_TWO.rank_of(slot) for slot in (4, 5, 0, 1)] == [0, 1, 2, 3]
    assert TWO_BY_TWO.coordinates(0) == Coordinates(0, 1, 0, 0)
    assert TWO_BY_TWO.coordinates(5) == Coordinates(0, 0, 0, 1)
    assert [TWO_BY_TWO.data_rank(slot) for slot in (4, 5, 0, 1)] == [0, 0, 1, 1]
    assert TWO_BY_TWO.members(0) == (4, 5)
    assert TWO_BY_TWO.members(1) == (0, 1)
    assert TWO_BY_TWO.sources == (4, 0)
    assert [slot for slot in TWO_BY_TWO.slots if TWO_BY_TWO.is_source(slot)] == [4, 0]


def test_axis_groups_are_the_rows_and_columns_of_the_mesh():
    assert TWO_BY_TWO.axis_groups("tensor") == [(4, 5), (0, 1)]
    assert TWO_BY_TWO.axis_groups("shard") == [(4, 0), (5, 1)]
    assert TWO_BY_TWO.axis_groups("replica") == [(4,), (5,), (0,), (1,)]


@settings(deadline=None)
@given(meshes())
def test_a_data_rank_is_everyone_with_its_replica_and_shard_and_its_source_is_context_0_tensor_0(mesh):
    at = by_coordinates(mesh)
    pairs = list(itertools.product(range(mesh.shape.replica), range(mesh.shape.shard)))
    assert len(mesh.sources) == mesh.shape.num_data_ranks
    for data_rank, pair in enumerate(pairs):
        belong = {slot for slot, place in at.items() if (place.replica, place.shard) == pair}
        assert set(mesh.members(data_rank)) == belong
        assert {slot for slot in mesh.slots if mesh.data_rank(slot) == data_rank} == belong
        source = next(slot for slot in belong if (at[slot].context, at[slot].tensor) == (0, 0))
        assert mesh.members(data_rank)[0] == mesh.sources[data_rank] == source
        assert [slot for slot in belong if mesh.is_source(slot)] == [source]


@settings(deadline=None)
@given(meshes(), st.sampled_from(AXES))
def test_an_axis_group_is_all_who_differ_along_that_axis_only(mesh, axis):
    at = by_coordinates(mesh)
    groups = mesh.axis_groups(axis)
    assert sorted(slot for group in groups for slot in group) == sorted(mesh.slots)
    for group in groups:
        assert [getattr(at[slot], axis) for slot in group] == list(range(mesh.shape.size(axis)))
        assert len({at[slot]._replace(**{axis: 0}) for slot in group}) == 1


def test_the_registry_says_who_plays_a_role_in_rank_order():
    assert REGISTRY.workers_of("learner") == (worker(4), worker(5), worker(0), worker(1))
    assert REGISTRY.sources_of("learner") == (worker(4), worker(0))
    assert REGISTRY.members_of("learner", 1) == (worker(0), worker(1))
    assert REGISTRY.coordinates_of("learner", worker(5)) == Coordinates(0, 0, 0, 1)
    assert REGISTRY.roles_of(worker(4)) == ("learner", "scorer")
    assert REGISTRY.roles_of(worker(0)) == ("learner",)
    assert REGISTRY.roles_of(worker(4, pool="other")) == ()


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


def test_the_registry_describes_every_role_and_who_answers_for_it():
    assert REGISTRY.describe() == (
        "learner: shard 2 × tensor 2 on learn\n"
        "  learn[4]@node-a/cpu#0: replica 0, shard 0, context 0, tensor 0, answers with rows\n"
        "  learn[5]@node-a/cpu#0: replica 0, shard 0, context 0, tensor 1\n"
        "  learn[0]@node-a/cpu#0: replica 0, shard 1, context 0, tensor 0, answers with rows\n"
        "  learn[1]@node-a/cpu#0: replica 0, shard 1, context 0, tensor 1\n"
        "scorer: 1 worker on learn\n"
        "  learn[4]@node-a/cpu#0: replica 0, shard 0, context 0, tensor 0, answers with rows"
    )


def test_a_role_that_is_not_in_the_layout_is_named_with_those_that_are():
    with pytest.raises(PlacementError, match="there is no role 'critic' in this layout; it has learner, scorer"):
        REGISTRY.mesh("critic")
    with pytest.raises(PlacementError, match="it has none"):
        MeshRegistry(meshes={}, workers={}).mesh("critic")
