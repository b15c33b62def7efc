# SPDX-License-Identifier: Apache-2.0
"""A folder as a user has it: data, a model, and the command line to type into."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiny import write_chats
from helpers.workspace import Workspace


@pytest.fixture
def workspace(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Workspace:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_chats(tmp_path / "train.jsonl", count=64)
    write_chats(tmp_path / "heldout.jsonl", count=8, seed=1)
    return Workspace(path=tmp_path, model=tiny_folder, capture=capsys, monkeypatch=monkeypatch)
