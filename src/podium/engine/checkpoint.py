# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints: each rank writes its part during training, and a checkpoint exists only when it is complete.

Layout of `checkpoints/step-00000050/`: `rank-00000.safetensors` (tensors of one rank), `rank-00000.json` (which part of
which tensor they are, with checksums), and `checkpoint.json` (everything else, written last). All of it is written in a
folder named `.partial-...` that is renamed when every rank is done, so a crash at any moment leaves whole checkpoints
only. Older checkpoints are removed after that. What a full or broken disk does not take is removed again. Nothing in a
checkpoint is executable: safetensors and JSON.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file as save_tensors
from torch import Tensor

from podium.disk import disk_fault, free_bytes
from podium.engine.checkpoint_files import (
    PARTIAL,
    SUPERSEDED,
    Extras,
    SavedCheckpoint,
    SaveFailure,
    SaveState,
    complete,
    fingerprint,
    flush,
    record_loss,
    saved_steps,
    to_remove,
    write_json,
)
from podium.engine.mesh import Mesh
from podium.errors import CheckpointError
from podium.models.tensor_shards import Box, TensorShard
from podium.progress import mark_progress, waiting_at_most

# The writing thread has its own deadline, and a more specific error.
_SLACK_S = 5.0
_LOG = logging.getLogger(__name__)
_WARN_AFTER_S = 60.0
# Ends the name of the file by which a rank says that its part will not come.
_FAILED = ".failed"


