# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on a disk that fails: what is whole stays, what is not is removed, and any flipped bit is noticed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.disks import fill
from helpers.engines import one_rank
from podium.engine import checkpoint
from podium.engine.checkpoint import CheckpointReader, CheckpointWriter, newest_usable
from podium.engine.checkpoint_files import Extras, SaveFailure, joined_state, saved_steps
from podium.engine.mesh import Mesh
from podium.errors import CheckpointError
from podium.models.tensor_shards import Box, TensorShard

EXTRAS = Extras(values={"updates": 7, "losses": {2: 0.5}}, arrays={"buffer": np.arange(5, dtype=np.int32)})


def pieces(numel: int = 40) -> list[TensorShard]:
    tensor = torch.arange(float(numel))
    return [TensorShard(name="weight", local=tensor, box=Box.whole(tensor.shape), shape=tuple(tensor.shape))]


def writer(folder: Path, mesh: Mesh | None = None, **values: Any) -> CheckpointWriter:
    settings = {"keep": 1, "keep_best": False, "background": True, "timeout_s": 20.0, **values}
    return CheckpointWriter(folder, mesh or one_rank(), **settings)


def saved(made: CheckpointWriter, step: int, numel: int = 40) -> Any:
    made.save(step, pieces(numel), EXTRAS)
    return made.finish()


def test_a_real_full_disk_keeps_the_whole_checkpoint_and_says_how_much_is_missing(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    made = writer(folder)
    assert saved(made, 1, 20_000) == "written"
    filler = fill(small_disk, leave=40_000)

    failure = saved(made, 2, 20_000)

    assert isinstance(failure, SaveFailure)
    assert (failure.step, failure.reason, failure.needed_bytes) == (2, "No space left on device", 80_000)
    assert failure.free_bytes is not None
    assert failure.free_bytes < 80_000
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]  # and no part of the other
    assert newest_usable(folder).step == 1
    filler.unlink()
    assert saved(made, 3, 20_000) == "written"
    assert [each.step for each in saved_steps(folder)] == [3]  # the old one is removed now


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_fault_is_returned_once_and_the_writer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    made = writer(tmp_path)

    def broken(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_tensors", broken)
        failure = saved(made, 1)
    assert isinstance(failure, SaveFailure)
    assert failure.reason == os.strerror(number)
    assert list(tmp_path.iterdir()) == []
    assert made.finish() == "idle"
    made.wait()
    assert saved(made, 2) == "written"


def test_an_error_that_is_not_the_disks_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = writer(tmp_path)

    def broken(*_: Any) -> None:
        raise ValueError("tensors share memory")

    monkeypatch.setattr(checkpoint, "save_tensors", broken)
    made.save(1, pieces(), EXTRAS)
    with pytest.raises(CheckpointError, match="share memory"):
        made.finish()


def test_a_folder_that_vanishes_while_it_is_written_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real = tmp_path / "run" / "checkpoints", checkpoint.save_tensors  # type: ignore[attr-defined]

    def removed(*args: Any) -> None:
        shutil.rmtree(tmp_path / "run")
        real(*args)

    made = writer(folder)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_tensors", removed)
        failure = saved(made, 1)
    assert isinstance(failure, SaveFailure)
    assert failure.reason == "the folder is gone"
    assert saved(made, 2) == "written"


class OfTwo(Mesh):
    """One of two ranks that share no process group."""

    def gather(self, value: Any) -> list[Any]:
        return [value if self.rank == 0 else True, value]


def rank_of_two(rank: int) -> Mesh:
    return OfTwo(rank=rank, world=2, device=torch.device("cpu"), devices=None)


def test_rank_0_does_not_wait_for_a_rank_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = writer(tmp_path, rank_of_two(0), timeout_s=60.0), writer(tmp_path, rank_of_two(1))
    first.save(1, pieces(), EXTRAS)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_tensors", full_disk)
        second.save(1, pieces(), EXTRAS)
        other = second.finish()
    mine = first.finish()  # well before its deadline: else the test times out

    assert isinstance(mine, SaveFailure)
    assert isinstance(other, SaveFailure)
    assert mine.is_consequence
    assert not other.is_consequence
    together = joined_state([mine, other])
    assert isinstance(together, SaveFailure)
    assert (together.reason, together.needed_bytes) == ("No space left on device", 320)
    assert list(tmp_path.iterdir()) == []


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_rank_0_gives_up_when_it_is_told_to(tmp_path: Path) -> None:
    first = writer(tmp_path, rank_of_two(0), timeout_s=60.0)
    first.save(1, pieces(), EXTRAS)
    assert first.state == "writing"
    state = first.finish(give_up=True)
    assert isinstance(state, SaveFailure)
    assert state.is_consequence


def test_states_of_ranks_join() -> None:
    assert joined_state(["idle", "idle"]) == "idle"
    assert joined_state(["written", "written"]) == "written"
    assert joined_state(["writing", "written"]) == "writing"


def test_a_step_saved_again_replaces_the_old_one_only_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = writer(tmp_path)
    assert saved(made, 2) == "written"
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "complete", full_disk)
        assert isinstance(saved(made, 2), SaveFailure)
    assert newest_usable(tmp_path).step == 2
    assert saved(made, 2) == "written"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_loss_that_the_disk_does_not_take_is_recorded_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = writer(tmp_path, keep=2)
    assert saved(made, 1) == "written"
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "record_loss", full_disk)
        assert made.grade(1, 0.25) == "No space left on device"
    assert saved(made, 2) == "written"
    assert [(each.step, each.heldout_loss) for each in saved_steps(tmp_path)] == [(1, 0.25), (2, None)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    made = writer(folder)
    made.save(1, pieces(), EXTRAS, heldout_loss=0.5)
    made.wait()
    return folder / "step-00000001"


FILES = ("checkpoint.json", "extras.safetensors", "rank-00000.json", "rank-00000.safetensors")


@pytest.mark.slow
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(name=st.sampled_from(FILES), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(whole: Path, name: str, at: float, bit: int) -> None:
    file = whole / name
    content = file.read_bytes()
    position = int(at * len(content))
    flipped = bytearray(content)
    flipped[position] ^= 1 << bit
    file.write_bytes(flipped)
    try:
        with pytest.raises(CheckpointError, match=r"step-00000001"):
            CheckpointReader(whole)
    finally:
        file.write_bytes(content)
    assert CheckpointReader(whole).extras().values == {"updates": 7, "losses": {"2": 0.5}}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_any_truncated_file_is_noticed(whole: Path, name: str, share: float) -> None:
    file = whole / name
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    try:
        with pytest.raises(CheckpointError, match=r"step-00000001"):
            CheckpointReader(whole)
    finally:
        file.write_bytes(content)


def test_a_save_ends_with_its_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    assert saved(writer(tmp_path), 1) == "written"
    assert threading.active_count() == before
