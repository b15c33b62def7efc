# SPDX-License-Identifier: Apache-2.0
"""Which role holds what on its devices in which phase; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from podium.roles.carriers import Residency
from podium.roles.learner import POLICY

Phase = Literal["rollout", "grade", "score", "update"]
"""`publish` and `checkpoint` are part of the update: they read what it leaves on the device. `evaluate` is rollout and
grade."""

GENERATOR, CRITIC, REFERENCE = "generator", "critic", "reference"

# Who is at work in which phase. Names with a number behind them (teacher-0, reward-1) are scorers.
_AT_WORK: Mapping[Phase, tuple[str, ...]] = {
    "rollout": (GENERATOR,),
    "grade": ("reward",),
    "score": (REFERENCE, "teacher", CRITIC),
    "update": (POLICY, CRITIC),
}


def residency(phase: Phase, roles: Iterable[str], *, colocated: bool, offload: bool) -> dict[str, Residency]:
    """What each role holds in a phase. Who works is active. Others stay resident, unless roles share a device that is
    too small for all of them (`offload`): then what they can do without leaves it. A generator that does not share its
    device is never sent away."""
    found: dict[str, Residency] = {}
    for role in roles:
        if _works(role, phase):
            found[role] = "active"
        elif not offload or (role == GENERATOR and not colocated):
            found[role] = "resident"
        else:
            found[role] = "offloaded"
    return found


def needs_offload(*, optimizer_bytes: int, device_bytes: int, asked: bool | None, colocated: bool) -> bool:
    """As the recipe says; else where roles share a device and optimizer state takes more than a fifth of it. On a CPU
    there is nothing to move to."""
    if asked is not None:
        return asked
    return colocated and device_bytes > 0 and optimizer_bytes > 0.2 * device_bytes


def _works(role: str, phase: Phase) -> bool:
    return any(role == name or role.startswith(f"{name}-") for name in _AT_WORK[phase])
