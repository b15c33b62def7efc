# SPDX-License-Identifier: Apache-2.0
"""Which role is on its device in which phase, and which roles leave a device that they share."""

from __future__ import annotations

import pytest

from podium.controller.phases import Phase, residency, who_leaves

ALL = ("policy", "generator", "critic", "reference", "teacher-0", "teacher-1", "reward-0", "reward-12")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("phase", "at_work"),
    [
        ("rollout", {"generator"}),
        ("grade", {"reward-0", "reward-12"}),
        ("score", {"reference", "teacher-0", "teacher-1", "critic"}),
        ("update", {"policy", "critic"}),
    ],
)
def test_who_works_is_active_and_others_stay_or_leave(phase: Phase, at_work: set[str]) -> None:
    staying = residency(phase, ALL, frozenset())
    leaving = residency(phase, ALL, frozenset(ALL))

    assert staying == {role: "active" if role in at_work else "resident" for role in ALL}
    assert leaving == {role: "active" if role in at_work else "offloaded" for role in ALL}


def test_only_those_who_leave_are_sent_away() -> None:
    assert residency("update", ("policy", "generator", "reference"), {"generator"}) == {
        "policy": "active", "generator": "offloaded", "reference": "resident"
    }  # fmt: skip


def test_a_name_that_only_begins_like_a_role_is_not_that_role() -> None:
    assert residency("grade", ("rewarding", "reference"), frozenset()) == {
        "rewarding": "resident", "reference": "resident"
    }  # fmt: skip


OTHERS = {"policy", "critic", "reference"}


@pytest.mark.parametrize(
    ("colocated", "optimizer_gib", "device_gib", "requested", "leaving"),
    [
        # On a CPU there is nowhere to go.
        (True, 100, 0, None, set()),
        (False, 100, 0, None, set()),
        # A generator's cache always leaves a GPU that it shares; the others from a fifth of it on.
        (True, 1, 10, None, {"generator"}),
        (True, 2, 10, None, {"generator"}),
        (True, 3, 10, None, {"generator", *OTHERS}),
        (False, 3, 10, None, set()),
        # As the recipe says.
        (True, 1, 10, True, {"generator", *OTHERS}),
        (True, 9, 10, False, {"generator"}),
        (False, 1, 10, True, OTHERS),
        (False, 9, 10, False, set()),
        (True, 1, 0, True, {"generator", *OTHERS}),
        (True, 1, 0, False, set()),
    ],
)
def test_who_leaves_a_device(
    colocated: bool, optimizer_gib: int, device_gib: int, requested: bool | None, leaving: set[str]
) -> None:
    found = who_leaves(
        ("policy", "generator", "critic", "reference"), colocated=colocated, optimizer_bytes=optimizer_gib * GIB,
        device_bytes=device_gib * GIB, offload_optimizer=requested,
    )  # fmt: skip

    assert found == leaving


@pytest.mark.parametrize(("device_gib", "leaving"), [(80, {"lent-generator"}), (0, set())])
def test_a_generator_on_a_learners_gpu_sleeps_while_the_learner_works(device_gib: int, leaving: set[str]) -> None:
    roles = ("policy", "generator", "lent-generator", "critic")
    found = who_leaves(
        roles, colocated=False, optimizer_bytes=4 * GIB, device_bytes=device_gib * GIB, offload_optimizer=None
    )
    assert found == leaving
    assert residency("update", roles, found)["lent-generator"] == ("offloaded" if leaving else "resident")
    assert residency("update", roles, found)["generator"] == "resident"
