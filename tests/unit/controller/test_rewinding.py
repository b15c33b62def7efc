# SPDX-License-Identifier: Apache-2.0
"""To which step a run goes back, and which files are read for that."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.made_batches import on_policy_recipe
from helpers.trials import write_prompts
from podium.controller import rewinding
from podium.controller.assembly import Inputs
from podium.controller.layout import role_names
from podium.controller.rewinding import milestones_of_killed, rewind
from podium.engine import checkpoint, checkpoint_files
from podium.engine.checkpoint import CheckpointWriter
from podium.engine.checkpoint_files import (
    Extras,
    SaveState,
    complete,
    fingerprint,
    newest_whole,
    saved_steps,
    write_json,
)
from podium.engine.mesh import Mesh
from podium.models.tensor_shards import Box, TensorShard
from podium.runs.folder import RunFolder


class Role:
    """A role that learns. It is its own group of one rank, and remembers what it restored."""

    def __init__(self, *in_memory: int) -> None:
        self._in_memory = in_memory
        self.restored: list[tuple[int, str]] = []

    def requires(self, *methods: Any) -> None:
        """It has all."""

    def within(self, seconds: float, *, work_only: bool = False) -> Role:
        return self

    async def call_all(self, method: Any, *args: Any) -> Sequence[Any]:
        return [SimpleNamespace(value=getattr(self, method.__name__)(*args))]

    def snapshots(self) -> tuple[int, ...]:
        return self._in_memory

    def finish_saving(self) -> SaveState:
        """It saves nothing."""
        return "idle"

    def restore(self, step: int, source: str) -> Mapping[str, Any]:
        self.restored.append((step, source))
        return {"after": step}


class Workers:
    """All live."""

    pools: tuple[str, ...] = ()
    num_attached = 0

    def __init__(self, policy: Role, critic: Role | None = None) -> None:
        self._roles = {"policy": policy, "critic": critic}

    def role(self, name: str, kind: type[Any]) -> Any:
        return self._roles[name]


class Resumed(Inputs):
    """Prompts are not read again."""

    def rewound(self, step: int, saved: Mapping[str, Any]) -> Any:
        return step, saved


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of checkpoints of which all bytes were read."""
    files: list[str] = []

    def noted(path: Path) -> dict[str, int]:
        files.append(f"{path.parent.name}/{path.name}")
        return fingerprint(path)

    monkeypatch.setattr(checkpoint_files, "fingerprint", noted)
    return files


def tensors_of(reads: Sequence[str]) -> set[int]:
    """Steps of which tensors were read."""
    return {int(each.split("/")[0].removeprefix("step-")) for each in reads if each.endswith("rank-00000.safetensors")}


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        partial = folder / f".partial-{step:08d}"
        partial.mkdir(parents=True)
        tensors = partial / "rank-00000.safetensors"
        tensors.write_bytes(b"tensors of step %d" % step)
        write_json(partial / "rank-00000.json", {"pieces": {}, "files": {tensors.name: fingerprint(tensors)}})
        complete(folder, partial, step, Extras(values={"cursor": None}, arrays={}), ranks=1)


def damage(folder: Path, step: int) -> None:
    file = folder / f"step-{step:08d}" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)


def inputs_of(tmp_path: Path, *overrides: str, begin: int | None = None) -> Inputs:
    recipe = on_policy_recipe(f"data.train.0.path={write_prompts(tmp_path / 'train.jsonl', 4)}", *overrides)
    (tmp_path / "run").mkdir()
    empty: Any = None
    return Resumed(
        recipe=recipe, folder=RunFolder(path=tmp_path / "run"), resume_step=begin, saved={"begin": True},
        tokenizer=empty, prompts=empty, heldout=(), heldout_skipped=(),
    )  # fmt: skip


def go_back(inputs: Inputs, workers: Workers, *, are_new: bool = False, saving: int | None = None) -> Any:
    names: Any = role_names(inputs.recipe)
    fakes: Any = workers
    return asyncio.run(rewind(inputs, names, fakes, committed=0, are_new=are_new, saving=saving))


def test_no_tensor_file_is_read_where_a_snapshot_is_newer_than_all_checkpoints(
    tmp_path: Path, reads: list[str]
) -> None:
    inputs, policy = inputs_of(tmp_path), Role(6, 7)
    save(inputs.folder.checkpoints, 3, 6)
    reads.clear()

    assert go_back(inputs, Workers(policy)) == (7, {"after": 7})

    assert policy.restored == [(7, "memory")]
    assert reads == []


