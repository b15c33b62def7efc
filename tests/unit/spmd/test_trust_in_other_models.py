# SPDX-License-Identifier: Apache-2.0
"""Trust in the model's code (`model.trust_remote_code`) is not trust in that of a teacher or a reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import podium
from helpers.runs import tiny_recipe
from helpers.tiny import save_tiny_folder, write_chats
from podium.errors import ModelError
from podium.models.causal_lm import load_config


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A checkpoint whose own code leaves a mark when it is run."""
    folder = save_tiny_folder(tmp_path / "trapped")
    mark = tmp_path / "mark"
    (folder / "trap.py").write_text(
        "from pathlib import Path\n"
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        f"Path({str(mark)!r}).touch()\n"
        "class TrapConfig(Qwen3Config):\n    model_type = 'trap'\n"
        "class Trap(Qwen3ForCausalLM):\n    config_class = TrapConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "trap.TrapConfig", "AutoModelForCausalLM": "trap.Trap"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("targets", ["live", "cached"])
def test_a_teachers_code_is_not_run_where_only_the_student_is_trusted(
    targets: str, trapped: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(
        save_tiny_folder(tmp_path / "model"), write_chats(tmp_path / "chats.jsonl"), tmp_path / "runs", "distilled",
        program="distill", teachers=[{"path": str(trapped)}], distill={"targets": targets},
        model={"path": str(tmp_path / "model"), "trust_remote_code": True},
    )  # fmt: skip
    with pytest.raises(ModelError, match="trap"):
        podium.train(recipe)
    assert not (tmp_path / "mark").exists()
    load_config(trapped, trust_remote_code=True)
    assert (tmp_path / "mark").exists(), "the trap does not work"
