# SPDX-License-Identifier: Apache-2.0
"""The newest two steps in host memory, for workers that replace dead ones.

A snapshot is a checkpoint (checkpoint.py) in a folder of tmpfs: it outlives the processes that wrote it, but not the
machine. The files of the step before the last one are overwritten in place, so that a snapshot costs one copy of the
tensors. On CUDA the device copies them into these files itself, beside its other work, a few megabytes at a time. With
ranks on several nodes, each node has the shards of its own ranks and copies of those of another node.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from podium.cgroups import free_memory
from podium.engine.checkpoint import CheckpointReader
from podium.engine.checkpoint_files import PARTIAL, Extras, complete, saved_steps, write_json
from podium.engine.mesh import Mesh
from podium.engine.snapshot_copies import (
    SHARD_BYTES,
    MappedFile,
    RankNodes,
    ShardCopies,
    fetch_shard,
    held_shards,
    num_ranks,
    reused_file,
    whole_steps,
)
from podium.errors import CheckpointError, counted
from podium.models.tensor_shards import TensorShard

KEPT = 2
"""Snapshots that are kept: while one is written, the one before is whole."""
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 64
_SLACK_S = 5.0
# The most of the free memory that snapshots may take.
_MOST_OF_FREE = 0.5
_SNAPSHOT_S = 60.0
# Bytes that a device copies at a time. Its other copies, and whatever frees its memory, wait for what has begun.
_CHUNK_BYTES = 16 * 2**20


class MemorySnapshots:
    """Takes snapshots of one rank's state as long as that is possible: there is enough memory, and copies can be kept
    on another node if the ranks are on several."""

    def __init__(
        self, folder: Path, mesh: Mesh, *, node: str, pieces: Callable[[], Sequence[TensorShard]], copies: bool = False
    ) -> None:
        """`folder`: in host memory. `pieces`: the tensors of the state. `copies`: whether ranks on several nodes keep
        copies for each other; without, they have no snapshots."""
        self._folder, self._mesh, self._node, self._pieces = folder, mesh, node, pieces
        self._has_copies = copies
        self._writer: SnapshotWriter | None = None
        self._nodes: RankNodes | None = None
        self._reason: str | None = None

    def take(self, step: int, extras: Extras | Future[Extras]) -> str | None:
        """Begins the snapshot of a step, which is whole once its extras are known. Returns why there is none, if there
        is none. Collective."""
        if self._reason is None and self._writer is None:
            self._reason = self._why_not()
        if self._reason is not None:
            return self._reason
        if self._writer is None:
            self._writer = SnapshotWriter(self._folder, self._mesh, timeout_s=_SNAPSHOT_S, nodes=self._nodes)
        try:
            self._writer.save(step, self._pieces(), extras)
        except CheckpointError as error:  # training goes on without
            self._reason = str(error)
        return self._reason

    @property
    def copy_s(self) -> float:
        """How long the tensors of the last snapshot were copied that has ended."""
        return 0.0 if self._writer is None else self._writer.copy_s

    def wait_copied(self) -> None:
        """Until then the tensors of the last snapshot must not change."""
        if self._writer is not None:
            self._writer.wait_copied()

    def wait(self) -> None:
        """Waits until the last snapshot is whole; raises its error if it failed."""
        if self._writer is not None:
            self._writer.wait()

    def steps(self) -> tuple[int, ...]:
        """Steps of which the shards of all ranks are in the memory of some node, ascending. Collective."""
        return whole_steps(self._mesh.gather(held_shards(self._folder)))

    def read(self, step: int) -> CheckpointReader:
        """This rank's shard of a step, which comes from another node if need be. Collective."""
        held = self._mesh.gather(held_shards(self._folder))
        if step not in whole_steps(held):
            raise CheckpointError(f"the memory of the nodes does not hold the whole state after step {step}.")
        fetch_shard(self._folder, step, held, self._mesh)
        return CheckpointReader(self._folder / f"step-{step:08d}", ranks=(self._mesh.rank,))

    def forget_after(self, step: int) -> None:
        """Removes snapshots of later steps: these steps will be made again. Collective."""
        if self._is_first_of_node():
            for each in saved_steps(self._folder):
                if each.step > step:
                    shutil.rmtree(each.folder)
        self._mesh.barrier()

    def forget(self) -> None:
        """Removes all snapshots, also one that is not complete. Collective."""
        with suppress(CheckpointError):  # the last one may have failed
            self.wait()
        if self._is_first_of_node():
            shutil.rmtree(self._folder, ignore_errors=True)
        self._mesh.barrier()

    def _is_first_of_node(self) -> bool:
        nodes = RankNodes(tuple(self._mesh.gather(self._node)))
        return nodes.on_node_of(self._mesh.rank)[0] == self._mesh.rank

    def _why_not(self) -> str | None:
        """Why snapshots are not possible. Collective."""
        mine = sum(piece.local.numel() * piece.local.element_size() for piece in self._pieces())
        # All ranks must decide alike: one that stayed out would leave the others in a collective.
        names, sizes, frees = zip(*self._mesh.gather((self._node, mine, _free_bytes(self._folder))), strict=True)
        self._nodes = nodes = RankNodes(names)
        if nodes.count > 1 and not self._has_copies:
            return f"the ranks are on {nodes.count} nodes"
        for rank, name in enumerate(names):
            needed, free = KEPT * sum(sizes[each] for each in nodes.held_by_node_of(rank)), frees[rank]
            if needed > _MOST_OF_FREE * free:
                where = f" on {name}" if nodes.count > 1 else ""
                return f"they take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are free{where}"
        return None


