# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on one rank: round trip, retention, damage, a full disk."""

from __future__ import annotations

import errno
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from helpers.engines import one_rank
from podium.engine import checkpoint, checkpoint_files
from podium.engine.checkpoint import CheckpointReader, CheckpointWriter, newest_usable
from podium.engine.checkpoint_files import Extras, SavedStep, best_step, saved_steps, set_aside_later, to_remove
from podium.errors import CheckpointError
from podium.models.tensor_shards import Box, TensorShard

EXTRAS = Extras(values={"updates": 7, "loader": {"epoch": 1}}, arrays={"buffer": np.arange(5, dtype=np.int32)})


def pieces(fill: float = 0.0) -> list[TensorShard]:
    tensors = {
        "weight/a": torch.arange(12.0).reshape(4, 3) + fill,
        "weight/b": torch.full((5,), 2.5 + fill),
        "weight/scalar": torch.tensor(3.0 + fill),
    }
    return [
        TensorShard(name=name, local=tensor, box=Box.whole(tensor.shape), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def blank() -> list[TensorShard]:
    made = pieces()
    for piece in made:
        piece.local.fill_(-1.0)
    return made


def writer(folder: Path, **values: Any) -> CheckpointWriter:
    settings = {"keep": 2, "keep_best": False, "background": True, "timeout_s": 20.0, **values}
    return CheckpointWriter(folder, one_rank(), **settings)


def save(folder: Path, *steps: int, losses: dict[int, float] | None = None, **values: Any) -> None:
    made = writer(folder, **values)
    for step in steps:
        made.save(step, pieces(step), EXTRAS, heldout_loss=(losses or {}).get(step))
    made.wait()


@pytest.mark.parametrize("background", [True, False])
def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path, background: bool) -> None:
    save(tmp_path, 3, background=background)
    reader, found = newest_usable(tmp_path), blank()
    reader.load(found)
    assert reader.step == 3
    assert all(torch.equal(mine.local, saved.local) for mine, saved in zip(found, pieces(3), strict=True))
    extras = reader.extras()
    assert extras.values == EXTRAS.values
    assert extras.arrays["buffer"].tolist() == [0, 1, 2, 3, 4]
    assert extras.arrays["buffer"].dtype == np.int32
    assert reader.shapes() == {"weight/a": (4, 3), "weight/b": (5,), "weight/scalar": ()}


def test_a_part_of_a_tensor_is_read_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    local = torch.zeros(2, 3)
    newest_usable(tmp_path).load([TensorShard(name="weight/a", local=local, box=Box((1, 0), (3, 3)), shape=(4, 3))])
    assert local.tolist() == [[4, 5, 6], [7, 8, 9]]


def test_training_on_while_it_is_written_does_not_change_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, plain = threading.Event(), checkpoint.save_tensors  # type: ignore[attr-defined]

    def held_back(*args: Any) -> None:
        assert may_write.wait(20)
        plain(*args)

    monkeypatch.setattr(checkpoint, "save_tensors", held_back)
    made, live = writer(tmp_path), pieces()
    made.save(1, live, EXTRAS, heldout_loss=None)
    for piece in live:
        piece.local.fill_(99.0)
    may_write.set()
    made.wait()
    found = blank()
    newest_usable(tmp_path).load(found)
    assert torch.equal(found[0].local, pieces()[0].local)


def test_nothing_in_it_is_executable_and_no_partial_folder_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    names = sorted(path.name for path in (tmp_path / "step-00000001").iterdir())
    assert names == ["checkpoint.json", "extras.safetensors", "rank-00000.json", "rank-00000.safetensors"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    assert [each.step for each in saved_steps(tmp_path)] == [3, 4]


def test_the_best_is_kept_besides(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, losses={1: 0.5, 2: 0.2, 3: 0.9, 4: 0.3}, keep=1, keep_best=True)
    assert [each.step for each in saved_steps(tmp_path)] == [2, 4]
    best = best_step(saved_steps(tmp_path))
    assert best is not None
    assert (best.step, best.heldout_loss) == (2, 0.2)


def listed(*losses: float | None) -> list[SavedStep]:
    return [
        SavedStep(step=step, folder=Path(str(step)), heldout_loss=loss) for step, loss in enumerate(losses, start=1)
    ]


@pytest.mark.parametrize(
    ("losses", "keep", "keep_best", "removed"),
    [
        ((None, None, None), 2, False, [1]),
        ((None, None, None), 3, False, []),
        ((None, None), 5, False, []),
        ((0.1, 0.2, 0.3), 1, False, [1, 2]),
        ((0.1, 0.2, 0.3), 1, True, [2]),
        ((0.2, 0.2, 0.3), 1, True, [1]),  # of two equals the newer
        ((0.3, 0.2, 0.1), 1, True, [1, 2]),
        ((None, 0.2, None), 1, True, [1]),
        ((None, None, None), 1, True, [1, 2]),
    ],
)
def test_what_is_removed(losses: tuple[float | None, ...], keep: int, keep_best: bool, removed: list[int]) -> None:
    assert [each.step for each in to_remove(listed(*losses), keep=keep, keep_best=keep_best)] == removed


def test_the_step_that_a_run_was_resumed_from_stays():
    saved = listed(None, None, None, None)

    removed = to_remove(saved, keep=1, keep_best=False, resumed=saved[1].step)

    assert removed == [saved[0], saved[2]]


def test_the_same_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 2)
    made = writer(tmp_path)
    made.save(2, pieces(100), EXTRAS, heldout_loss=None)
    made.wait()
    found = blank()
    newest_usable(tmp_path).load(found)
    assert found[1].local.tolist() == [102.5] * 5


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


Damage = Callable[[Path], None]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("rank-00000.safetensors", flip_a_byte),
        ("rank-00000.safetensors", cut),
        ("rank-00000.safetensors", Path.unlink),
        ("rank-00000.json", Path.unlink),
        ("rank-00000.json", cut),
        ("extras.safetensors", flip_a_byte),
        ("extras.safetensors", Path.unlink),
        ("checkpoint.json", cut),
        ("checkpoint.json", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_offered(tmp_path: Path, name: str, damage: Damage) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / name)
    with pytest.raises(CheckpointError, match=rf"step-00000002/{name} .*--step 1\b") as found:
        newest_usable(tmp_path)
    assert "damaged" in str(found.value) or "missing" in str(found.value)
    assert newest_usable(tmp_path, 1).step == 1


def test_binary_rubbish_in_the_record_is_damage_too(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "checkpoint.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json .*--step 1\b"):
        newest_usable(tmp_path)


def test_when_none_is_whole_that_is_said(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flip_a_byte(tmp_path / "step-00000001" / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"step-00000001/rank-00000\.safetensors") as found:
        newest_usable(tmp_path)
    assert "--step" not in str(found.value)


def test_a_missing_ranks_file_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    record = tmp_path / "step-00000001" / "checkpoint.json"
    checkpoint_files._write_record(record, {**json.loads(record.read_text()), "ranks": 2})
    with pytest.raises(CheckpointError, match=r"rank-00001\.json"):
        CheckpointReader(tmp_path / "step-00000001")


def test_another_format_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    record = tmp_path / "step-00000001" / "checkpoint.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match=r"format 99\b.*format 2\b"):
        newest_usable(tmp_path)


def test_a_save_that_never_completed_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".partial-00000002").mkdir()
    with pytest.raises(CheckpointError, match=r"\.partial-00000002.*podium train"):
        newest_usable(tmp_path)
    save(tmp_path, 1)
    assert newest_usable(tmp_path).step == 1


def test_what_a_killed_save_left_does_not_get_into_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / ".partial-00000001"
    left.mkdir()
    (left / "rank-00007.safetensors").write_bytes(b"half")
    save(tmp_path, 1)
    assert not list(tmp_path.rglob("rank-00007*"))
    assert newest_usable(tmp_path).step == 1


def test_a_step_that_was_not_saved_is_answered_with_those_that_were(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match=r"step 9\b.* 1, 2\b"):
        newest_usable(tmp_path, 9)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    reader = newest_usable(tmp_path)
    wider = TensorShard(name="weight/a", local=torch.zeros(4, 5), box=Box.whole((4, 5)), shape=(4, 5))
    with pytest.raises(CheckpointError, match=r"weight/a .*\(4, 3\).*\(4, 5\)"):
        reader.load([wider])
    other = TensorShard(name="weight/z", local=torch.zeros(1), box=Box.whole((1,)), shape=(1,))
    with pytest.raises(CheckpointError, match=r"weight/z .*\(1,\)"):
        reader.load([other])


def save_and_wait(made: CheckpointWriter, step: int) -> None:
    made.save(step, pieces(), EXTRAS, heldout_loss=None)
    made.wait()


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("module", "where"),
    [(checkpoint, "save_tensors"), (checkpoint, "write_json"), (checkpoint_files, "save_file"),
     (checkpoint_files, "write_json")],
)  # fmt: skip
def test_a_full_disk_is_said_and_the_previous_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, where: str, background: bool
) -> None:
    save(tmp_path, 1)
    made = writer(tmp_path, background=background)
    with monkeypatch.context() as patched:
        patched.setattr(module, where, full_disk)
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(tmp_path))}.*No space"):
            save_and_wait(made, 2)
    assert [each.step for each in saved_steps(tmp_path)] == [1]
    assert newest_usable(tmp_path).step == 1
    # With room again, the same writer goes on.
    save_and_wait(made, 3)
    assert newest_usable(tmp_path).step == 3


