# SPDX-License-Identifier: Apache-2.0
"""Which node every bundle goes to, and the explanation when there is none."""

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.cluster.layout import Pool, Resources
from podium.cluster.placement import Bundle, Busy, Fits, NodeState, TooLarge, bundles_of, message, preflight
from podium.errors import PlacementError


class Role:
    """Stands for any."""


def node(name, free=None, **total):
    return NodeState(id=name, name=name, total=total, free=total if free is None else free)


def gpus(slots, each=1.0, **kind):
    return Pool(name=kind.pop("name", "policy"), slots=slots, each=Resources(cpus=0, gpus=each), **kind)


def cpus(slots, each=1.0, **kind):
    return Pool(name=kind.pop("name", "gen"), slots=slots, each=Resources(cpus=each), **kind)


def placed(outcome):
    """The node of every bundle."""
    assert isinstance(outcome, Fits), outcome
    return tuple(each.id for each in outcome.nodes)


def numbers(text):
    """Those in it, in order."""
    return [int(each) for each in re.findall(r"\d+", text)]


TWO_BY_FOUR = (node("node-a", GPU=4.0, CPU=32.0), node("node-b", GPU=4.0, CPU=32.0))


def test_neighbours_that_must_share_a_node_are_one_bundle():
    (four,) = bundles_of(gpus(4, one_node=True))
    assert (four.slots, four.needs, str(four)) == ((0, 1, 2, 3), {"GPU": 4.0}, "policy[0, 1, 2, 3] (4 GPU)")
    assert [bundle.slots for bundle in bundles_of(gpus(3))] == [(0,), (1,), (2,)]


def test_groups_of_neighbours_are_bundles_and_each_is_on_one_node():
    bundles = bundles_of(gpus(6, together=2))
    assert [(bundle.slots, bundle.needs) for bundle in bundles] == [
        ((0, 1), {"GPU": 2.0}), ((2, 3), {"GPU": 2.0}), ((4, 5), {"GPU": 2.0}),
    ]  # fmt: skip
    three_each = (node("node-a", GPU=3.0, CPU=32.0), node("node-b", GPU=3.0, CPU=32.0), node("node-c", GPU=2.0))
    assert sorted(placed(preflight(bundles, three_each))) == ["node-a", "node-b", "node-c"]


def test_groups_that_no_two_nodes_can_share_are_refused_with_how_many_fit():
    three_each = (node("node-a", GPU=3.0, CPU=32.0), node("node-b", GPU=3.0, CPU=32.0))
    outcome = preflight(bundles_of(gpus(6, together=2)), three_each)
    assert isinstance(outcome, TooLarge)
    request, *_, advice = outcome.reason.splitlines()
    assert re.search(r"\bpolicy\b.*3 × 2 slots on one node, each 2 GPU", request)
    assert numbers(advice) == [3, 4, 4]  # a third GPU of a node is of no use
    wide = preflight(bundles_of(gpus(8, together=4)), three_each)
    assert isinstance(wide, TooLarge)
    assert "Make what shares a node 3 or smaller" in wide.reason


def test_groups_divide_the_slots_of_a_pool():
    with pytest.raises(PlacementError, match="policy has 6 slots, and groups of 4"):
        gpus(6, together=4)


def test_eight_on_one_node_are_refused_where_the_nodes_have_four():
    outcome = preflight(bundles_of(gpus(8, one_node=True)), TWO_BY_FOUR)
    assert isinstance(outcome, TooLarge)
    request, first, second, advice = outcome.reason.splitlines()
    assert re.search(r"\bpolicy\b.*1 × 8 .*8 GPU", request)
    assert re.search(r"node-a: .*4 GPU.*4 GPU", first)
    assert re.search(r"node-b: .*4 GPU.*4 GPU", second)
    assert numbers(advice) == [4, 8, 4]  # on one node, in the cluster, and as many to ask for