class CheckpointWriter:
    """Saves steps into one folder, at most one in flight. Only `wait` blocks, with a deadline."""

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        keep: int,
        keep_best: bool,
        background: bool,
        timeout_s: float,
        beside: Path | None = None,
        resumed: int | None = None,
    ) -> None:
        """`beside`: another writer's folder whose steps decide which stay here; the newest always stays. `resumed`: the
        step that ranks are built from, which stays too."""
        self._resumed = resumed
        self._folder, self._mesh, self._beside = folder, mesh, beside
        self._keep, self._keep_best = keep, keep_best
        self._background, self._timeout_s = background, timeout_s
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._state: SaveState = "idle"
        self._gives_up = threading.Event()
        self._losses: dict[int, float] = {}  # of saved steps, not yet recorded in their checkpoints

    def save(
        self, step: int, pieces: Sequence[TensorShard], extras: Extras, *, heldout_loss: float | None = None
    ) -> None:
        """Copies the pieces off the device, then writes them in a background thread during training. A part that
        several ranks hold is written by one of them. Collective. A fault of the disk is not raised here: `state` and
        `finish` return it, `wait` raises it."""
        self.wait()
        pieces = [piece for piece in pieces if not piece.is_copy]
        staged = {piece.name: _staged(piece.local) for piece in pieces}
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        partial = self._folder / f"{PARTIAL}{step:08d}"
        self._gives_up.clear()
        self._step, self._num_bytes, self._state = step, sum(each.nbytes for each in staged.values()), "writing"
        failure: OSError | None = None
        if self._mesh.is_main:
            # Leftovers of killed saves: those of this step would count as parts of it.
            for old in self._folder.glob(f"{PARTIAL}*"):
                shutil.rmtree(old, ignore_errors=True)
            try:
                partial.mkdir(parents=True)
            except OSError as error:
                failure = error
        if not self._mesh.gather(failure is None)[0]:  # all ranks know, so that none waits for the others
            self._fail(partial, failure or _OtherRankError())
            return
        job = threading.Thread(
            target=self._write, args=(partial, step, list(pieces), staged, extras, heldout_loss),
            name=f"checkpoint-{step}", daemon=True,
        )  # fmt: skip
        self._thread = job
        job.start()
        if not self._background:
            self._join()

    @property
    def state(self) -> SaveState:
        """How far this rank is with the last save. Does not wait. Only rank 0 knows that all ranks have written."""
        return self._state

    def finish(self, *, give_up: bool = False) -> SaveState:
        """Waits until the save in flight has ended. Returns a fault of the disk once, so that it can be tried again;
        raises other errors. `give_up`: another rank has failed, so rank 0 does not wait for its part."""
        if give_up:
            self._gives_up.set()
        self._join()
        state = self._state
        if isinstance(state, SaveFailure):
            self._state, self._failure = "idle", None
        elif self._failure is not None:
            self.wait()
        return state

    def wait(self) -> None:
        """Waits until the save in flight is complete; raises its error if it failed."""
        self._join()
        if self._failure is not None:
            failure, self._failure, self._state = self._failure, None, "idle"
            raise CheckpointError(f"saving into {self._folder} failed: {failure}") from failure

    def grade(self, step: int, heldout_loss: float) -> str | None:
        """Records the held-out loss of a step that was saved before the loss was known; rank 0 only. Returns why it
        cannot be recorded now; it is tried again with the next save."""
        self._join()
        self._losses[step] = heldout_loss
        try:
            self._record_losses()
        except (OSError, CheckpointError) as error:
            return disk_fault(error) or str(error)
        return None

    def settle(self, deadline_s: float = 30.0) -> None:
        """Lets a save in flight finish when the run fails, so that an error does not cost the newest checkpoint."""
        if self._thread is not None:
            self._thread.join(deadline_s)

    def _join(self) -> None:
        if self._thread is None:
            return
        begun_s, limit_s = time.monotonic(), self._timeout_s + _SLACK_S
        with waiting_at_most(limit_s):
            while self._thread.is_alive() and (waited_s := time.monotonic() - begun_s) < limit_s:
                if waited_s >= _WARN_AFTER_S and self._mesh.is_main:
                    _LOG.warning("waiting for the checkpoint of step %d for %.0f s", self._step, waited_s)
                self._thread.join(min(_WARN_AFTER_S, limit_s - waited_s))
        if self._thread.is_alive():
            raise CheckpointError(
                f"a checkpoint is still being written after {self._timeout_s:.0f} s. Is the disk of {self._folder} "
                "answering? Raise checkpoint.timeout_s if it is only slow."
            )
        self._thread = None

    def _write(
        self,
        partial: Path,
        step: int,
        pieces: list[TensorShard],
        staged: dict[str, Tensor],
        extras: Extras,
        heldout_loss: float | None,
    ) -> None:
        """Writes this rank's files; rank 0 then waits (with a deadline) for every rank's index and finalises the
        checkpoint."""
        try:
            name = f"rank-{self._mesh.rank:05d}"
            tensors = partial / f"{name}.safetensors"
            save_tensors(staged, tensors)
            flush(tensors)
            index = {
                "pieces": {
                    piece.name: {"shape": piece.shape, "starts": piece.box.starts, "stops": piece.box.stops}
                    for piece in pieces
                },
                "files": {tensors.name: fingerprint(tensors)},
            }
            write_json(partial / f"{name}.json", index)
            if self._mesh.is_main:
                self._finish(partial, step, extras, heldout_loss)
            self._state = "written"
        except BaseException as error:
            self._fail(partial, error)

    def _fail(self, partial: Path, error: BaseException) -> None:
        """Makes room at once: what is written of a checkpoint that will not be complete is removed. Whole ones stay."""
        self._failure, fault = error, disk_fault(error)
        free = free_bytes(self._folder)
        if self._mesh.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            name = f"rank-{self._mesh.rank:05d}"
            with contextlib.suppress(OSError):
                for path in partial.glob(f"{name}.*"):
                    path.unlink()
                (partial / f"{name}{_FAILED}").touch()  # rank 0 looks for it
        is_consequence = isinstance(error, _OtherRankError)
        if fault is None and not is_consequence:
            self._state = "idle"
            return
        self._state = SaveFailure(
            step=self._step, folder=self._folder, reason=fault or str(error), needed_bytes=self._num_bytes,
            free_bytes=free, is_consequence=is_consequence,
        )  # fmt: skip

    def _finish(self, partial: Path, step: int, extras: Extras, heldout_loss: float | None) -> None:
        self._await_ranks(partial)
        complete(self._folder, partial, step, extras, ranks=self._mesh.world, heldout_loss=heldout_loss)
        with contextlib.suppress(OSError, CheckpointError):  # the checkpoint is complete without them
            self._record_losses()
        saved = saved_steps(self._folder)
        if self._beside is None:
            superfluous = to_remove(saved, keep=self._keep, keep_best=self._keep_best, resumed=self._resumed)
        else:
            kept_steps = {each.step for each in saved_steps(self._beside)} | {step}
            superfluous = [each for each in saved if each.step not in kept_steps]
        for old in superfluous:
            shutil.rmtree(old.folder, ignore_errors=True)
        for aside in self._folder.glob(f"{SUPERSEDED}*"):
            if int(aside.name.removeprefix(SUPERSEDED)) <= step:
                shutil.rmtree(aside, ignore_errors=True)

    def _await_ranks(self, partial: Path) -> None:
        names = [f"rank-{rank:05d}" for rank in range(self._mesh.world)]
        deadline = time.monotonic() + self._timeout_s
        while missing := [f"{name}.json" for name in names if not (partial / f"{name}.json").exists()]:
            if self._gives_up.is_set() or any(partial.glob(f"*{_FAILED}")):
                raise _OtherRankError
            if not partial.exists():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(partial))
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{', '.join(missing)} did not appear in {partial} within {self._timeout_s:.0f} s"
                )
            time.sleep(0.02)

    def _record_losses(self) -> None:
        """Records the losses that wait. Those of removed checkpoints are forgotten."""
        for step in list(self._losses):
            if (self._folder / f"step-{step:08d}").exists():
                record_loss(self._folder, step, self._losses[step])
            del self._losses[step]