def test_only_the_newest_checkpoint_is_read_where_it_is_newer_than_the_snapshots(
    tmp_path: Path, reads: list[str]
) -> None:
    inputs, policy = inputs_of(tmp_path), Role(3, 4)
    save(inputs.folder.checkpoints, 3, 6, 9)
    reads.clear()

    assert go_back(inputs, Workers(policy))[0] == 9

    assert policy.restored == [(9, "checkpoint")]
    assert tensors_of(reads) == {9}


@pytest.mark.parametrize(("in_memory", "expected"), [((), (6, "checkpoint")), ((7, 8), (8, "memory"))])
def test_a_damaged_checkpoint_is_passed_over_and_set_aside(
    tmp_path: Path, reads: list[str], in_memory: tuple[int, ...], expected: tuple[int, str]
) -> None:
    inputs, policy = inputs_of(tmp_path), Role(*in_memory)
    save(inputs.folder.checkpoints, 3, 6, 9)
    damage(inputs.folder.checkpoints, 9)
    reads.clear()

    go_back(inputs, Workers(policy))

    assert policy.restored == [expected]
    assert tensors_of(reads) == ({9} if in_memory else {9, 6})
    # It must not count as the newest one: the next death would read it again.
    assert [each.step for each in saved_steps(inputs.folder.checkpoints)] == [3, 6]


def test_a_step_counts_only_if_the_critic_was_saved_with_it(tmp_path: Path) -> None:
    """With `checkpoint.background` the policy's may be whole when the critic's is not."""
    inputs = inputs_of(tmp_path, "program=ppo")
    policy, critic = Role(), Role()
    save(inputs.folder.checkpoints, 3, 6, 9)
    save(inputs.folder.path / "critic", 3, 6)
    damage(inputs.folder.path / "critic", 6)

    go_back(inputs, Workers(policy, critic))

    assert policy.restored == critic.restored == [(3, "checkpoint")]
    for part in (inputs.folder.checkpoints, inputs.folder.path / "critic"):
        assert [each.step for each in saved_steps(part)] == [3]


def test_new_workers_have_read_the_checkpoint_that_they_were_built_from(tmp_path: Path, reads: list[str]) -> None:
    inputs, policy = inputs_of(tmp_path, begin=6), Role(4)
    save(inputs.folder.checkpoints, 3, 6)
    reads.clear()

    assert go_back(inputs, Workers(policy), are_new=True) == (6, {"begin": True})

    assert policy.restored == []
    assert reads == []


def test_a_damaged_checkpoint_that_the_run_was_resumed_from_is_passed_over_too(tmp_path: Path) -> None:
    inputs, policy = inputs_of(tmp_path, begin=6), Role()
    save(inputs.folder.checkpoints, 3, 6)
    damage(inputs.folder.checkpoints, 6)

    go_back(inputs, Workers(policy))

    assert policy.restored == [(3, "checkpoint")]


def test_the_event_loop_goes_on_while_a_checkpoint_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, has_looped, seen = inputs_of(tmp_path), threading.Event(), list[bool]()
    save(inputs.folder.checkpoints, 3)

    def slow(folders: Sequence[Path], *, after: int) -> int | None:
        seen.append(has_looped.wait(30.0))  # for ever, if the loop stood still
        return newest_whole(folders, after=after)

    monkeypatch.setattr(rewinding, "newest_whole", slow)
    names: Any = role_names(inputs.recipe)
    workers: Any = Workers(Role())

    async def both() -> None:
        task = asyncio.create_task(rewind(inputs, names, workers, committed=0))
        while not seen and not task.done():
            await asyncio.sleep(0.01)
            has_looped.set()
        await task

    asyncio.run(both())

    assert seen == [True]


def test_what_a_killed_run_had_saved_is_known_from_names(tmp_path: Path, reads: list[str]) -> None:
    inputs = inputs_of(tmp_path, "checkpoint.every=3")
    save(inputs.folder.checkpoints, 3, 6, 9)
    reads.clear()

    milestones = milestones_of_killed(inputs, 8)

    assert milestones.saved_step == 6
    assert reads == []