def test_too_many_slots_are_refused_with_how_many_would_fit():
    outcome = preflight(bundles_of(gpus(12)), TWO_BY_FOUR)
    assert isinstance(outcome, TooLarge)
    request, *_, advice = outcome.reason.splitlines()
    assert re.search(r"\bpolicy\b.*12 × 1 .*1 GPU", request)
    assert numbers(advice) == [4, 8, 8]


def test_what_others_hold_now_is_busy_and_what_nobody_could_give_is_too_large():
    held = (node("node-a", free={"GPU": 1.0}, GPU=4.0), node("node-b", free={}, GPU=4.0))
    busy = preflight(bundles_of(gpus(2)), held)
    assert isinstance(busy, Busy)
    request, first, second, advice = busy.reason.splitlines()
    assert re.search(r"\bpolicy\b.*2 × 1 .*1 GPU", request)
    assert re.search(r"node-a: .*4 GPU.*1 GPU", first)
    assert re.search(r"node-b: .*4 GPU.*0 GPU", second)
    assert numbers(advice) == [1, 1, 1]
    assert isinstance(preflight(bundles_of(gpus(9)), held), TooLarge)
    assert placed(preflight(bundles_of(gpus(1)), held)) == ("node-a",)


def test_everything_held_by_others_is_not_called_missing():
    held = (node("node-a", free={}, GPU=4.0),)
    outcome = preflight(bundles_of(gpus(2)), held)
    assert isinstance(outcome, Busy)
    assert "GPU" not in outcome.reason.splitlines()[-1]


def test_a_resource_that_no_node_has_is_named():
    outcome = preflight(bundles_of(gpus(1)), (node("node-a", CPU=8.0),))
    assert isinstance(outcome, TooLarge)
    _, first, advice = outcome.reason.splitlines()
    assert re.search(r"node-a: .*0 GPU.*0 GPU", first)
    assert "GPU" in advice


def test_a_cluster_without_nodes_is_said_to_have_none():
    outcome = preflight(bundles_of(cpus(1)), ())
    assert isinstance(outcome, TooLarge)
    assert "no node" in outcome.reason.splitlines()[1]


def test_messages_of_outcomes_are_their_reasons():
    assert message(Fits(nodes=())) == "everything fits"
    assert message(Busy(reason="later")) == "later"
    assert message(TooLarge(reason="never")) == "never"


def test_two_halves_share_one_device():
    assert placed(preflight(bundles_of(gpus(2, each=0.5)), (node("node-a", GPU=1.0),))) == ("node-a",) * 2
    assert isinstance(preflight(bundles_of(gpus(3, each=0.5)), (node("node-a", GPU=1.0),)), TooLarge)


def test_ten_tenths_are_a_whole_in_spite_of_rounding():
    assert placed(preflight(bundles_of(gpus(10, each=0.1)), (node("node-a", GPU=1.0),))) == ("node-a",) * 10
    assert placed(preflight(bundles_of(gpus(3, each=1 / 3)), (node("node-a", GPU=1.0),))) == ("node-a",) * 3


def test_a_device_is_shared_in_equal_parts_only():
    with pytest.raises(PlacementError, match=r"0\.6 gpus.*0\.5, 0\.3333"):
        Resources(gpus=0.6)
    assert placed(preflight(bundles_of(gpus(4, each=0.5)), (node("node-a", GPU=2.0),))) == ("node-a",) * 4
    assert isinstance(preflight(bundles_of(gpus(5, each=0.5)), (node("node-a", GPU=2.0),)), TooLarge)


def test_parts_of_devices_that_stay_together_ask_for_whole_devices():
    assert Resources(cpus=0, gpus=0.5).times(3) == {"GPU": 2}
    assert Resources(cpus=0, gpus=0.3333).times(3) == {"GPU": 0.9999}
    assert Resources(cpus=0, gpus=0.25).times(8) == {"GPU": 2}


def test_a_cpu_only_cluster_holds_a_cpu_only_pool():
    nodes = (node("laptop", CPU=8.0, memory=1e9),)
    assert placed(preflight(bundles_of(cpus(4, each=2.0)), nodes)) == ("laptop",) * 4
    assert isinstance(preflight(bundles_of(cpus(5, each=2.0)), nodes), TooLarge)