class _OtherRankError(Exception):
    """Another rank could not write its part."""

    def __init__(self) -> None:
        super().__init__("another rank could not write its part")


class CheckpointReader(SavedCheckpoint):
    """A complete checkpoint with its tensors. Any rank can read any part of it."""

    def load(self, pieces: Sequence[TensorShard]) -> None:
        """Fills every piece from the ranks that wrote it: the number of ranks then and now may differ."""
        shapes = self.shapes()
        for piece in pieces:
            if shapes.get(piece.name) != tuple(piece.shape):
                raise CheckpointError(
                    f"{self.folder}: {piece.name} has shape {shapes.get(piece.name)} there and {piece.shape} in this "
                    "run. The checkpoint belongs to another model."
                )
        for rank, index in zip(self._ranks, self._indexes, strict=True):
            with safe_open(str(self.folder / f"rank-{rank:05d}.safetensors"), framework="pt") as file:
                for piece in pieces:
                    part = index["pieces"].get(piece.name)
                    if part is None:  # another rank has written it
                        continue
                    stored = Box(tuple(part["starts"]), tuple(part["stops"]))
                    shared = stored.overlap(piece.box)
                    if shared.is_empty:
                        continue
                    values = (
                        file.get_slice(piece.name)[shared.slices(stored.starts)]
                        if shared.starts
                        else file.get_tensor(piece.name)
                    )
                    with torch.no_grad():
                        piece.local[shared.slices(piece.box.starts)].copy_(values)
                    mark_progress()

    def tensor(self, name: str) -> Tensor:
        """One whole tensor, joined from the parts of all ranks."""
        whole: Tensor | None = None
        for rank, index in zip(self._ranks, self._indexes, strict=True):
            part = index["pieces"].get(name)
            if part is None:
                continue
            with safe_open(str(self.folder / f"rank-{rank:05d}.safetensors"), framework="pt") as file:
                values = file.get_tensor(name)
            if whole is None:
                whole = values.new_zeros(part["shape"])
            whole[Box(tuple(part["starts"]), tuple(part["stops"])).slices()] = values
        if whole is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}.")
        return whole


def newest_usable(folder: Path, step: int | None = None) -> CheckpointReader:
    """The requested or newest checkpoint. The error for a damaged one names the one to use instead."""
    saved = saved_steps(folder)
    if not saved:
        partial = [path.name for path in folder.glob(f"{PARTIAL}*")]
        hint = f" ({partial[0]} was never completed)" if partial else ""
        raise CheckpointError(
            f"{folder} has no complete checkpoint{hint}. Remove the run folder and start it again with `podium train`."
        )
    if step is not None and step not in {each.step for each in saved}:
        listed = ", ".join(str(each.step) for each in saved)
        raise CheckpointError(f"{folder} has no checkpoint of step {step}. There are: {listed}.")
    chosen = next(each for each in reversed(saved) if step is None or each.step == step)
    try:
        return CheckpointReader(chosen.folder)
    except CheckpointError as error:
        others = [each for each in saved if each.step != chosen.step and _is_usable(each.folder)]
        offer = (
            f"Step {others[-1].step} is whole: add --step {others[-1].step}." if others else "No other one is whole."
        )
        raise CheckpointError(f"{error} {offer}") from error


def _is_usable(folder: Path) -> bool:
    try:
        CheckpointReader(folder)
    except CheckpointError:
        return False
    return True


def _staged(tensor: Tensor) -> Tensor:
    """A copy in host memory that training cannot modify."""
    if tensor.is_cuda:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host
    return tensor.detach().clone()
