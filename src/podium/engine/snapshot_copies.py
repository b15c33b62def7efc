# SPDX-License-Identifier: Apache-2.0
"""Copies of snapshots on other nodes, so that a node may be lost with everything in its memory.

Each rank sends the file of its shard to a rank on another node, in the background. A rank that is started again on a
node without the file of its shard gets it from one that has it.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from podium.engine.checkpoint_files import SavedCheckpoint, read_json, write_json
from podium.engine.mesh import Mesh
from podium.errors import CheckpointError

# Of one message. Gloo keeps a message that nobody has asked for yet with its sender.
_MESSAGE_BYTES = 64 * 2**20
SHARD_BYTES = "bytes"
"""Key of a shard's size in its index."""


@dataclass(frozen=True, slots=True)
class RankNodes:
    """The node of every rank, and which ranks' shards its memory holds."""

    nodes: tuple[str, ...]  # by rank

    @property
    def count(self) -> int:
        """Different nodes."""
        return len(set(self.nodes))

    def on_node_of(self, rank: int) -> tuple[int, ...]:
        """Ranks on the node of `rank`. The first of them completes the node's snapshots."""
        return tuple(each for each, node in enumerate(self.nodes) if node == self.nodes[rank])

    def keeper_of(self, rank: int) -> int | None:
        """The rank on the next node that keeps a copy of the shard of `rank`; None: there is only one node."""
        if self.count == 1:
            return None
        names = list(dict.fromkeys(self.nodes))
        following = names[(names.index(self.nodes[rank]) + 1) % len(names)]
        there = [each for each, node in enumerate(self.nodes) if node == following]
        return there[self.on_node_of(rank).index(rank) % len(there)]

    def kept_by(self, rank: int) -> tuple[int, ...]:
        """Ranks of whose shards `rank` keeps a copy."""
        return tuple(each for each in range(len(self.nodes)) if self.keeper_of(each) == rank)

    def held_by_node_of(self, rank: int) -> tuple[int, ...]:
        """Ranks whose shards are in the memory of this node: its own, and copies."""
        mine = self.on_node_of(rank)
        return tuple(sorted({*mine, *(copy for each in mine for copy in self.kept_by(each))}))


class MappedFile:
    """A file in memory of a fixed size, as bytes that can be written in place."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        with path.open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # a write to memory that is not there would end the process
            self.inode = os.fstat(file.fileno()).st_ino
            self._map = mmap.mmap(file.fileno(), num_bytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)


FileT = TypeVar("FileT", bound=MappedFile)


class ShardCopies:
    """Sends the shards of one rank to its keeper, and keeps those of others. Used by one thread at a time, and over a
    process group of its own: training uses the other one meanwhile."""

    def __init__(self, nodes: RankNodes, mesh: Mesh, *, timeout_s: float) -> None:
        """Collective."""
        self._nodes, self._rank = nodes, mesh.rank
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._files: dict[int, MappedFile] = {}  # inode -> file of a copy

    def exchange(self, folder: Path, shard: Tensor, index: Mapping[str, Any]) -> None:
        """Sends the file of this rank's shard with its index, and writes those that come into the folder. An index is
        written when its shard is there."""
        keeper = self._nodes.keeper_of(self._rank)
        assert keeper is not None
        sent = _send(keeper, shard, index, self._group)
        for rank in self._nodes.kept_by(self._rank):
            num_bytes, its_index = _receive_head(rank, self._group)
            _receive_body(rank, self._file(_shard_file(folder, rank), num_bytes).bytes, self._group)
            write_json(_index_file(folder, rank), its_index)
        for work in sent:
            work.wait()

    def _file(self, path: Path, num_bytes: int) -> MappedFile:
        return reused_file(
            self._files, path, fits=lambda file: len(file.bytes) == num_bytes, make=lambda: MappedFile(path, num_bytes)
        )


def reused_file(
    files: dict[int, FileT], path: Path, *, fits: Callable[[FileT], bool], make: Callable[[], FileT]
) -> FileT:
    """The file at a path if it is one of `files` (by inode) and fits; else it is made anew. Files of this name that are
    in no folder of a snapshot any more are forgotten."""
    known = files.get(path.stat().st_ino) if path.exists() else None
    if known is not None and fits(known):
        return known
    path.unlink(missing_ok=True)
    there = {each.stat().st_ino for each in path.parent.parent.glob("*/rank-*.safetensors")}
    for inode in files.keys() - there:
        del files[inode]
    file = make()
    files[file.inode] = file
    return file


def held_shards(folder: Path) -> dict[int, tuple[int, ...]]:
    """Ranks whose shards a folder of snapshots has, by step. A snapshot that was just being overwritten is none, and
    neither is what is not as it was written: records by their checksums, shards by their size."""
    found: dict[int, tuple[int, ...]] = {}
    for place in sorted(folder.glob("step-*")):
        ranks = [int(index.stem.removeprefix("rank-")) for index in sorted(place.glob("rank-*.json"))]
        if held := tuple(rank for rank in ranks if _is_as_written(place, rank)):
            found[int(place.name.removeprefix("step-"))] = held
    return found


def num_ranks(folder: Path, step: int) -> int:
    """Ranks of whose shards a snapshot consists."""
    return int(read_json(folder / f"step-{step:08d}" / "checkpoint.json")["ranks"])


def _is_as_written(place: Path, rank: int) -> bool:
    """Whether nobody has cut or changed a shard's record, and its file has the size that it was written with. Its bytes
    are not read: a checksum of them would take at least as long as the copy, after every step."""
    try:
        SavedCheckpoint(place, ranks=(rank,))
        return read_json(_index_file(place, rank)).get(SHARD_BYTES) == _size(place, rank)
    except (CheckpointError, OSError):
        return False


def whole_steps(held: Sequence[Mapping[int, Sequence[int]]]) -> tuple[int, ...]:
    """Steps of which somebody holds the shard of every rank, from what each rank's node holds."""
    ranks: dict[int, set[int]] = {}
    for each in held:
        for step, there in each.items():
            ranks.setdefault(step, set()).update(there)
    return tuple(sorted(step for step, there in ranks.items() if there >= set(range(len(held)))))


