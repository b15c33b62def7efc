# SPDX-License-Identifier: Apache-2.0
"""The state of a role that learns, outside of its device: snapshots in host memory, and checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from podium.engine.checkpoint import CheckpointReader
from podium.engine.checkpoint_files import Extras, saved_steps
from podium.engine.memory_snapshots import KEPT, SnapshotWriter
from podium.engine.mesh import Mesh
from podium.errors import CheckpointError
from podium.models.tensor_shards import TensorShard
from podium.roles.interfaces import StateSource

# The most of the free memory that snapshots may take.
_MOST_OF_FREE = 0.5
_SNAPSHOT_S = 60.0


class RoleState:
    """Reads and writes the state of one rank."""

    def __init__(
        self, mesh: Mesh, *, node: str, memory: Path | None, checkpoints: Path | None,
        pieces: Callable[[], Sequence[TensorShard]],
    ) -> None:  # fmt: skip
        """`memory`: folder of snapshots in host memory; None: there are none. `pieces`: the tensors of the state."""
        self._mesh, self._node, self._memory, self._checkpoints, self._pieces = mesh, node, memory, checkpoints, pieces
        self._writer: SnapshotWriter | None = None
        self._reason: str | None = None if memory is not None else "it is switched off"

    def snapshot(self, step: int, extras: Extras) -> str | None:
        """Begins a snapshot. Returns why there is none, if there is none. Collective."""
        if self._reason is None and self._writer is None:
            self._reason = self._why_not()
        if self._reason is not None or self._memory is None:
            return self._reason
        if self._writer is None:
            self._writer = SnapshotWriter(self._memory, self._mesh, timeout_s=_SNAPSHOT_S)
        try:
            self._writer.save(step, self._pieces(), extras)
        except (CheckpointError, OSError) as error:  # training goes on without
            self._reason = str(error)
        return self._reason

    def wait_copied(self) -> None:
        """Until then the tensors of the last snapshot must not change."""
        if self._writer is not None:
            self._writer.wait_copied()

    def snapshots(self) -> tuple[int, ...]:
        """Steps of whole snapshots, ascending."""
        return () if self._memory is None else tuple(each.step for each in saved_steps(self._memory))

    def read(self, step: int, source: StateSource) -> CheckpointReader:
        """The state after a step. Snapshots of later steps are forgotten: these steps will be made again, and another
        role may not have them."""
        if self._writer is not None:
            self._writer.wait()
        if self._memory is not None and self._mesh.is_main:
            for each in saved_steps(self._memory):
                if each.step > step:
                    shutil.rmtree(each.folder)
        folder = self._memory if source == "memory" else self._checkpoints
        if folder is None:
            raise CheckpointError(f"the state after step {step} is not kept in {source}.")
        return CheckpointReader(folder / f"step-{step:08d}")

    def _why_not(self) -> str | None:
        """Why snapshots are not possible. Collective."""
        assert self._memory is not None
        mine = sum(piece.local.numel() * piece.local.element_size() for piece in self._pieces())
        # All ranks must decide alike: one that stayed out would leave the others in a collective.
        nodes, sizes, frees = zip(*self._mesh.gather((self._node, mine, _free_bytes(self._memory))), strict=True)
        if len(set(nodes)) > 1:
            return f"the ranks are on {len(set(nodes))} nodes"
        needed, free = KEPT * sum(sizes), min(frees)
        if needed > _MOST_OF_FREE * free:
            return f"they take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are free"
        return None


def _free_bytes(folder: Path) -> int:
    """Memory that files of this folder can take."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return min(free, int(value.split()[0]) * 1024)
    return free
