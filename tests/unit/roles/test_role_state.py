# SPDX-License-Identifier: Apache-2.0
"""The state of a role in host memory: whether there is room, and what is forgotten when it goes back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.engine import memory_snapshots
from podium.engine.checkpoint_files import Extras
from podium.engine.mesh import Mesh
from podium.errors import CheckpointError
from podium.models.tensor_shards import Box, TensorShard
from podium.roles.interfaces import NoSnapshot, SnapshotBegun
from podium.roles.role_state import RoleState

ALONE = Mesh(rank=0, world=1, device=torch.device("cpu"), devices=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherAnswers(Mesh):
    """Rank 0 of two; the other one answers what it is told to."""

    other: Any = None

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()


def state(memory: Path | None, mesh: Mesh = ALONE) -> RoleState:
    weight = torch.arange(4.0)
    piece = TensorShard(name="weight", local=weight, box=Box.whole(weight.shape), shape=(4,))
    folder = None if memory is None else memory / "user" / "run" / "launch-1" / "policy"
    return RoleState(mesh, node="here", memory=folder, checkpoints=None, pieces=lambda: [piece])


def why_not(role: RoleState) -> str:
    answer = role.snapshot(1, Extras(values={}, arrays={}))
    assert isinstance(answer, NoSnapshot)
    return answer.reason


def test_going_back_forgets_later_steps(tmp_path: Path) -> None:
    role = state(tmp_path)
    for step in (3, 4):
        assert isinstance(role.snapshot(step, Extras(values={"at": step}, arrays={})), SnapshotBegun)
    role.read(4, "memory")
    assert role.snapshots() == (3, 4)

    assert role.read(3, "memory").values == {"at": 3}

    assert role.snapshots() == (3,)


def test_memory_that_does_not_suffice_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_snapshots, "_free_bytes", lambda folder: 63)  # two snapshots of 16 bytes, and half of it

    assert why_not(state(tmp_path)) == "they take 0.0 GiB, and 0.0 GiB of memory are free"
    assert state(tmp_path).snapshots() == ()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (("here", 16, 10), r"they take .* of memory are free"),
        (("there", 16, 10), r"they take .* of memory are free on there"),
    ],
)
def test_ranks_decide_alike(tmp_path: Path, other: tuple[str, int, int], reason: str) -> None:
    mesh = OtherAnswers(rank=0, world=2, device=torch.device("cpu"), devices=None, other=other)

    assert re.search(reason, why_not(state(tmp_path, mesh)))


def test_without_memory_there_is_none() -> None:
    role = state(None)

    assert why_not(role) == "they are switched off"
    with pytest.raises(CheckpointError, match="not kept in memory"):
        role.read(1, "memory")


def test_it_knows_after_which_step_it_is_until_it_changes(tmp_path: Path) -> None:
    role = state(tmp_path)
    assert not role.is_after(0)
    role.snapshot(3, Extras(values={}, arrays={}))
    assert role.is_after(3)
    assert not role.is_after(2)
    role.begin_change()
    assert not role.is_after(3)
    role.note_restored(3)
    assert role.is_after(3)


def test_at_the_end_of_a_run_they_are_forgotten(tmp_path: Path) -> None:
    role = state(tmp_path)
    for step in (1, 2):
        role.snapshot(step, Extras(values={}, arrays={}))

    role.forget_snapshots()

    assert role.snapshots() == ()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_where_a_node_has_no_place_for_them_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "user" / "run").write_text("in the way")

    assert "cannot be made on all nodes" in why_not(state(tmp_path))
