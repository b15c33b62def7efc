# SPDX-License-Identifier: Apache-2.0
"""Which role holds what on its devices in which phase; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from podium.roles.carriers import Residency
from podium.roles.interfaces import POLICY

Phase = Literal["rollout", "grade", "score", "update", "refresh", "save"]
"""`refresh`: the reference becomes a copy of the policy. `save`: whatever a checkpoint holds is there. An evaluation is
rollout and grade."""

GENERATOR, CRITIC, REFERENCE = "generator", "critic", "reference"

# Roles that work in each phase. Names with a number (teacher-0, reward-1) are scorers.
_AT_WORK: Mapping[Phase, tuple[str, ...]] = {
    "rollout": (GENERATOR,),
    "grade": ("reward",),
    "score": (REFERENCE, "teacher", CRITIC),
    "update": (POLICY, CRITIC),
    "refresh": (POLICY, REFERENCE),
    "save": (POLICY, CRITIC, REFERENCE),
}


def residency(phase: Phase, roles: Iterable[str], leaving: Collection[str]) -> dict[str, Residency]:
    """What each role holds in a phase. Who works is active. Others stay resident, unless they are among `leaving`: then
    what they can do without leaves the device."""
    by_role: dict[str, Residency] = {}
    for role in roles:
        idle: Residency = "offloaded" if role in leaving else "resident"
        by_role[role] = "active" if _works(role, phase) else idle
    return by_role


def who_leaves(
    roles: Iterable[str], *, colocated: bool, optimizer_bytes: int, device_bytes: int, offload_optimizer: bool | None
) -> frozenset[str]:
    """Roles that leave a shared device while others work. A generator's cache takes most of a GPU, so it always does
    where it shares one. The others (optimizer state, scorers' weights) do as the recipe says; else where optimizer
    state takes more than a fifth of the device. On a CPU there is nothing to move to, unless the recipe asks."""
    roles = frozenset(roles)
    on_gpu = device_bytes > 0
    crowded = colocated and on_gpu and optimizer_bytes > 0.2 * device_bytes
    leaving = roles - {GENERATOR} if (crowded if offload_optimizer is None else offload_optimizer) else frozenset[str]()
    sleeps = colocated and (on_gpu or bool(offload_optimizer))
    return leaving | (roles & {GENERATOR} if sleeps else frozenset())


def _works(role: str, phase: Phase) -> bool:
    return any(role == name or role.startswith(f"{name}-") for name in _AT_WORK[phase])