def test_custom_resources_decide_where_a_pool_goes():
    pool = Pool(name="score", slots=2, each=Resources(cpus=1, custom={"fast_disk": 1}))
    nodes = (node("node-a", CPU=8.0), node("node-b", CPU=8.0, fast_disk=2.0))
    assert placed(preflight(bundles_of(pool), nodes)) == ("node-b", "node-b")


def test_packed_slots_stay_on_the_node_that_their_pool_uses_already():
    nodes = (node("node-a", CPU=2.0), node("node-b", CPU=2.0))
    assert placed(preflight(bundles_of(cpus(2)), nodes)) == ("node-a", "node-a")
    assert placed(preflight(bundles_of(cpus(4)), nodes)) == ("node-a", "node-a", "node-b", "node-b")


def test_a_pool_that_one_node_can_hold_is_not_split_over_two():
    nodes = (node("small", GPU=2.0), node("large", GPU=8.0))
    assert placed(preflight(bundles_of(gpus(8)), nodes)) == ("large",) * 8
    # A smaller one leaves the large node to others.
    assert placed(preflight(bundles_of(gpus(2)), nodes)) == ("small",) * 2


def test_spread_slots_go_to_as_many_nodes_as_there_are():
    nodes = (node("node-a", CPU=4.0), node("node-b", CPU=4.0), node("node-c", CPU=1.0))
    outcome = preflight(bundles_of(cpus(4, spread=True)), nodes)
    assert isinstance(outcome, Fits)
    assert Counter(placed(outcome)) in (
        {"node-a": 2, "node-b": 1, "node-c": 1},
        {"node-a": 1, "node-b": 2, "node-c": 1},
    )


def test_neighbouring_ranks_share_a_node_also_when_spread():
    nodes = (node("node-a", CPU=4.0), node("node-b", CPU=4.0))
    assert placed(preflight(bundles_of(cpus(4, spread=True)), nodes)) == ("node-a", "node-a", "node-b", "node-b")


def test_several_pools_are_placed_together_the_largest_first():
    small, large = bundles_of(cpus(2, name="gen")), bundles_of(cpus(2, name="learn", one_node=True))
    nodes = (node("node-a", CPU=2.0), node("node-b", CPU=2.0))
    assert placed(preflight([*small, *large], nodes)) == ("node-b", "node-b", "node-a")


def test_a_pool_that_does_not_fit_beside_the_others_says_so():
    nodes = (node("node-a", CPU=2.0),)
    outcome = preflight([*bundles_of(cpus(2, name="learn")), *bundles_of(cpus(1, name="gen"))], nodes)
    assert isinstance(outcome, TooLarge)
    assert re.match(r".*\bgen\b.*1 × 1 .*1 CPU.*\blearn\b", outcome.reason)


def test_a_pool_that_can_go_anywhere_leaves_the_rare_node_to_the_pool_that_needs_it():
    plain = bundles_of(cpus(1, each=2.0, name="gen"))
    rare = bundles_of(Pool(name="score", slots=1, each=Resources(cpus=1, custom={"fast_disk": 1})))
    nodes = (node("rare", CPU=2.0, fast_disk=1.0), node("plain", CPU=2.0))
    assert placed(preflight([*plain, *rare], nodes)) == ("plain", "rare")


def test_a_pool_beside_another_is_kept_on_one_node_too():
    environments, policy = cpus(4, name="env"), Pool(name="policy", slots=2, each=Resources(cpus=1, gpus=1))
    nodes = (node("node-a", CPU=4.0, GPU=2.0), node("node-b", CPU=4.0))
    outcome = preflight([*bundles_of(environments), *bundles_of(policy)], nodes)
    assert placed(outcome) == ("node-b",) * 4 + ("node-a",) * 2


AMOUNT = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])
NODE = st.fixed_dictionaries({"CPU": AMOUNT, "GPU": AMOUNT, "disk": st.sampled_from([0.0, 1.0])})


