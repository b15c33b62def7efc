# SPDX-License-Identifier: Apache-2.0
"""Whole runs on one rank in this process: learning, divergence, refusal of a model that would be trained wrongly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.runs import STEPS, losses, tiny_recipe
from helpers.tiny import write_chats
from podium import api
from podium.engine.checkpoint_files import saved_steps
from podium.errors import CheckpointError, LaunchError, TrainingDivergedError, UnsupportedModelError
from podium.models import packing
from podium.models.packing import Run
from podium.runs.folder import RunFolder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "train.jsonl")


def test_a_run_learns_and_leaves_metrics_and_checkpoints(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    result = api.train(tiny_recipe(tiny_folder, data, tmp_path, "plain"))
    assert (result.status, result.step) == ("finished", STEPS)
    recorded = losses(tmp_path / "plain")
    assert list(recorded) == list(range(1, STEPS + 1))
    assert recorded[STEPS] < recorded[1] - 0.3
    assert result.loss == recorded[STEPS]
    # Every third step and the last; two are kept.
    assert [each.step for each in saved_steps(tmp_path / "plain" / "checkpoints")] == [6, 8]
    assert RunFolder.open(tmp_path / "plain").status == "finished"


def test_any_micro_batch_budget_gives_the_same_losses(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    changes = {"data": {"train": [{"path": str(data)}], "max_length": 60}, "steps": 3}
    api.train(tiny_recipe(tiny_folder, data, tmp_path, "whole", **changes))
    api.train(tiny_recipe(tiny_folder, data, tmp_path, "cut", micro_batch_tokens=64, **changes))
    whole, cut = losses(tmp_path / "whole"), losses(tmp_path / "cut")
    assert list(cut.values()) == pytest.approx(list(whole.values()), rel=1e-5)


def test_a_run_that_diverges_stops_after_the_allowed_number_of_skipped_steps(
    tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    """An absurd rate makes the weights infinite in step 1; every later step is skipped."""
    optimizer = {"lr": 1e38, "warmup_steps": 0, "clip_norm": None, "max_skipped_in_a_row": 3}
    recipe = tiny_recipe(tiny_folder, data, tmp_path, "wild", optimizer=optimizer, checkpoint={"every": 1})
    with pytest.raises(TrainingDivergedError, match="steps 2 to 4"):
        api.train(recipe)
    assert list(losses(tmp_path / "wild")) == [1, 2, 3, 4]
    assert RunFolder.open(tmp_path / "wild").status != "finished"


def test_a_model_that_would_be_trained_wrongly_is_refused_and_leaves_no_folder(
    tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_run(offsets: np.ndarray) -> tuple[Run, ...]:
        return (Run(num_documents=1, length=int(offsets[-1])),)

    monkeypatch.setattr(packing, "runs_of", one_run)
    with pytest.raises(UnsupportedModelError, match="trained wrongly"):
        api.train(tiny_recipe(tiny_folder, data, tmp_path, "refused"))
    assert not (tmp_path / "refused").exists()


def test_a_full_disk_ends_the_run_and_the_last_checkpoint_resumes(
    tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podium.engine import checkpoint

    plain = checkpoint.save_tensors  # type: ignore[attr-defined]

    def full_from_step_6_on(tensors: object, path: Path) -> None:
        if "00000003" not in str(path):
            raise OSError(28, "No space left on device")
        plain(tensors, path)  # type: ignore[arg-type]

    recipe = tiny_recipe(tiny_folder, data, tmp_path, "full", checkpoint={"background": True})
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_tensors", full_from_step_6_on)
        with pytest.raises(CheckpointError, match="No space left on device"):
            api.train(recipe)
    result = api.resume(tmp_path / "full")
    assert (result.status, result.step) == ("finished", STEPS)
    assert list(losses(tmp_path / "full")) == list(range(1, STEPS + 1))


def test_more_ranks_than_cores_are_refused_before_a_folder_is_made(
    tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tiny_folder, data, tmp_path, "many", placement={"devices": 4096})
    with pytest.raises(LaunchError, match=r"placement\.devices: 4096"):
        api.train(recipe)
    assert not (tmp_path / "many").exists()
