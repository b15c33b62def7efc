# SPDX-License-Identifier: Apache-2.0
"""Snapshots in host memory: what was written is read back, the one before stays whole, and files are overwritten in
place."""

from __future__ import annotations

import errno
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.engine import memory_snapshots
from podium.engine.checkpoint import CheckpointReader
from podium.engine.checkpoint_files import PARTIAL, Extras, saved_steps
from podium.engine.memory_snapshots import MemorySnapshots, SnapshotWriter, chunks, whole_snapshots
from podium.engine.mesh import Mesh
from podium.errors import CheckpointError
from podium.models.tensor_shards import Box, TensorShard

ALONE = Mesh(rank=0, world=1, device=torch.device("cpu"), devices=None)


def pieces_of(tensors: dict[str, Tensor]) -> list[TensorShard]:
    return [
        TensorShard(name=name, local=tensor, box=Box.whole(tensor.shape), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Of all kinds that a model has; sizes that are not multiples of 8 bytes come first."""
    return {
        "mask": torch.tensor([True, False, True]),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "weight": torch.randn(17, 3),
        "count": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "steps": torch.arange(3),
    }


def save(writer: SnapshotWriter, step: int, tensors: dict[str, Tensor]) -> None:
    writer.save(step, pieces_of(tensors), Extras(values={"at": step}, arrays={}))
    writer.wait_copied()


def test_a_snapshot_is_a_checkpoint(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    writer = SnapshotWriter(tmp_path / "policy", ALONE, timeout_s=5)
    save(writer, 4, tensors)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["weight"].add_(1.0)  # the next update must not change it
    writer.wait()

    reader = CheckpointReader(tmp_path / "policy" / "step-00000004")

    assert reader.step == 4
    assert reader.values == {"at": 4}
    for name, tensor in expected.items():
        assert torch.equal(reader.tensor(name), tensor), name
    loaded = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    reader.load(pieces_of(loaded))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_two_steps_are_kept_and_their_files_are_overwritten_in_place(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    writer = SnapshotWriter(tmp_path, ALONE, timeout_s=5)
    inodes = set()
    for step in range(1, 8):
        tensors["weight"].fill_(float(step))
        save(writer, step, tensors)
        writer.wait()
        inodes.add((tmp_path / f"step-{step:08d}" / "rank-00000.safetensors").stat().st_ino)

    assert [each.step for each in saved_steps(tmp_path)] == [6, 7]
    assert len(inodes) == 2
    for step in (6, 7):
        assert CheckpointReader(tmp_path / f"step-{step:08d}").tensor("weight").eq(step).all()


def test_a_writer_that_dies_in_a_snapshot_leaves_the_one_before(
    tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SnapshotWriter(tmp_path, ALONE, timeout_s=5)
    for step in (1, 2, 3):
        save(writer, step, tensors)
        writer.wait()
    monkeypatch.setattr(writer, "_finish", lambda *arguments: None)  # it is killed when the tensors are copied

    tensors["weight"].fill_(9.0)
    save(writer, 4, tensors)

    assert [each.step for each in saved_steps(tmp_path)] == [3]
    assert [path.name for path in tmp_path.glob(f"{PARTIAL}*")] == [f"{PARTIAL}00000004"]
    assert not CheckpointReader(tmp_path / "step-00000003").tensor("weight").eq(9.0).any()

    successor = SnapshotWriter(tmp_path, ALONE, timeout_s=5)  # of the worker that replaces it
    for step in (4, 5):
        save(successor, step, tensors)
        successor.wait()
    assert [each.step for each in saved_steps(tmp_path)] == [4, 5]
    assert CheckpointReader(tmp_path / "step-00000004").tensor("weight").eq(9.0).all()


SHARD, INDEX, RECORD, EXTRAS = "rank-00000.safetensors", "rank-00000.json", "checkpoint.json", "extras.safetensors"


@pytest.mark.parametrize(
    ("name", "position"),
    [
        (SHARD, None), (INDEX, None), (RECORD, None), (EXTRAS, None), (INDEX, 0.5), (RECORD, 0.5), (RECORD, 0.9),
        (EXTRAS, 0.5),
    ],
)  # fmt: skip
def test_a_snapshot_that_is_not_as_it_was_written_is_none(
    tmp_path: Path, tensors: dict[str, Tensor], name: str, position: float | None
) -> None:
    """A file is cut by one byte, or a bit at a position of it is flipped. The snapshot before it is whole."""
    snapshots = MemorySnapshots(tmp_path, ALONE, node="a", pieces=lambda: pieces_of(tensors))
    for step in (1, 2):
        tensors["weight"].fill_(float(step))
        snapshots.take(step, Extras(values={"at": step}, arrays={}))
        snapshots.wait_copied()
    snapshots.wait()
    assert (whole_snapshots(tmp_path), snapshots.steps()) == ((1, 2), (1, 2))
    path = tmp_path / "step-00000002" / name
    written = bytearray(path.read_bytes())

    if position is None:
        path.write_bytes(written[:-1])
    else:
        written[int(position * len(written))] ^= 1
        path.write_bytes(written)

    assert (whole_snapshots(tmp_path), snapshots.steps()) == ((1,), (1,))
    with pytest.raises(CheckpointError, match="does not hold the whole state after step 2"):
        snapshots.read(2)
    assert snapshots.read(1).tensor("weight").eq(1.0).all()


def test_tensors_of_other_shapes_get_a_new_file(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    writer = SnapshotWriter(tmp_path, ALONE, timeout_s=5)
    for step in (1, 2):
        save(writer, step, tensors)
        writer.wait()

    grown = {**tensors, "weight": torch.randn(40, 3)}
    save(writer, 3, grown)
    writer.wait()

    assert torch.equal(CheckpointReader(tmp_path / "step-00000003").tensor("weight"), grown["weight"])


def test_memory_that_is_not_there_is_an_error_and_not_a_crash(
    tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    writer = SnapshotWriter(tmp_path, ALONE, timeout_s=5)
    save(writer, 1, tensors)

    with pytest.raises(CheckpointError, match="No space left"):
        save(writer, 2, tensors)
    assert not saved_steps(tmp_path)


def test_an_error_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("podium.engine.memory_snapshots.complete", refuse)
    writer = SnapshotWriter(tmp_path, ALONE, timeout_s=5)
    save(writer, 1, tensors)

    with pytest.raises(CheckpointError, match="Input/output error"):
        writer.wait()


def test_others_cannot_read_it(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    writer = SnapshotWriter(tmp_path / "mine" / "run" / "policy", ALONE, timeout_s=5)
    save(writer, 1, tensors)
    writer.wait()

    for folder in (tmp_path / "mine", tmp_path / "mine" / "run", tmp_path / "mine" / "run" / "policy"):
        assert folder.stat().st_mode & 0o077 == 0, folder


class TestSnapshotsOfAStateThatMayNotFit:
    def snapshots(self, folder: Path, tensors: dict[str, Tensor], mesh: Mesh = ALONE) -> MemorySnapshots:
        return MemorySnapshots(folder, mesh, node="a", pieces=lambda: pieces_of(tensors))

    def test_it_is_whole_once_its_extras_are_known(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        snapshots, extras = self.snapshots(tmp_path, tensors), Future[Extras]()

        assert snapshots.take(1, extras) is None
        assert whole_snapshots(tmp_path) == ()
        before = tensors["weight"].clone()
        tensors["weight"].add_(1.0)
        extras.set_result(Extras(values={"skipped": 2}, arrays={}))
        snapshots.wait()

        assert whole_snapshots(tmp_path) == (1,)
        reader = CheckpointReader(tmp_path / "step-00000001")
        assert reader.values == {"skipped": 2}
        assert torch.equal(reader.tensor("weight"), before)

    def test_too_little_memory_is_the_reason_and_nothing_is_written(
        self, tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory_snapshots, "_free_bytes", lambda folder: 100)
        snapshots = self.snapshots(tmp_path / "memory", tensors)

        for step in (1, 2):
            assert "of memory are free" in (snapshots.take(step, Extras(values={}, arrays={})) or "")
        assert not (tmp_path / "memory").exists()

    def test_a_container_that_allows_less_than_is_free_is_the_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        big = {"weight": torch.zeros(2**16)}  # two snapshots take 512 KiB
        for allowed, is_enough in ((2**20 - 1, False), (2**20, True), (None, True)):
            monkeypatch.setattr(memory_snapshots, "free_memory", lambda: allowed)  # noqa: B023
            reason = self.snapshots(tmp_path / f"{allowed}", big).take(1, Extras(values={}, arrays={}))
            assert (reason is None) == is_enough, reason

    def test_memory_of_processes_that_are_gone_counts_as_free(
        self, tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = SimpleNamespace(free=2**20)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
        big = {"weight": torch.zeros(2**16)}  # two snapshots take half of what is free
        first = self.snapshots(tmp_path, big)
        for step in (1, 2):
            assert first.take(step, Extras(values={}, arrays={})) is None
        first.wait()
        usage.free = 2**19

        assert self.snapshots(tmp_path, big).take(3, Extras(values={}, arrays={})) is None

    def test_ranks_on_several_nodes_take_none(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        mesh = TwoNodes(rank=0, world=2, device=torch.device("cpu"), devices=None)

        reason = self.snapshots(tmp_path, tensors, mesh).take(1, Extras(values={}, arrays={}))

        assert reason == "the ranks are on 2 nodes"

    def test_a_failure_ends_them_with_its_reason(
        self, tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(handle: int, begin: int, size: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        snapshots = self.snapshots(tmp_path, tensors)

        reasons = [snapshots.take(step, Extras(values={}, arrays={})) for step in (1, 2, 3)]

        assert reasons[0] is None
        assert "No space left" in (reasons[1] or "")
        assert reasons[2] == reasons[1]

    def test_one_of_another_rank_ends_them_too(self, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
        mesh = OtherFails(rank=0, world=2, device=torch.device("cpu"), devices=None)

        reason = self.snapshots(tmp_path, tensors, mesh).take(1, Extras(values={}, arrays={}))

        assert "failed on 1 other rank." in (reason or "")


class TwoNodes(Mesh):
    def gather(self, value: Any) -> list[Any]:
        return [value, ("b", *value[1:])]


class OtherFails(Mesh):
    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def sum(self, values: Tensor) -> Tensor:
        return values + 1


def test_chunks_cut_large_tensors_and_join_small_ones() -> None:
    sources = [torch.arange(5.0), torch.tensor(7.0), torch.empty(0), torch.arange(6.0).view(2, 3), torch.ones(3, 4).T]
    targets = [torch.full(each.shape, -1.0) for each in sources]
    found = list(chunks(list(zip(targets, sources, strict=True)), 12))
    assert [sum(source.numel() for _, source in chunk) for chunk in found] == [3, 3, 3, 3, 12]  # 4 bytes each
    for chunk in found:
        for target, source in chunk:
            target.copy_(source)
    for target, source in zip(targets, sources, strict=True):
        torch.testing.assert_close(target, source, rtol=0, atol=0)