def whole_snapshots(folder: Path) -> tuple[int, ...]:
    """Steps of snapshots of which a folder has all shards, ascending; see `held_shards`."""
    return tuple(step for step, ranks in held_shards(folder).items() if len(ranks) == num_ranks(folder, step))


class SnapshotWriter:
    """Writes the snapshots of one rank. `save` copies the tensors, or lets the device begin to; they must not change
    before `wait_copied`."""

    def __init__(self, folder: Path, mesh: Mesh, *, timeout_s: float, nodes: RankNodes | None = None) -> None:
        """`nodes`: of the ranks; by default, all are on one. Collective if they are on several."""
        nodes = nodes or RankNodes(("",) * mesh.world)
        self._folder, self._mesh, self._timeout_s = folder, mesh, timeout_s
        self._is_first = nodes.on_node_of(mesh.rank)[0] == mesh.rank  # which completes the snapshots of this node
        self._held = nodes.held_by_node_of(mesh.rank)
        self._copies = ShardCopies(nodes, mesh, timeout_s=timeout_s) if nodes.count > 1 else None
        self._files: dict[int, _TensorFile] = {}  # inode -> the file of this rank in one of the kept folders
        self._stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
        self._copying: _DeviceCopy | None = None
        self._jobs: SimpleQueue[_Job] | None = None  # of a thread that stays: to start one takes milliseconds
        self._done: threading.Event | None = None  # of the last snapshot
        self._failure: BaseException | None = None
        self.copy_s = 0.0  # of the last snapshot whose tensors are copied

    def save(self, step: int, pieces: Sequence[TensorShard], extras: Extras | Future[Extras]) -> None:
        """Makes the snapshot of a step, which is whole once the extras are known. Collective. Raises on all ranks if
        one of them failed to write, the snapshot before this one included. None is made while copies of the last one
        are still on their way to other nodes."""
        partial = self._folder / f"{PARTIAL}{step:08d}"
        failure: CheckpointError | None = None
        if self._copies is not None and self._is_any_busy():
            return  # the network is slower than the steps: the next one is taken
        try:
            self.wait()
            if self._is_first:
                self._recycle(partial)
        except (CheckpointError, OSError) as error:
            failure = error if isinstance(error, CheckpointError) else self._failed(error)
        # All ranks learn of it: one that stopped alone would leave the others waiting for it.
        num_failed = int(self._mesh.sum(torch.tensor(float(failure is not None))).item())
        if failure is not None:
            raise failure
        if num_failed:
            raise CheckpointError(f"a snapshot in {self._folder} failed on {counted(num_failed, 'other rank')}.")
        try:
            file = self._file(partial / f"rank-{self._mesh.rank:05d}.safetensors", pieces)
        except OSError as error:
            self._failure = error  # raised with the next snapshot; this one never becomes whole
            return
        if self._stream is None:
            began_s = time.monotonic()
            file.copy(pieces)
            self.copy_s = time.monotonic() - began_s
        else:
            self._copying = _DeviceCopy(file, pieces, self._stream, self._mesh.device)
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=self._serve, args=(self._jobs,), name="snapshots", daemon=True).start()
        self._done = threading.Event()
        self._jobs.put(_Job(partial, step, list(pieces), file, extras, self._copying, self._done))

    def wait_copied(self) -> None:
        """Until then the tensors of the last snapshot must not change."""
        if self._copying is not None:
            self._copying.wait(self._timeout_s)
            self._copying = None

    def wait(self) -> None:
        """Waits until the last snapshot is whole; raises its error if it failed."""
        if self._done is not None:
            if not self._done.wait(self._timeout_s + _SLACK_S):
                raise CheckpointError(f"a snapshot in {self._folder} is not complete after {self._timeout_s:.0f} s.")
            self._done = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise self._failed(failure) from failure

    def _is_any_busy(self) -> bool:
        """Whether a rank has not completed the last snapshot; the same on all ranks."""
        is_busy = self._done is not None and not self._done.is_set()
        return bool(self._mesh.sum(torch.tensor(float(is_busy))).item())

    def _failed(self, failure: BaseException) -> CheckpointError:
        return CheckpointError(f"a snapshot in {self._folder} failed: {failure}")

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
        for shard in free[0].glob("rank-*.safetensors"):
            if int(shard.stem.removeprefix("rank-")) not in self._held:  # of a rank that is on another node now
                shard.unlink()
        os.replace(free[0], partial)

    def _file(self, path: Path, pieces: Sequence[TensorShard]) -> _TensorFile:
        """This rank's file in the folder. It is written anew if the tensors are others than when it was written."""
        return reused_file(
            self._files, path, fits=lambda file: file.fits(pieces),
            make=lambda: _TensorFile(path, pieces, registers=self._stream is not None),
        )  # fmt: skip

    def _serve(self, jobs: SimpleQueue[_Job]) -> None:
        """Completes one snapshot after the other, until the process ends."""
        while True:
            job = jobs.get()
            self._finish(job)
            job.done.set()

    def _finish(self, job: _Job) -> None:
        """Writes this rank's index; the first rank of a node then waits (with a deadline) for those of all shards that
        the node holds, and for the extras."""
        try:
            if job.copying is not None:
                began_s = time.monotonic()
                job.copying.run()
                self.copy_s = time.monotonic() - began_s
            index = {
                piece.name: {"shape": piece.shape, "starts": piece.box.starts, "stops": piece.box.stops}
                for piece in job.pieces
            }
            partial, extras = job.partial, job.extras
            record = {"pieces": index, "files": {}, SHARD_BYTES: len(job.file.bytes)}
            write_json(partial / f"rank-{self._mesh.rank:05d}.json", record)
            if self._copies is not None:
                self._copies.exchange(partial, job.file.bytes, record)
            if not self._is_first:
                return
            expected = [partial / f"rank-{rank:05d}.json" for rank in self._held]
            deadline = time.monotonic() + self._timeout_s
            while missing := [path.name for path in expected if not path.exists()]:
                if time.monotonic() > deadline:
                    raise CheckpointError(f"{', '.join(missing)} did not appear within {self._timeout_s:.0f} s")
                time.sleep(0.001)
            if isinstance(extras, Future):
                extras = extras.result(self._timeout_s)
            complete(self._folder, partial, job.step, extras, ranks=self._mesh.world)
        except BaseException as error:
            self._failure = error


