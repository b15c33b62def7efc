# SPDX-License-Identifier: Apache-2.0
"""The layout of a controlled run in one declaration: pools of device slots, and roles on them.

Two roles in one pool on the same slots are colocated, in two pools they are split, and on overlapping slots of one pool
they are mixed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from podium.cluster.meshes import MeshShape, RoleMesh
from podium.errors import PlacementError


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """Which Ray a run uses: the one at `address`, or the one that RAY_ADDRESS or a submitted job names. Otherwise a
    local one is started on demand, listens on loopback only and ends with the run."""

    address: str | None = None
    cpus: int | None = None  # of a local one; default: the machine's cores
    gpus: int | None = None  # of a local one; default: what Ray finds
    object_store_bytes: int | None = None
    show_output: bool = True  # workers' output goes to the controller's terminal, prefixed with their names
    deadline_s: float = 30.0  # to reach the one at `address`
    heartbeat_timeout_s: float = 60.0  # of the processes of a local one: stopped for longer, the cluster has failed
    preload: tuple[str, ...] = ()  # a local one forks its workers from a process that has imported these modules
    kept_as: str | None = None  # of a running one: namespace of workers that outlive this process

    @property
    def running_address(self) -> str | None:
        """Address of the running Ray to join; None: a local one is started. Ray documents RAY_ADDRESS for submitted
        jobs."""
        address = self.address or os.environ.get("RAY_ADDRESS")
        return None if address in ("", "local") else address


# Ray's resource precision is a ten-thousandth.
_LEAST = 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of one slot. Fractions share a device between slots: two workers with gpus=0.5 share one."""

    cpus: float = 1.0
    gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("CPU", "GPU", "memory", "object_store_memory"):
            if name in self.custom:
                raise PlacementError(
                    f"{name} is not a custom resource. Use cpus and gpus for those; leave memory to Ray."
                )
        amounts = {"cpus": self.cpus, "gpus": self.gpus, **self.custom}
        for name, amount in amounts.items():
            if not math.isfinite(amount) or amount < 0 or 0 < amount < _LEAST:
                raise PlacementError(f"a slot asks for {amount} {name}; it must be 0, or {_LEAST} or more.")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise PlacementError(f"a slot asks for {self.gpus} gpus; above 1 only whole devices can be given.")
        if 0 < self.gpus < 1 and abs(1 - round(1 / self.gpus) * self.gpus) > 0.01:
            raise PlacementError(
                f"a slot asks for {self.gpus} gpus; a device is shared in equal parts: 0.5, 0.3333, 0.25, ..."
            )
        if not any(amounts.values()):
            raise PlacementError("a slot asks for nothing. Give it cpus, gpus or a custom resource.")

    def times(self, count: int) -> dict[str, float]:
        """Resources that `count` slots need on one node, in Ray's names and to its precision. Fractions of a device are
        not split over two, so more than one device is rounded up to whole ones."""
        gpus = self.gpus * count
        needs = {"CPU": self.cpus * count, "GPU": gpus if gpus <= 1 else math.ceil(gpus - 0.01)}
        needs |= {name: amount * count for name, amount in self.custom.items()}
        return {name: round(amount, 4) for name, amount in needs.items() if amount > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A set of workers. With `collectives` they fail and recover together, because their process group is the unit of
    recovery. Without, a dead worker is replaced and the others continue, and slots may be vacant: see
    `Workers.vacate`."""

    name: str
    slots: int
    each: Resources = Resources()
    collectives: bool = True
    one_node: bool = False  # all slots on one node
    together: int = 1  # so many neighbouring slots on one node; they divide the slots
    spread: bool = False  # prefer many nodes to few
    tokenizers_only: bool = False  # of transformers its workers use nothing else, so that they need no torch
    at_start: int | None = None  # slots that are filled at the start, the first ones; the others are vacant; None: all
    grace_s: float | None = None  # SIGTERM is a notice: the worker goes on for so long; None: it ends at once

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise PlacementError(f"pool {self.name} has {self.slots} slots; it needs at least 1.")
        if self.together < 1 or self.slots % self.together:
            raise PlacementError(
                f"pool {self.name} has {self.slots} slots, and groups of {self.together} that share a node do not "
                "divide them."
            )
        if self.at_start is not None and not 1 <= self.at_start <= self.slots:
            raise PlacementError(
                f"pool {self.name} has {self.slots} slots and fills {self.at_start} at the start: at least 1, at most "
                f"{self.slots}."
            )
        if self.collectives and self.num_first < self.slots:
            raise PlacementError(
                f"pool {self.name} fills {self.at_start} of {self.slots} slots at the start, and its workers meet in "
                "collectives: a process group has all its ranks. Fill all slots, or make it a pool without collectives."
            )

    @property
    def num_first(self) -> int:
        """Number of slots that are filled at the start."""
        return self.slots if self.at_start is None else self.at_start


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A role: the class that a worker builds as `kind(context, *arguments)`, and the mesh of its workers. If `kind` is
    an interface, `implementation` names the class to build as "module:Class", which only workers import."""

    name: str
    kind: type[Any]
    pool: str
    mesh: MeshShape = field(default_factory=MeshShape)
    arguments: tuple[Any, ...] = ()
    slots: tuple[int, ...] | None = None  # of the pool; default: the first ones
    implementation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Pools and the roles on them, checked as a whole before anything starts."""

    pools: tuple[Pool, ...]
    roles: tuple[RoleSpec, ...]

    def __post_init__(self) -> None:
        for what, names in (("pool", [pool.name for pool in self.pools]), ("role", [role.name for role in self.roles])):
            for name in names:
                if names.count(name) > 1:
                    raise PlacementError(f"two {what}s are named {name!r}. Give each its own name.")
        for role in self.roles:
            self._check_role(role)
        for pool in self.pools:
            idle = set(range(pool.slots)) - {slot for mesh in self.meshes_of(pool.name) for slot in mesh.slots}
            if idle:
                raise PlacementError(
                    f"pool {pool.name} has {pool.slots} slots and no role uses the slots {sorted(idle)}. Give "
                    "them a role, or lower the pool's slots."
                )

    def pool(self, name: str) -> Pool:
        """The pool of this name."""
        return next(pool for pool in self.pools if pool.name == name)

    def mesh(self, role: RoleSpec) -> RoleMesh:
        """The role's mesh over the slots of its pool."""
        slots = tuple(range(role.mesh.world)) if role.slots is None else role.slots
        return RoleMesh(role=role.name, pool=role.pool, shape=role.mesh, slots=slots)

    def meshes_of(self, pool: str) -> tuple[RoleMesh, ...]:
        """The meshes of all roles of a pool."""
        return tuple(self.mesh(role) for role in self.roles if role.pool == pool)

    def _check_role(self, role: RoleSpec) -> None:
        known = [pool.name for pool in self.pools]
        if role.pool not in known:
            raise PlacementError(f"role {role.name} is on pool {role.pool!r}, and the pools are {', '.join(known)}.")
        pool, mesh = self.pool(role.pool), self.mesh(role)
        beyond = [slot for slot in mesh.slots if not 0 <= slot < pool.slots]
        if beyond:
            raise PlacementError(
                f"role {role.name} asks for {role.mesh} = {role.mesh.world} workers, on the slots {list(mesh.slots)}, "
                f"and pool {pool.name} has {pool.slots}: {beyond} do not exist. Raise the pool's slots to "
                f"{max(mesh.slots) + 1}, or make the mesh smaller."
            )


def public_methods(kind: type[Any]) -> dict[str, Callable[..., Any]]:
    """Methods that may be called on a role: its public functions, including inherited ones."""
    return {
        name: function
        for name in dir(kind)
        if not name.startswith("_") and callable(function := getattr(kind, name)) and not isinstance(function, type)
    }
