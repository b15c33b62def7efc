# SPDX-License-Identifier: Apache-2.0
"""One declaration for colocated, split and mixed layouts, and everything that is refused before anything starts."""

import math
import re

import pytest

from podium.cluster.layout import Layout, Pool, Resources, RoleSpec, public_methods
from podium.cluster.meshes import MeshShape
from podium.errors import PlacementError


class Role:
    def act(self):
        """A method to call."""

    def _hidden(self):
        """Not to call."""


class Heir(Role):
    number = 3

    def more(self):
        """Its own."""


def role(name, pool="all", slots=None, **mesh):
    return RoleSpec(name=name, kind=Role, pool=pool, mesh=MeshShape(**mesh), slots=slots)


def refusal(pools, roles):
    with pytest.raises(PlacementError) as refused:
        Layout(pools=tuple(pools), roles=tuple(roles))
    return str(refused.value)


def slots_of(layout, pool):
    return {mesh.role: mesh.slots for mesh in layout.meshes_of(pool)}


def test_roles_on_the_same_slots_of_a_pool_are_colocated():
    layout = Layout(pools=(Pool(name="all", slots=4),), roles=(role("learner", shard=4), role("generator", replica=4)))
    assert slots_of(layout, "all") == {"learner": (0, 1, 2, 3), "generator": (0, 1, 2, 3)}


def test_roles_in_two_pools_are_split():
    layout = Layout(
        pools=(Pool(name="learn", slots=2), Pool(name="gen", slots=3, collectives=False)),
        roles=(role("learner", "learn", shard=2), role("generator", "gen", replica=3)),
    )
    assert slots_of(layout, "learn") == {"learner": (0, 1)}
    assert slots_of(layout, "gen") == {"generator": (0, 1, 2)}


def test_roles_on_overlapping_slots_are_mixed():
    layout = Layout(
        pools=(Pool(name="all", slots=4),),
        roles=(role("learner", slots=(0, 1, 2), shard=3), role("generator", slots=(2, 3), replica=2)),
    )
    assert slots_of(layout, "all") == {"learner": (0, 1, 2), "generator": (2, 3)}


def test_a_slots_needs_are_counted_in_rays_names_and_grain():
    assert Resources().times(3) == {"CPU": 3.0}
    assert Resources(cpus=0, gpus=0.5).times(2) == {"GPU": 1.0}
    assert Resources(cpus=2, gpus=1, custom={"fast_disk": 0.25}).times(4) == {"CPU": 8, "GPU": 4, "fast_disk": 1.0}
    assert Resources(cpus=0.1).times(3) == {"CPU": 0.3}


@pytest.mark.parametrize(
    ("requested", "text"),
    [
        ({"cpus": -1}, "a slot asks for -1 cpus; it must be 0, or 0.0001 or more."),
        ({"gpus": math.nan}, "a slot asks for nan gpus; it must be 0, or 0.0001 or more."),
        ({"custom": {"disk": math.inf}}, "a slot asks for inf disk; it must be 0, or 0.0001 or more."),
        ({"gpus": 1.5}, "a slot asks for 1.5 gpus; above 1 only whole devices can be given."),
        ({"cpus": 0}, "a slot asks for nothing. Give it cpus, gpus or a custom resource."),
    ],
)
def test_what_no_slot_can_have_is_refused(requested, text):
    with pytest.raises(PlacementError) as refused:
        Resources(**requested)
    assert str(refused.value) == text


@pytest.mark.parametrize("name", ["CPU", "GPU"])
def test_a_custom_resource_with_the_name_of_one_of_rays_own_is_refused(name):
    with pytest.raises(PlacementError, match=name):
        Resources(custom={name: 1})


def test_an_amount_below_rays_grain_is_refused():
    # Ray counts in ten-thousandths: rounded, this is nothing at all.
    with pytest.raises(PlacementError, match="cpus"):
        Resources(cpus=0.00001, gpus=1)


def test_a_pool_without_slots_is_refused():
    with pytest.raises(PlacementError, match=r"\bgen\b.* 0 slots"):
        Pool(name="gen", slots=0)


def test_two_pools_or_two_roles_of_one_name_are_refused():
    twice = [Pool(name="all", slots=1), Pool(name="all", slots=1)]
    assert re.search(r"two pools .*'all'", refusal(twice, [role("a")]))
    assert re.search(r"two roles .*'a'", refusal([Pool(name="all", slots=1)], [role("a"), role("a")]))


def test_a_role_on_a_pool_that_is_not_there_is_refused():
    pools = [Pool(name="learn", slots=1), Pool(name="gen", slots=1)]
    assert re.search(r"role a .*'lern'.* learn, gen", refusal(pools, [role("a", "lern")]))


def test_a_role_that_is_larger_than_its_pool_is_refused():
    text = refusal([Pool(name="all", slots=3)], [role("a", replica=2, shard=2)])
    assert re.search(r"role a .*replica 2 × shard 2 = 4 .*\[0, 1, 2, 3\].*pool all .*3: \[3\].* 4\b", text)


def test_slots_that_the_pool_has_not_are_refused():
    text = refusal([Pool(name="all", slots=2)], [role("a", replica=2, slots=(1, -1))])
    assert re.search(r"role a .*\[1, -1\].*pool all .*2: \[-1\]", text)


def test_slots_that_are_too_few_for_the_mesh_are_refused():
    text = refusal([Pool(name="all", slots=2)], [role("a", replica=2, slots=(0,))])
    assert re.search(r"role a .*replica 2 = 2 .*\[0\].*pool all", text)


def test_slots_without_a_role_are_refused():
    text = refusal([Pool(name="all", slots=4)], [role("a", replica=2, slots=(0, 2))])
    assert "pool all" in text
    assert "[1, 3]" in text


def test_a_pool_without_any_role_is_refused():
    text = refusal([Pool(name="all", slots=1), Pool(name="gen", slots=1)], [role("a")])
    assert "pool gen" in text
    assert "[0]" in text


def test_what_may_be_called_on_a_role_is_its_public_methods_and_those_it_inherits():
    assert public_methods(Heir) == {"act": Role.act, "more": Heir.more}
