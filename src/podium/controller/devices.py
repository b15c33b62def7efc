# SPDX-License-Identifier: Apache-2.0
"""Tracks which role holds which device in each phase, and which version of the weights the generators have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from podium.cluster import WorkerId
from podium.controller.layout import LINK
from podium.controller.parts import OnPolicyParts
from podium.controller.phases import GENERATOR, Phase, residency
from podium.observe.timing import PUBLISHED
from podium.recipe import OnPolicyRecipe
from podium.roles.carriers import Residency
from podium.roles.handles import send_weights
from podium.roles.interfaces import POLICY
from podium.weights.weight_transfers import ByBroadcast


class Devices:
    """Applies the decisions of controller/phases.py. Accounts the time inside a phase to that phase."""

    def __init__(self, parts: OnPolicyParts[OnPolicyRecipe]) -> None:
        self._parts = parts
        self._colocated = parts.recipe.placement.layout == "colocated"
        self._held: dict[str, Residency] = dict.fromkeys(parts.names.on_devices, "resident")
        self._published: tuple[int, tuple[WorkerId, ...]] | None = None  # version, and who has it
        self._is_evaluating = False
        self._grading = (GENERATOR,) if parts.recipe.policy_judges else ()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Counts all time inside this context as evaluation, whatever the phase."""
        self._is_evaluating = True
        try:
            yield
        finally:
            self._is_evaluating = False

    @asynccontextmanager
    async def phase(self, phase: Phase) -> AsyncIterator[None]:
        """Enters a phase: each role holds what the phase requires."""
        await self.enter(phase)
        with self._parts.watch.span("evaluation" if self._is_evaluating else phase):
            yield

    @asynccontextmanager
    async def beside(self, phase: Phase) -> AsyncIterator[None]:
        """Like `phase`, for a phase without work on devices: roles offload while it runs."""
        moving = asyncio.create_task(self.enter(phase, timed=False))
        try:
            with self._parts.watch.span("evaluation" if self._is_evaluating else phase):
                yield
        finally:
            await moving

    async def enter(self, phase: Phase, *, awake: tuple[str, ...] = (), timed: bool = True) -> None:
        """Moves roles on and off the devices for this phase. Offloading comes first, to free memory. Roles in `awake`
        return to the device with their next call."""
        names = self._parts.names.on_devices
        wanted = residency(phase, names, self._parts.leaving, grading=self._grading)
        if wanted[GENERATOR] == "offloaded" and self._parts.roles.policy.num_ranks > 1:
            self._published = None  # its copy of sharded weights is freed too, and is empty after waking
        changes = [
            (role, target) for role, target in wanted.items() if _moves(self._held[role], target) and role not in awake
        ]
        for leaving in (True, False):
            for role, target in changes:
                if (target == "offloaded") == leaving:
                    with self._parts.watch.span("residency") if timed else contextlib.nullcontext():
                        await self._handle(role).hold(target)
        self._held = wanted

    async def publish(self, version: int) -> None:
        """Gives generators this version unless they have it already, by sharing tensors or by a broadcast."""
        roles = self._parts.roles
        if self._published == (version, roles.generator.workers):
            return
        if self._colocated:
            await self.enter("rollout", awake=(GENERATOR,))
            with self._parts.watch.span("publish"):
                await roles.generator.share(version)  # wakes the engine
        else:
            with self._parts.watch.span("publish"):
                are_new = self._published is None or self._published[1] != roles.generator.workers
                if are_new and self._parts.recipe.model.lora is not None:
                    await roles.generator.check_base(await roles.policy.describe_base())
                await self._parts.workers.renew_links()  # a generator may be another one
                described = await roles.policy.describe(version)
                await send_weights(roles.policy, roles.generator, ByBroadcast(version=described, link=LINK))
        self._parts.watch.mark(f"{PUBLISHED}{version}")
        self.note_published(version)

    def note_published(self, version: int) -> None:
        """All generators that are there have this version."""
        self._published = version, self._parts.roles.generator.workers

    def _handle(self, role: str) -> Any:
        roles, names = self._parts.roles, self._parts.names
        by_name: dict[str | None, Any] = {
            POLICY: roles.policy, GENERATOR: roles.generator, names.lent: roles.lent, names.critic: roles.critic,
            names.reference: roles.reference,
        }  # fmt: skip
        by_name |= dict(zip(names.teachers, roles.teachers, strict=True))
        by_name |= {name: model for (_, name), (_, model) in zip(names.reward_models, roles.reward_models, strict=True)}
        return by_name[role]


def _moves(now: Residency, target: Residency) -> bool:
    """Whether the change moves memory. `resident` and `active` hold the same memory."""
    return (now == "offloaded") != (target == "offloaded")