def test_a_disk_that_does_not_answer_is_said_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(checkpoint, "_SLACK_S", 0.0)
    monkeypatch.setattr(checkpoint, "save_tensors", lambda *_: may_end.wait(20))
    made = writer(tmp_path, timeout_s=0.05)
    made.save(1, pieces(), EXTRAS, heldout_loss=None)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(tmp_path))}.*checkpoint\.timeout_s"):
        made.wait()
    may_end.set()


def test_a_rank_that_never_writes_its_part_is_named_after_the_deadline(tmp_path: Path) -> None:
    from podium.engine.mesh import Mesh

    class Alone(Mesh):
        """Rank 0 of two, where the other one never comes."""

        def gather(self, value: Any) -> list[Any]:
            return [value, value]

    mesh = Alone(rank=0, world=2, device=torch.device("cpu"), devices=None)
    made = CheckpointWriter(tmp_path, mesh, keep=1, keep_best=False, background=False, timeout_s=0.2)
    with pytest.raises(CheckpointError, match=r"rank-00001\.json|checkpoint\.timeout_s"):
        save_and_wait(made, 1)
    assert saved_steps(tmp_path) == []


def test_a_run_that_goes_back_leaves_its_later_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 6, keep=3)

    assert set_aside_later(tmp_path, 2) == [4, 6]
    assert newest_usable(tmp_path).step == 2
    assert sorted(path.name for path in tmp_path.glob(".superseded-*")) == [
        ".superseded-00000004",
        ".superseded-00000006",
    ]

    save(tmp_path, 4, keep=3)  # the same step again, of the new line
    assert newest_usable(tmp_path).step == 4
    assert [path.name for path in tmp_path.glob(".superseded-*")] == [".superseded-00000006"]
    assert set_aside_later(tmp_path, 2) == [4]


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    saved = [
        SavedStep(step=1, folder=Path(), heldout_loss=float("nan")),
        SavedStep(step=2, folder=Path(), heldout_loss=9.0),
    ]
    best = best_step(saved)
    assert best is not None
    assert best.step == 2
    assert best_step(saved[:1]) is None


def test_a_checkpoint_is_graded_after_it_was_written(tmp_path: Path) -> None:
    made = writer(tmp_path, keep=1, keep_best=True)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0), (4, 4.0)):
        made.save(step, pieces(step), EXTRAS)
        made.grade(step, loss)
    assert [(each.step, each.heldout_loss) for each in saved_steps(tmp_path)] == [(2, 1.0), (4, 4.0)]
    assert newest_usable(tmp_path).step == 4


def test_other_folders_beside_the_checkpoints_are_let_be(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-00000001.bak").mkdir()
    assert [each.step for each in saved_steps(tmp_path)] == [1]
