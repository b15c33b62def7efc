# SPDX-License-Identifier: Apache-2.0
"""The state of a role that learns, outside of its device: snapshots in host memory, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from podium.engine.checkpoint import CheckpointReader
from podium.engine.checkpoint_files import Extras
from podium.engine.memory_snapshots import MemorySnapshots
from podium.engine.mesh import Mesh
from podium.errors import CheckpointError
from podium.models.tensor_shards import TensorShard
from podium.roles.interfaces import NoSnapshot, SnapshotBegun, StateSource
from podium.runs.host_memory import claim_launch


class RoleState:
    """Reads and writes the state of one rank."""

    def __init__(
        self, mesh: Mesh, *, node: str, memory: Path | None, checkpoints: Path | None,
        pieces: Callable[[], Sequence[TensorShard]],
    ) -> None:  # fmt: skip
        """`memory`: folder of snapshots in host memory, in that of a launch; None: there are none. `pieces`: the
        tensors of the state. Collective."""
        self._checkpoints = checkpoints
        self._step: int | None = None  # the state is that after this step; None: it has changed since, or is unknown
        self._snapshots: MemorySnapshots | None = None
        self._why_none = "they are switched off"
        if memory is not None:
            self._claim = claim_launch(memory.parent)  # as long as this process lives
            if all(mesh.gather(self._claim is not None)):  # several nodes may be on one machine
                self._snapshots = MemorySnapshots(memory / node, mesh, node=node, pieces=pieces, copies=True)
            else:
                self._why_none = f"{memory.parent} cannot be made on all nodes"

    def snapshot(self, step: int, extras: Extras) -> SnapshotBegun | NoSnapshot:
        """Begins a snapshot. Collective."""
        self._step = step
        if self._snapshots is None:
            return NoSnapshot(reason=self._why_none)
        copy_s = self._snapshots.copy_s
        reason = self._snapshots.take(step, extras)
        return SnapshotBegun(copy_s=copy_s) if reason is None else NoSnapshot(reason=reason)

    def begin_change(self) -> None:
        """The state changes from now on. Waits until its last snapshot is copied."""
        self._step = None
        self.wait_copied()

    def is_after(self, step: int) -> bool:
        """Whether the state is that after this step, so that nothing has to be restored."""
        return self._step == step

    def note_restored(self, step: int) -> None:
        """The state after this step was restored."""
        self._step = step

    def wait_copied(self) -> None:
        """Until then the tensors of the last snapshot must not change."""
        if self._snapshots is not None:
            self._snapshots.wait_copied()

    def snapshots(self) -> tuple[int, ...]:
        """Steps of whole snapshots, ascending. Collective."""
        return () if self._snapshots is None else self._snapshots.steps()

    def forget_snapshots(self) -> None:
        """Removes all of them: the run has ended. Collective."""
        if self._snapshots is not None:
            self._snapshots.forget()

    def read(self, step: int, source: StateSource) -> CheckpointReader:
        """The state after a step, as far as this rank needs it. Snapshots of later steps are forgotten: these steps
        will be made again, and another role may not have them. Collective."""
        if self._snapshots is not None:
            self._snapshots.wait()
            self._snapshots.forget_after(step)
            if source == "memory":
                return self._snapshots.read(step)
        if source == "memory" or self._checkpoints is None:
            raise CheckpointError(f"the state after step {step} is not kept in {source}.")
        return CheckpointReader(self._checkpoints / f"step-{step:08d}")
