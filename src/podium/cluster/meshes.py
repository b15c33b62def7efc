# SPDX-License-Identifier: Apache-2.0
"""Positions of workers in the meshes of roles; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from podium.cluster.identity import WorkerId
from podium.errors import PlacementError

Axis = Literal["replica", "shard"]
AXES: tuple[Axis, ...] = ("replica", "shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Sizes of a role's axes. The shard axis varies fastest over ranks. `same_data`: so many neighbouring ranks get the
    same data and compute it together; the first of them answers for all."""

    replica: int = 1
    shard: int = 1
    same_data: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise PlacementError(f"a mesh has {axis} {self.size(axis)}; every axis has at least 1.")
        if self.same_data < 1 or self.world % self.same_data:
            raise PlacementError(
                f"a mesh of {self.world} workers cannot give the same data to {self.same_data} of them at a time. Use "
                f"a divisor of {self.world}."
            )

    def __str__(self) -> str:
        sizes = [f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        together = f" ({self.same_data} on the same data)" if self.same_data > 1 else ""
        return (" × ".join(sizes) or "1 worker") + together

    def size(self, axis: Axis) -> int:
        """Size of one axis."""
        return self.replica if axis == "replica" else self.shard

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replica * self.shard

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or groups of them, that get different data."""
        return self.world // self.same_data


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMesh:
    """A role's shape mapped to slots of its pool: `slots[rank]` is the slot of that rank."""

    role: str
    pool: str
    shape: MeshShape
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.slots) != self.shape.world or len(set(self.slots)) != len(self.slots):
            raise PlacementError(
                f"role {self.role} asks for {self.shape} = {self.shape.world} workers and is given the slots "
                f"{list(self.slots)} of pool {self.pool}. Give it {self.shape.world} different slots, or another mesh."
            )

    def rank_of(self, slot: int) -> int:
        """The rank of a slot."""
        return self.slots.index(slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRegistry:
    """All roles and all workers of a layout. Immutable: a respawn creates a new registry. A slot without a worker is
    vacant: calls to all workers of a role leave out its rank."""

    meshes: Mapping[str, RoleMesh]
    workers: Mapping[tuple[str, int], WorkerId]  # (pool, slot) -> its current worker

    def mesh(self, role: str) -> RoleMesh:
        """The mesh of a role. Raises a PlacementError if the role is unknown."""
        if role not in self.meshes:
            raise PlacementError(
                f"there is no role {role!r} in this layout; it has {', '.join(self.meshes) or 'none'}."
            )
        return self.meshes[role]

    def worker(self, pool: str, slot: int) -> WorkerId | None:
        """The current worker of a slot; None: it is vacant."""
        return self.workers.get((pool, slot))

    def ranks_of(self, role: str) -> tuple[int, ...]:
        """Ranks of a role whose slots are not vacant."""
        mesh = self.mesh(role)
        return tuple(rank for rank, slot in enumerate(mesh.slots) if (mesh.pool, slot) in self.workers)

    def workers_of(self, role: str) -> tuple[WorkerId, ...]:
        """Workers of a role, in the order of `ranks_of`."""
        mesh = self.mesh(role)
        return tuple(self.workers[mesh.pool, mesh.slots[rank]] for rank in self.ranks_of(role))

    def is_current(self, worker: WorkerId) -> bool:
        """Whether no other worker has taken its slot."""
        return self.workers.get((worker.pool, worker.index)) == worker

    def with_workers(self, workers: Sequence[WorkerId]) -> MeshRegistry:
        """A registry in which these workers have taken their slots. The previous workers become old incarnations."""
        return replace(self, workers={**self.workers, **{(worker.pool, worker.index): worker for worker in workers}})

    def without(self, pool: str, slots: Collection[int]) -> MeshRegistry:
        """A registry in which these slots are vacant."""
        left = {key: worker for key, worker in self.workers.items() if key[0] != pool or key[1] not in slots}
        return replace(self, workers=left)

    def describe(self) -> str:
        """One line per role and worker with its position."""
        lines: list[str] = []
        for role, mesh in self.meshes.items():
            lines.append(f"{role}: {mesh.shape} on {mesh.pool}")
            present = zip(self.ranks_of(role), self.workers_of(role), strict=True)
            lines += [f"  rank {rank}: {worker}" for rank, worker in present]
        return "\n".join(lines)