@st.composite
def nodes_with_room(draw):
    found = []
    for number, total in enumerate(draw(st.lists(NODE, min_size=1, max_size=3))):
        used = {name: draw(st.sampled_from([0.0, amount / 2, amount])) for name, amount in total.items()}
        free = {name: total[name] - used[name] for name in total}
        found.append(NodeState(id=f"id-{number}", name=f"node-{number}", total=total, free=free))
    return found


@st.composite
def requested(draw):
    """Bundles of up to three pools, those of one pool alike."""
    found = []
    for number in range(draw(st.integers(1, 3))):
        needs = draw(NODE.map(lambda amounts: {name: amount for name, amount in amounts.items() if amount}))
        width, spread = draw(st.integers(1, 2)), draw(st.booleans())
        for first in range(draw(st.integers(1, 3))):
            slots = tuple(range(first * width, (first + 1) * width))
            found.append(Bundle(pool=f"pool-{number}", slots=slots, needs=needs or {"CPU": 1.0}, spread=spread))
    return draw(st.permutations(found)) if draw(st.booleans()) else found


def holds(bundles, nodes, chosen, amounts):
    room = {each.id: dict(amounts(each)) for each in nodes}
    for bundle, where in zip(bundles, chosen, strict=True):
        for name, amount in bundle.needs.items():
            room[where][name] = room[where].get(name, 0.0) - amount
    return all(left >= -1e-9 for free in room.values() for left in free.values())


def can_be_held(bundles, nodes, amounts):
    """Every way to deal the bundles out."""
    ids = [each.id for each in nodes]
    return any(holds(bundles, nodes, chosen, amounts) for chosen in itertools.product(ids, repeat=len(bundles)))


@settings(deadline=None)
@given(requested(), nodes_with_room())
def test_what_fits_has_one_node_for_every_bundle_and_respects_what_each_node_has_free(bundles, nodes):
    outcome = preflight(bundles, nodes)
    if isinstance(outcome, Fits):
        assert len(outcome.nodes) == len(bundles)
        assert holds(bundles, nodes, placed(outcome), lambda each: each.free)
    else:
        assert outcome.reason


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(requested().filter(lambda bundles: len(bundles) <= 6), nodes_with_room())
def test_what_any_search_can_place_is_placed_and_busy_is_what_an_empty_cluster_could_hold(bundles, nodes):
    outcome = preflight(bundles, nodes)
    if can_be_held(bundles, nodes, lambda each: each.free):
        assert isinstance(outcome, Fits)
    elif can_be_held(bundles, nodes, lambda each: each.total):
        assert isinstance(outcome, Busy)
    else:
        assert isinstance(outcome, TooLarge)


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans())
def test_equal_slots_are_refused_only_where_there_are_too_few(slots, rooms, spread):
    nodes = [node(f"node-{number}", CPU=float(room)) for number, room in enumerate(rooms)]
    outcome = preflight(bundles_of(cpus(slots, spread=spread)), nodes)
    assert isinstance(outcome, Fits) == (slots <= sum(rooms))
    if isinstance(outcome, Fits):
        # Neighbours share nodes as often as can be: each node's slots are one stretch.
        assert len(list(itertools.groupby(placed(outcome)))) == len(set(placed(outcome)))


@settings(deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_packed_equal_slots_use_as_few_nodes_as_can_be(slots, rooms):
    nodes = [node(f"node-{number}", CPU=float(room)) for number, room in enumerate(rooms)]
    outcome = preflight(bundles_of(cpus(slots)), nodes)
    if isinstance(outcome, Fits):
        fewest = next(count for count in range(1, 5) if sum(sorted(rooms, reverse=True)[:count]) >= slots)
        assert len(set(placed(outcome))) == fewest


@settings(deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_spread_equal_slots_use_as_many_nodes_as_can_be(slots, rooms):
    nodes = [node(f"node-{number}", CPU=float(room)) for number, room in enumerate(rooms)]
    outcome = preflight(bundles_of(cpus(slots, spread=True)), nodes)
    if isinstance(outcome, Fits):
        assert len(set(placed(outcome))) == min(slots, len(rooms))
