# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an SPMD run: when one is whole, what is in it, and what is said where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from podium.engine import memory_snapshots
from podium.engine.checkpoint import CheckpointReader
from podium.engine.checkpoint_files import Extras
from podium.engine.memory_snapshots import MemorySnapshots, whole_snapshots
from podium.engine.mesh import Mesh
from podium.models.tensor_shards import Box, TensorShard
from podium.observe import Console, Stopwatch
from podium.spmd.step_snapshots import StepSnapshots, WaitingPace

ALONE = Mesh(rank=0, world=1, device=torch.device("cpu"), devices=None)


class Run:
    """A model of one tensor, and its snapshots."""

    def __init__(self, folder: Path | None) -> None:
        self.weight, self.console, self.watch = torch.zeros(4), Mock(spec=Console), Stopwatch()
        piece = TensorShard(name="weight", local=self.weight, box=Box.whole(self.weight.shape), shape=(4,))
        self.memory = None if folder is None else MemorySnapshots(folder, ALONE, node="", pieces=lambda: [piece])
        self.missed: dict[str, int] = {"weight": 2}
        optimizer = SimpleNamespace(missed_updates=lambda: dict(self.missed))
        self.engine: Any = SimpleNamespace(mesh=ALONE, optimizer=optimizer, before_update=None)
        self.snapshots = StepSnapshots(self.memory, self.engine, self.console, self.watch)

    def begin(self, number: int) -> None:
        step: Any = SimpleNamespace(number=number, ready=SimpleNamespace(state=f"after {number}"))
        self.snapshots.begin(step)


def extras_of(step: int, loader: Any, missed_updates: Mapping[str, int]) -> Extras:
    return Extras(values={"step": step, "loader": loader, "missed": dict(missed_updates)}, arrays={})


def test_a_snapshot_is_whole_when_the_report_of_its_step_was_read(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.memory is not None
    run.begin(1)
    assert whole_snapshots(tmp_path) == ()

    run.weight.add_(1.0)  # the next step has begun on the device
    run.missed["weight"] = 9
    run.snapshots.complete(extras_of)
    run.memory.wait()

    reader = CheckpointReader(tmp_path / "step-00000001")
    assert reader.values == {"step": 1, "loader": "after 1", "missed": {"weight": 2}}
    assert torch.equal(reader.tensor("weight"), torch.zeros(4))
    run.snapshots.complete(extras_of)  # there is none to complete
    assert not run.console.note.called


def test_an_update_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    waits: list[int] = []
    monkeypatch.setattr(run.memory, "wait_copied", lambda: waits.append(1))

    run.engine.before_update()

    assert waits == [1]


class TestPace:
    """When the next snapshot is due."""

    def due_after(self, waited_s: float, *, step_s: float, num_steps: int = 30) -> list[int]:
        pace, now_s, due = WaitingPace(ALONE), 100.0, []
        for step in range(1, num_steps + 1):
            now_s += step_s
            if pace.is_due(step):
                pace.begin(step, now_s)
                due.append(step)
                now_s += waited_s  # the next update waits
                pace.waited(waited_s)
        return due

    def test_copies_for_which_nothing_waits_are_taken_after_every_step(self) -> None:
        assert self.due_after(0.0, step_s=1.0) == list(range(1, 31))
        assert self.due_after(0.019, step_s=1.0) == list(range(1, 31))

    def test_others_are_taken_less_often(self) -> None:
        # 0.09 s are 2% of 4.5 steps of 1 s. The first three create files, or have nothing to measure.
        assert self.due_after(0.09, step_s=1.0) == [1, 2, 3, 4, 9, 14, 19, 24, 29]

    def test_they_come_more_often_again_when_nothing_waits_any_more(self) -> None:
        pace = WaitingPace(ALONE)
        for step in (1, 2, 3, 4):
            pace.begin(step, float(step))
            pace.waited(0.2)
        pace.begin(5, 5.0)
        assert [pace.is_due(step) for step in (17, 18)] == [False, True]
        pace.begin(18, 18.0)
        assert pace.is_due(19)


def test_without_memory_nothing_happens() -> None:
    run = Run(None)
    run.begin(1)
    run.snapshots.complete(extras_of)

    assert run.engine.before_update is None
    assert "snapshot" not in run.watch.seconds()
    assert not run.console.note.called


def test_why_there_are_none_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_snapshots, "_free_bytes", lambda folder: 0)
    run = Run(tmp_path)
    for step in (1, 2):
        run.begin(step)
        run.snapshots.complete(extras_of)
        run.engine.before_update()

    ((text,), _) = run.console.note.call_args
    assert run.console.note.call_count == 1
    assert text.startswith("no snapshots in memory: they take ")
    assert whole_snapshots(tmp_path) == ()