def fetch_shard(folder: Path, step: int, held: Sequence[Mapping[int, Sequence[int]]], mesh: Mesh) -> None:
    """Gets this rank's shard of a step if its node does not hold it. Collective: ranks that hold the shards of others
    send them, one after the other. `held`: what each rank's node holds."""
    place = folder / f"step-{step:08d}"
    for rank in range(mesh.world):
        if rank in held[rank].get(step, ()):
            continue
        sender = next(each for each in range(mesh.world) if rank in held[each].get(step, ()))
        if mesh.rank == sender:
            whole = torch.from_file(str(_shard_file(place, rank)), size=_size(place, rank), dtype=torch.uint8)
            head = {"index": read_json(_index_file(place, rank)), "record": _record_of(place)}
            for work in _send(rank, whole, head, None):
                work.wait()
        elif mesh.rank == rank:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            num_bytes, head = _receive_head(sender, None)
            file = _shard_file(place, rank)
            file.unlink(missing_ok=True)  # of a snapshot that was given up
            _receive_body(sender, MappedFile(file, num_bytes).bytes, None)
            write_json(_index_file(place, rank), head["index"])
            _write_record(place, head["record"])


def _record_of(place: Path) -> dict[str, str]:
    """The files of a snapshot beside the shards, as text."""
    return {name: (place / name).read_bytes().hex() for name in ("extras.safetensors", "checkpoint.json")}


def _write_record(place: Path, record: Mapping[str, str]) -> None:
    for name, text in record.items():  # checkpoint.json comes last
        temporary = place / f".{os.getpid()}-{name}"  # other ranks of this node may write the same
        temporary.write_bytes(bytes.fromhex(text))
        os.replace(temporary, place / name)


def _send(to: int, shard: Tensor, head: Mapping[str, Any], group: dist.ProcessGroup | None) -> list[dist.Work]:
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    messages = [torch.tensor([len(text), len(shard)]), text, *shard.split(_MESSAGE_BYTES)]
    works = [dist.isend(each, to, group=group) for each in messages]
    return [work for work in works if work is not None]


def _receive_head(sender: int, group: dist.ProcessGroup | None) -> tuple[int, dict[str, Any]]:
    """The size of the shard that follows, and what was sent with it."""
    sizes = torch.empty(2, dtype=torch.int64)
    dist.recv(sizes, sender, group=group)
    text = torch.empty(int(sizes[0]), dtype=torch.uint8)
    dist.recv(text, sender, group=group)
    values: dict[str, Any] = json.loads(text.numpy().tobytes())
    return int(sizes[1]), values


def _receive_body(sender: int, target: Tensor, group: dist.ProcessGroup | None) -> None:
    for part in target.split(_MESSAGE_BYTES):
        dist.recv(part, sender, group=group)


def _shard_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def _index_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _size(folder: Path, rank: int) -> int:
    return _shard_file(folder, rank).stat().st_size
