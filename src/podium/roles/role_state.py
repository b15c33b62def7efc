# SPDX-License-Identifier: Apache-2.0
"""The state of a role that learns, outside of its device: snapshots in host memory, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from podium.engine.checkpoint import CheckpointReader
from podium.engine.checkpoint_files import Extras
from podium.engine.memory_snapshots import MemorySnapshots, whole_snapshots
from podium.engine.mesh import Mesh
from podium.errors import CheckpointError
from podium.models.tensor_shards import TensorShard
from podium.roles.interfaces import StateSource


class RoleState:
    """Reads and writes the state of one rank."""

    def __init__(
        self, mesh: Mesh, *, node: str, memory: Path | None, checkpoints: Path | None,
        pieces: Callable[[], Sequence[TensorShard]],
    ) -> None:  # fmt: skip
        """`memory`: folder of snapshots in host memory; None: there are none. `pieces`: the tensors of the state."""
        self._memory, self._checkpoints = memory, checkpoints
        self._step: int | None = None  # the state is that after this step; None: it has changed since, or is unknown
        self._snapshots = None if memory is None else MemorySnapshots(memory, mesh, node=node, pieces=pieces)

    def snapshot(self, step: int, extras: Extras) -> str | None:
        """Begins a snapshot. Returns why there is none, if there is none. Collective."""
        self._step = step
        return "it is switched off" if self._snapshots is None else self._snapshots.take(step, extras)

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
        """Steps of whole snapshots, ascending."""
        return () if self._memory is None else whole_snapshots(self._memory)

    def read(self, step: int, source: StateSource) -> CheckpointReader:
        """The state after a step. Snapshots of later steps are forgotten: these steps will be made again, and another
        role may not have them."""
        if self._snapshots is not None:
            self._snapshots.wait()
            self._snapshots.forget_after(step)
        folder = self._memory if source == "memory" else self._checkpoints
        if folder is None:
            raise CheckpointError(f"the state after step {step} is not kept in {source}.")
        return CheckpointReader(folder / f"step-{step:08d}")
