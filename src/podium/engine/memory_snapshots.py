# SPDX-License-Identifier: Apache-2.0
"""The newest two steps in host memory, for workers that replace dead ones.

A snapshot is a checkpoint (checkpoint.py) in a folder of tmpfs: it outlives the processes that wrote it, but not the
machine. The files of the step before the last one are overwritten in place, so that a snapshot costs one copy of the
tensors. On CUDA the device copies them into these files itself, beside its other work.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from podium.engine.checkpoint_files import PARTIAL, Extras, complete, saved_steps, write_json
from podium.engine.mesh import Mesh
from podium.errors import CheckpointError
from podium.models.tensor_shards import TensorShard

KEPT = 2
"""Snapshots that are kept: while one is written, the one before is whole."""
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 64
_SLACK_S = 5.0


class SnapshotWriter:
    """Writes the snapshots of one rank. `save` copies the tensors, or lets the device begin to; they must not change
    before `wait_copied`."""

    def __init__(self, folder: Path, mesh: Mesh, *, timeout_s: float) -> None:
        self._folder, self._mesh, self._timeout_s = folder, mesh, timeout_s
        self._files: dict[int, _TensorFile] = {}  # inode -> the file of this rank in one of the kept folders
        self._stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, step: int, pieces: Sequence[TensorShard], extras: Extras) -> None:
        """Makes the snapshot of a step. Collective."""
        self.wait()
        partial, problem = self._folder / f"{PARTIAL}{step:08d}", None
        if self._mesh.is_main:
            try:
                self._recycle(partial)
            except OSError as error:  # the others wait for this rank
                problem = str(error)
        problem = self._mesh.gather(problem)[0]
        if problem is not None:
            raise CheckpointError(problem)
        file = self._file(partial / f"rank-{self._mesh.rank:05d}.safetensors", pieces)
        self._copy(file, pieces)
        self._thread = threading.Thread(
            target=self._finish, args=(partial, step, list(pieces), extras), name=f"snapshot-{step}", daemon=True
        )
        self._thread.start()

    def wait_copied(self) -> None:
        """Until then the tensors of the last snapshot must not change. On CUDA only the device waits."""
        if self._copied is not None:
            torch.cuda.current_stream(self._mesh.device).wait_event(self._copied)
            self._copied = None

    def wait(self) -> None:
        """Waits until the last snapshot is whole; raises its error if it failed."""
        if self._thread is not None:
            self._thread.join(self._timeout_s + _SLACK_S)
            if self._thread.is_alive():
                raise CheckpointError(f"a snapshot in {self._folder} is not complete after {self._timeout_s:.0f} s.")
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(f"a snapshot in {self._folder} failed: {failure}") from failure

    def _recycle(self, partial: Path) -> None:
        """The oldest folder becomes that of the new step. A folder that nobody completed is older than all."""
        for each in reversed([self._folder, *self._folder.parents]):
            each.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would let others read them
        unfinished = sorted(self._folder.glob(f"{PARTIAL}*"))
        saved = [each.folder for each in saved_steps(self._folder)]
        free = unfinished or (saved[: 1 - KEPT] if len(saved) >= KEPT else [])
        if not free:
            partial.mkdir()
            return
        for record in (free[0] / "checkpoint.json", *sorted(free[0].glob("rank-*.json"))):
            record.unlink(missing_ok=True)  # from now on it is no snapshot
        os.replace(free[0], partial)

    def _file(self, path: Path, pieces: Sequence[TensorShard]) -> _TensorFile:
        """This rank's file in the folder. It is written anew if the tensors are others than when it was written."""
        known = self._files.get(path.stat().st_ino) if path.exists() else None
        if known is not None and known.fits(pieces):
            return known
        path.unlink(missing_ok=True)
        there = {each.stat().st_ino for each in self._folder.glob(f"*/{path.name}")}
        self._files = {inode: each for inode, each in self._files.items() if inode in there}
        file = _TensorFile(path, pieces, registers=self._stream is not None)
        self._files[file.inode] = file
        return file

    def _copy(self, file: _TensorFile, pieces: Sequence[TensorShard]) -> None:
        with torch.no_grad():
            if self._stream is None:
                for piece in pieces:
                    file.tensors[piece.name].copy_(piece.local)
                return
            self._stream.wait_stream(torch.cuda.current_stream(self._mesh.device))
            with torch.cuda.stream(self._stream):
                for piece in pieces:
                    file.tensors[piece.name].copy_(piece.local, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def _finish(self, partial: Path, step: int, pieces: list[TensorShard], extras: Extras) -> None:
        """Writes this rank's index; rank 0 then waits (with a deadline) for those of all ranks."""
        try:
            if self._stream is not None:
                self._stream.synchronize()
            index = {
                piece.name: {"shape": piece.shape, "starts": piece.box.starts, "stops": piece.box.stops}
                for piece in pieces
            }
            write_json(partial / f"rank-{self._mesh.rank:05d}.json", {"pieces": index, "files": {}})
            if not self._mesh.is_main:
                return
            expected = [partial / f"rank-{rank:05d}.json" for rank in range(self._mesh.world)]
            deadline = time.monotonic() + self._timeout_s
            while missing := [path.name for path in expected if not path.exists()]:
                if time.monotonic() > deadline:
                    raise CheckpointError(f"{', '.join(missing)} did not appear within {self._timeout_s:.0f} s")
                time.sleep(0.001)
            complete(self._folder, partial, step, extras, ranks=self._mesh.world)
        except BaseException as error:
            self._failure = error


class _TensorFile:
    """A safetensors file in memory whose tensors are overwritten in place."""

    def __init__(self, path: Path, pieces: Sequence[TensorShard], *, registers: bool) -> None:
        self._layout = _layout_of(pieces)
        header, places, num_bytes = _header(pieces)
        with path.open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # a write to memory that is not there would end the process
            self.inode = os.fstat(file.fileno()).st_ino
            self._map = mmap.mmap(file.fileno(), num_bytes)
        self._map[: len(header)] = header
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        if registers:  # else the device would copy through a small buffer, and this process would wait for it
            torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), num_bytes, 0)
        self.tensors: Mapping[str, Tensor] = {
            piece.name: whole[begin:end].view(piece.local.dtype).view(piece.local.shape)
            for piece in pieces
            for begin, end in (places[piece.name],)
        }

    def fits(self, pieces: Sequence[TensorShard]) -> bool:
        """Whether it has room for these tensors."""
        return self._layout == _layout_of(pieces)


def _layout_of(pieces: Sequence[TensorShard]) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    return tuple((piece.name, piece.local.dtype, tuple(piece.local.shape)) for piece in pieces)


def _header(pieces: Sequence[TensorShard]) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The header of a safetensors file, where in the file each tensor is, and the size of the file."""
    entries: dict[str, Any] = {}
    offset = 0
    for piece in sorted(pieces, key=lambda each: -each.local.element_size()):  # so that each is aligned
        num_bytes = piece.local.numel() * piece.local.element_size()
        entries[piece.name] = {
            "dtype": _DTYPES[piece.local.dtype],
            "shape": list(piece.local.shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    begin = 8 + len(text)
    places = {
        name: (begin + entry["data_offsets"][0], begin + entry["data_offsets"][1]) for name, entry in entries.items()
    }
    return len(text).to_bytes(8, "little") + text, places, begin + offset
