# SPDX-License-Identifier: Apache-2.0
"""A run whose object store is too small: it ends with what to do and with its last step saved, and goes on where there
is room, to the weights of a run that always had it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.disks import mounted
from helpers.on_policy import ledger, rl_recipe, said_by
from helpers.tiny import save_tiny_model
from helpers.workspace import Workspace
from podium.engine.checkpoint_files import saved_steps

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(500)]

STEPS, FULL_AFTER = 5, 2
# Loggers run in the controller. From step 2 on this one keeps objects, whenever neither the store nor the disk of Ray's
# session is full: as far as others can tell, the store is too small for them.
HOARDER = f"""
import threading
import time
from pathlib import Path

class Hoarder:
    def __init__(self, folder):
        self.kept, self.is_full, self.is_over = [], threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.hoard, daemon=True)

    def log(self, metrics):
        if metrics.step == {FULL_AFTER} and Path("is-small").exists():
            self.thread.start()
            self.is_full.wait(60)

    def hoard(self):
        import numpy as np
        import ray

        while not self.is_over.is_set():
            for size in (8 * 2**20, 2**20, 2**17, 2**14):
                try:
                    while not self.is_over.is_set():
                        self.kept.append(ray.put(np.ones(size, np.uint8)))
                except (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError):
                    pass
            Path("is-full").touch()
            self.is_full.set()
            time.sleep(0.01)

    def text(self, step, name, text): pass

    def close(self):
        self.is_over.set()
        if self.thread.is_alive():
            self.thread.join(60)
"""
# Weights go to the generator through the store.
ELASTIC: dict[str, Any] = {"launcher": "ray", "layout": "elastic", "devices": 2, "rollout_devices": 1}


@pytest.fixture
def session_disk() -> Iterator[Path]:
    """A disk of 48 MiB for Ray's session, where objects go that the store has no room for. Paths of its sockets must be
    short."""
    with tempfile.TemporaryDirectory(prefix="store-") as folder, mounted(Path(folder), size="48m") as disk:
        yield disk


@pytest.fixture
def wide_model(workspace: Workspace) -> Path:
    """So wide that its weights are an object of the store: Ray sends small ones along with its messages."""
    folder = Path(shutil.copytree(workspace.model, workspace.path / "wide"))
    config = json.loads((folder / "config.json").read_text())
    kept = {name: config[name] for name in ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id")}
    save_tiny_model("qwen3", folder, intermediate_size=4096, **kept)
    assert (folder / "model.safetensors").stat().st_size > 4 * 100 * 2**10
    return folder


def weights(run: Path) -> dict[str, bytes]:
    """The tensors after the last step."""
    found = {file.name: file.read_bytes() for file in (run / "checkpoints").glob(f"step-{STEPS:08d}/*.safetensors")}
    assert found
    return found


def test_a_run_whose_store_is_too_small_goes_on_in_a_larger_one(
    workspace: Workspace, wide_model: Path, session_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace.path / "hoarder.py").write_text(HOARDER)
    same: dict[str, Any] = {
        "steps": STEPS,
        "model": {"path": str(wide_model)},
        "run": {"loggers": ["hoarder.py:Hoarder"]},
    }
    outcome = workspace.podium("train", rl_recipe(workspace, "whole", **same))
    assert outcome.code == 0, outcome
    recipe = rl_recipe(workspace, "small", placement=ELASTIC, **same)
    output, is_small = workspace.path / "output", workspace.path / "is-small"
    is_small.touch()

    with monkeypatch.context() as small:
        small.setenv("RAY_TMPDIR", str(session_disk))
        small.setenv("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(80 * 2**20))
        said = " ".join(said_by("train", recipe, output=output, code=2).split())

    run = workspace.path / "runs" / "small"
    assert (workspace.path / "is-full").exists(), said
    assert "object store is full" in said
    assert "RAY_TMPDIR" in said
    assert "--object-store-memory" in said
    assert "podium resume" in said
    assert "Traceback" not in said
    assert [each.step for each in saved_steps(run / "checkpoints")][-1] == FULL_AFTER  # nothing is lost

    is_small.unlink()
    said_by("resume", "runs/small", output=output)

    assert weights(run) == weights(workspace.path / "runs" / "whole")
    assert ledger(run) == ledger(workspace.path / "runs" / "whole")