def test_a_step_whose_folder_cannot_be_read_is_none(tmp_path: Path) -> None:
    save(tmp_path, 3, 6)
    (tmp_path / "step-00000006" / "rank-00000.json").unlink()
    (tmp_path / "step-00000006" / "rank-00000.json").mkdir()  # reading it is an OSError

    assert newest_whole([tmp_path]) == 3
    assert newest_whole([tmp_path], after=3) is None
    assert newest_whole([tmp_path / "nothing"]) is None


def test_damaged_tensors_are_not_looked_for_where_nobody_reads_them(tmp_path: Path, reads: list[str]) -> None:
    save(tmp_path, 3, 6)
    damage(tmp_path, 6)
    reads.clear()

    assert newest_whole([tmp_path], reads_tensors=False) == 6
    assert tensors_of(reads) == set()
    assert newest_whole([tmp_path]) == 3
    record = tmp_path / "step-00000006" / "checkpoint.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "step": 7}))
    assert newest_whole([tmp_path], reads_tensors=False) == 3


class SavingRole(Role):
    """A learner without snapshots that is writing a checkpoint with the real writer: it becomes whole when somebody
    waits for it, or when `completes` is set."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *in_memory: int) -> None:
        super().__init__(*in_memory)
        self.completes, self._folder = threading.Event(), folder

        def completed(*args: Any, **options: Any) -> None:
            assert self.completes.wait(30)
            complete(*args, **options)

        monkeypatch.setattr(checkpoint, "complete", completed)
        mesh = Mesh(rank=0, world=1, device=torch.device("cpu"), devices=None)
        self.writer = CheckpointWriter(folder, mesh, keep=1, keep_best=False, background=True, timeout_s=20.0)

    def begin(self, step: int) -> None:
        """Begins to write a checkpoint."""
        weight = torch.full((2,), float(step))
        piece = TensorShard(name="weight", local=weight, box=Box.whole(weight.shape), shape=tuple(weight.shape))
        self.writer.save(step, [piece], Extras(values={}, arrays={}))

    def finish_saving(self) -> SaveState:
        self.completes.set()
        return self.writer.finish()


def test_the_run_goes_back_to_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator dies, and the learner lives: it goes on writing, and then removes the checkpoint before."""
    inputs = inputs_of(tmp_path)
    policy = SavingRole(inputs.folder.checkpoints, monkeypatch)
    save(inputs.folder.checkpoints, 3)
    policy.begin(6)

    assert go_back(inputs, Workers(policy), saving=6)[0] == 6

    assert policy.restored == [(6, "checkpoint")]
    assert [each.step for each in saved_steps(inputs.folder.checkpoints)] == [6]


def test_the_last_whole_checkpoint_is_not_removed_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `checkpoint.keep: 1` the one that is read would be removed when the next one is whole, and the run would
    begin again at step 0."""
    inputs = inputs_of(tmp_path)
    policy = SavingRole(inputs.folder.checkpoints, monkeypatch)
    save(inputs.folder.checkpoints, 3)
    policy.begin(6)

    def read_slowly(path: Path) -> dict[str, int]:
        if not policy.completes.is_set():
            policy.finish_saving()
        return fingerprint(path)

    monkeypatch.setattr(checkpoint_files, "fingerprint", read_slowly)

    assert go_back(inputs, Workers(policy), saving=6)[0] == 6

    assert [each.step for each in saved_steps(inputs.folder.checkpoints)] == [6]


def test_no_save_is_waited_for_where_the_snapshot_is_as_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(tmp_path)
    policy = SavingRole(inputs.folder.checkpoints, monkeypatch, 5, 6)
    policy.begin(6)

    assert go_back(inputs, Workers(policy), saving=6)[0] == 6

    assert policy.restored == [(6, "memory")]
    assert not policy.completes.is_set()
    policy.finish_saving()


def test_a_save_that_the_disk_does_not_take_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(tmp_path)
    policy = SavingRole(inputs.folder.checkpoints, monkeypatch)
    save(inputs.folder.checkpoints, 3)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(checkpoint, "complete", lambda *args, **options: (_ for _ in ()).throw(full))
    policy.begin(6)

    assert go_back(inputs, Workers(policy), saving=6)[0] == 3

    assert policy.restored == [(3, "checkpoint")]
    assert [each.step for each in saved_steps(inputs.folder.checkpoints)] == [3]
