# SPDX-License-Identifier: Apache-2.0
"""Decides what each role holds on its devices in each phase; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from podium.roles.carriers import Residency
from podium.roles.interfaces import POLICY

Phase = Literal["rollout", "grade", "score", "update", "refresh", "save"]
"""`refresh` copies the policy into the reference. `save` brings everything that a checkpoint holds to the devices. An
evaluation consists of rollout and grade."""

GENERATOR, CRITIC, REFERENCE = "generator", "critic", "reference"
LENT = "lent-generator"
"""Generators on the learner's devices in layout elastic. They work between phases: when the learner waits."""

PARTS = "generator-parts"
"""Parts of generators that several learners' devices hold together. Their engine says what they hold."""

# Roles that work in each phase. Names with a number (teacher-0, reward-1) are scorers.
_AT_WORK: Mapping[Phase, tuple[str, ...]] = {
    "rollout": (GENERATOR,),
    "grade": ("reward",),
    "score": (REFERENCE, "teacher", CRITIC),
    "update": (POLICY, CRITIC),
    "refresh": (POLICY, REFERENCE),
    "save": (POLICY, CRITIC, REFERENCE),
}


def residency(
    phase: Phase, roles: Iterable[str], leaving: Collection[str], *, grading: Collection[str] = ()
) -> dict[str, Residency]:
    """Returns what each role holds in a phase. Working roles are active. Other roles stay resident, unless they are in
    `leaving`: those offload what they can. `grading`: further roles that grade."""
    by_role: dict[str, Residency] = {}
    for role in roles:
        idle: Residency = "offloaded" if role in leaving else "resident"
        works = _works(role, phase) or (phase == "grade" and role in grading)
        by_role[role] = "active" if works else idle
    return by_role


def who_leaves(
    roles: Iterable[str], *, colocated: bool, optimizer_bytes: int, device_bytes: int, offload_optimizer: bool | None
) -> frozenset[str]:
    """Roles that offload from a shared device while others work. A generator that shares a device always does, because
    its cache takes most of a GPU. The others (optimizer state, scorers' weights) follow the recipe. By default they
    offload when optimizer state takes more than a fifth of the device. On a CPU nothing is offloaded unless the recipe
    says so."""
    roles = frozenset(roles)
    on_gpu = device_bytes > 0
    crowded = colocated and on_gpu and optimizer_bytes > 0.2 * device_bytes
    sharing = {GENERATOR if colocated else LENT}  # generators that share their device
    leaving = roles - {GENERATOR, LENT} if (crowded if offload_optimizer is None else offload_optimizer) else set[str]()
    sleeps = on_gpu or bool(colocated and offload_optimizer)
    return frozenset(leaving | (roles & sharing if sleeps else set()))


def _works(role: str, phase: Phase) -> bool:
    return any(role == name or role.startswith(f"{name}-") for name in _AT_WORK[phase])
