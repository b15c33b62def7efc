# SPDX-License-Identifier: Apache-2.0
"""`podium verify` said "agrees" of a folder whose weights it had not read, because it compares random weights where
there are none. The output and the result say so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import podium
from helpers.workspace import Workspace
from podium.models.verify import Comparison


@pytest.fixture
def config_only(workspace: Workspace) -> Path:
    """A folder with everything but weights that Podium reads."""
    folder = workspace.path / "config-only"
    shutil.copytree(workspace.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "pytorch_model.bin").write_bytes(b"weights of another format")
    return folder


def test_random_weights_are_named_where_the_folder_has_none(workspace: Workspace, config_only: Path) -> None:
    outcome = workspace.podium("verify", str(config_only), "--device", "cpu")

    assert outcome.code == 0, outcome.err
    assert f"agrees (random weights: {config_only} has no *.safetensors)" in outcome.out


def test_weights_that_were_read_are_not_called_random(workspace: Workspace) -> None:
    outcome = workspace.podium("verify", str(workspace.model), "--device", "cpu")

    assert outcome.code == 0, outcome.err
    assert "agrees:" in outcome.out
    assert "random" not in outcome.out


def test_python_gets_the_same_fact(workspace: Workspace, config_only: Path) -> None:
    assert podium.verify(str(config_only), device="cpu").has_random_weights
    assert not podium.verify(str(workspace.model), device="cpu").has_random_weights


def test_a_difference_on_random_weights_is_named_too() -> None:
    compared = {"architecture": "Any", "largest": 9.0, "mean": 9.0, "dtype": torch.float32}
    compared |= {"floor_largest": 0.0, "floor_mean": 0.0}

    assert "random weights: here" in str(Comparison(**compared, config_only="here"))
    assert not Comparison(**compared, config_only="here").agrees