class _DeviceCopy:
    """Copies tensors of a CUDA device into a file in memory, in another thread than the one that created it."""

    def __init__(
        self, file: _TensorFile, pieces: Sequence[TensorShard], stream: torch.cuda.Stream, device: torch.device
    ) -> None:
        self._file, self._pieces, self._stream, self._device = file, pieces, stream, device
        self._written = torch.cuda.Event()  # the tensors have the values to copy
        self._written.record(torch.cuda.current_stream(device))
        self._ended = threading.Event()

    def run(self) -> None:
        """Copies chunk by chunk. The next one begins when the device has copied the one before."""
        try:
            with torch.no_grad(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._written.wait(self._stream)
                copied = torch.cuda.Event(blocking=True)
                for chunk in chunks(self._file.pairs(self._pieces), _CHUNK_BYTES):
                    for target, source in chunk:
                        target.copy_(source, non_blocking=True)
                    copied.record(self._stream)
                    copied.synchronize()
        finally:
            self._ended.set()

    def wait(self, timeout_s: float) -> None:
        """Waits until the tensors may change again."""
        if not self._ended.wait(timeout_s):
            raise CheckpointError(f"a device did not copy its tensors into host memory in {timeout_s:.0f} s.")


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A snapshot that is to be completed."""

    partial: Path
    step: int
    pieces: Sequence[TensorShard]
    file: _TensorFile  # where they are copied to
    extras: Extras | Future[Extras]
    copying: _DeviceCopy | None
    done: threading.Event


def chunks(pairs: Sequence[tuple[Tensor, Tensor]], most_bytes: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Splits copies (to, from) into parts of at most `most_bytes`; a larger tensor is cut, if it is contiguous."""
    chunk: list[tuple[Tensor, Tensor]] = []
    num_bytes = 0
    for target, source in pairs:
        size = source.element_size()
        count = max(1, most_bytes // size) if source.is_contiguous() else source.numel()
        to_parts, from_parts = [target], [source]
        if source.numel() > count:
            to_parts, from_parts = [list(each.view(-1).split(count)) for each in (target, source)]
        for to_part, from_part in zip(to_parts, from_parts, strict=True):
            if chunk and num_bytes + from_part.numel() * size > most_bytes:
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append((to_part, from_part))
            num_bytes += from_part.numel() * size
    if chunk:
        yield chunk


class _TensorFile(MappedFile):
    """A safetensors file in memory whose tensors are overwritten in place."""

    def __init__(self, path: Path, pieces: Sequence[TensorShard], *, registers: bool) -> None:
        self._layout = _layout_of(pieces)
        header, places, num_bytes = _header(pieces)
        super().__init__(path, num_bytes)
        whole = self.bytes
        whole[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        if registers:  # else the device would copy through a small buffer, and this process would wait for it
            code = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), num_bytes, 0))
            if code:
                raise OSError(f"CUDA cannot use {num_bytes} bytes of host memory (cudaHostRegister: error {code})")
        self._tensors: Mapping[str, Tensor] = {
            piece.name: whole[begin:end].view(piece.local.dtype).view(piece.local.shape)
            for piece in pieces
            for begin, end in (places[piece.name],)
        }

    def pairs(self, pieces: Sequence[TensorShard]) -> list[tuple[Tensor, Tensor]]:
        """Every tensor of the file, with the one that is to be copied there."""
        return [(self._tensors[piece.name], piece.local) for piece in pieces]

    def copy(self, pieces: Sequence[TensorShard]) -> None:
        """Copies the tensors into the file."""
        with torch.no_grad():
            for target, source in self.pairs(pieces):
                target.copy_(source)

    def fits(self, pieces: Sequence[TensorShard]) -> bool:
        """Whether it has room for these tensors."""
        return self._layout == _layout_of(pieces)


def _free_bytes(folder: Path) -> int:
    """Memory that files of this folder can take, with what they take already. They count towards the limits of the
    container, whose processes are killed if it takes more."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    taken = sum(file.stat().st_size for file in folder.glob("*/*.safetensors"))  # by processes that are gone
    free = shutil.disk_usage(there).free
    allowed = free_memory()
    if allowed is not None:
        free = min(free, allowed)
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free = min(free, int(value.split()[0]) * 1024)
    return free + taken


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
