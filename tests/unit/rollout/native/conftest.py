# SPDX-License-Identifier: Apache-2.0
"""One tiny learner for tests that leave its weights alone, and one for each test that changes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_world import Learner

from helpers.tiny import save_tiny_model


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("native") / "qwen3")


@pytest.fixture(scope="session")
def learner(qwen3_folder: Path) -> Learner:
    """Read only."""
    return Learner.of(qwen3_folder)


@pytest.fixture
def own_learner(qwen3_folder: Path) -> Learner:
    """To be changed."""
    return Learner.of(qwen3_folder)
