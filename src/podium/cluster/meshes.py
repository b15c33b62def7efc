# SPDX-License-Identifier: Apache-2.0
"""Which worker sits where in which role's mesh, who answers with rows, and who shares a data rank; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from podium.cluster.identity import Coordinates, WorkerId
from podium.errors import PlacementError

Axis = Literal["replica", "shard", "context", "tensor"]
AXES: tuple[Axis, ...] = ("replica", "shard", "context", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Sizes of a role's axes. Ranks count with tensor fastest, then context, shard, replica, so that those who talk
    most sit next to each other. Replica and shard see different data; tensor and context share theirs."""

    replica: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise PlacementError(f"a mesh has {axis} {self.size(axis)}; every axis has at least 1.")

    def __str__(self) -> str:
        sizes = [f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        return " × ".join(sizes) or "1 worker"

    def size(self, axis: Axis) -> int:
        """Size of one axis."""
        return {"replica": self.replica, "shard": self.shard, "context": self.context, "tensor": self.tensor}[axis]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of all axes, the slowest first."""
        return self.replica, self.shard, self.context, self.tensor

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def num_data_ranks(self) -> int:
        """Ranks that get different data."""
        return self.replica * self.shard

    @property
    def per_data_rank(self) -> int:
        """Workers that compute on the same rows; they must share a node, because they talk at every layer."""
        return self.context * self.tensor

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank is in the mesh; tensor is the fastest axis."""
        assert 0 <= rank < self.world
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        replica, shard = divmod(rank, self.shard)
        return Coordinates(replica=replica, shard=shard, context=context, tensor=tensor)

    def rank(self, at: Coordinates) -> int:
        """The rank at these coordinates."""
        return ((at.replica * self.shard + at.shard) * self.context + at.context) * self.tensor + at.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMesh:
    """A role's shape laid over slots of its pool: `slots[rank]` is where that rank sits."""

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

    def coordinates(self, slot: int) -> Coordinates:
        """Where a slot is in the mesh."""
        return self.shape.coordinates(self.rank_of(slot))

    def data_rank(self, slot: int) -> int:
        """The data rank of a slot."""
        return self.rank_of(slot) // self.shape.per_data_rank

    def members(self, data_rank: int) -> tuple[int, ...]:
        """The slots that compute on the rows of one data rank, its source first."""
        width = self.shape.per_data_rank
        return self.slots[data_rank * width : (data_rank + 1) * width]

    def is_source(self, slot: int) -> bool:
        """Whether it answers with rows: context 0 and tensor 0 of its data rank; the others hold the same."""
        return self.rank_of(slot) % self.shape.per_data_rank == 0

    @property
    def sources(self) -> tuple[int, ...]:
        """One slot for each data rank, in order."""
        return self.slots[:: self.shape.per_data_rank]

    def axis_groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """The slots that differ along one axis only: one process group each."""
        groups: dict[Coordinates, list[int]] = {}
        for rank, slot in enumerate(self.slots):
            at = self.shape.coordinates(rank)
            groups.setdefault(at._replace(**{axis: 0}), []).append(slot)
        return [tuple(slots) for slots in groups.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRegistry:
    """All roles and all living workers of a layout. A value: a respawn makes a new registry."""

    meshes: Mapping[str, RoleMesh]
    workers: Mapping[tuple[str, int], WorkerId]  # (pool, slot) -> who is there now

    def mesh(self, role: str) -> RoleMesh:
        """The mesh of a role; an unknown role raises a PlacementError."""
        if role not in self.meshes:
            raise PlacementError(
                f"there is no role {role!r} in this layout; it has {', '.join(self.meshes) or 'none'}."
            )
        return self.meshes[role]

    def worker(self, pool: str, slot: int) -> WorkerId:
        """The current worker of a slot."""
        return self.workers[pool, slot]

    def workers_of(self, role: str) -> tuple[WorkerId, ...]:
        """In rank order."""
        mesh = self.mesh(role)
        return tuple(self.workers[mesh.pool, slot] for slot in mesh.slots)

    def sources_of(self, role: str) -> tuple[WorkerId, ...]:
        """The workers that answer for the data ranks of a role, in their order."""
        mesh = self.mesh(role)
        return tuple(self.workers[mesh.pool, slot] for slot in mesh.sources)

    def members_of(self, role: str, data_rank: int) -> tuple[WorkerId, ...]:
        """All workers of one data rank."""
        mesh = self.mesh(role)
        return tuple(self.workers[mesh.pool, slot] for slot in mesh.members(data_rank))

    def coordinates_of(self, role: str, worker: WorkerId) -> Coordinates:
        """Where a worker is in the role's mesh."""
        return self.mesh(role).coordinates(worker.index)

    def roles_of(self, worker: WorkerId) -> tuple[str, ...]:
        """The roles that a worker hosts."""
        return tuple(
            role for role, mesh in self.meshes.items() if mesh.pool == worker.pool and worker.index in mesh.slots
        )

    def is_current(self, worker: WorkerId) -> bool:
        """Whether no other worker has taken its slot."""
        return self.workers.get((worker.pool, worker.index)) == worker

    def with_workers(self, workers: Sequence[WorkerId]) -> MeshRegistry:
        """These have taken their slots; the workers before them are of an old incarnation now."""
        return replace(self, workers={**self.workers, **{(worker.pool, worker.index): worker for worker in workers}})

    def describe(self) -> str:
        """One line per role and worker, for logs and `podium` users."""
        lines: list[str] = []
        for role, mesh in self.meshes.items():
            lines.append(f"{role}: {mesh.shape} on {mesh.pool}")
            for worker in self.workers_of(role):
                source = ", answers with rows" if mesh.is_source(worker.index) else ""
                lines.append(f"  {worker}: {mesh.coordinates(worker.index)}{source}")
        return "\n".join(lines)
