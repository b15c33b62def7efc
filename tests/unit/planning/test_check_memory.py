# SPDX-License-Identifier: Apache-2.0
"""`podium check` refuses a run that cannot fit its device, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.tiny import save_tiny_folder, write_chats
from podium import api
from podium.errors import RecipeError

LLAMA_70B = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Supervised fine-tuning of a folder whose config says 70B."""
    model = save_tiny_folder(tmp_path / "model")
    (model / "config.json").write_text(json.dumps(LLAMA_70B))
    file = tmp_path / "large.yaml"
    values = {
        "program": "sft", "model": str(model), "data": {"train": str(write_chats(tmp_path / "chats.jsonl"))},
        "optimizer": {"lr": 1e-5}, "steps": 2,
    }  # fmt: skip
    file.write_text(json.dumps(values))
    return file


def test_an_impossible_run_is_refused_for_a_named_device(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot fit one H100 SXM of 79\.1 GiB.*optimizer moments 525\.7 GiB"):
        api.check(recipe, device="H100")


def test_it_fits_enough_of_them(recipe: Path) -> None:
    changes = ["placement.devices=64", "model.activation_checkpointing=layers", "tokens_per_step=262144"]
    lines = api.check(recipe, device="H100", overrides=changes)

    assert next(line for line in lines if line.startswith("memory: ")).startswith(
        "memory: training step (learner) takes about "
    )


def test_memory_of_this_machine_counts_where_there_is_no_gpu(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="cannot fit this machine's memory"):
        api.check(recipe, overrides=["placement.device=cpu"])


def test_a_gpu_that_is_not_here_is_not_judged(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from podium.planning import devices

    monkeypatch.setattr(devices, "_GPUS", recipe.parent / "absent")
    lines = api.check(recipe, overrides=["placement.device=cuda"])

    assert not any(line.startswith("memory") for line in lines)


def test_a_device_for_a_pipeline_is_not_ignored(recipe: Path) -> None:
    stage = json.loads(recipe.read_text())
    file = recipe.parent / "pipeline.yaml"
    file.write_text(json.dumps({"program": "pipeline", "stages": {"sft": stage}, "run": {"name": "all"}}))

    assert "stages of a pipeline are not compared with H100 SXM" in api.check(file, device="H100")[-1]
    with pytest.raises(RecipeError, match="'H300' is not in the device table"):
        api.check(file, device="H300")


@pytest.mark.slow
def test_the_refusal_imports_no_torch(recipe: Path) -> None:
    code = (
        "import sys\nfrom podium import api\nfrom podium.errors import RecipeError\n"
        f"try:\n    api.check({str(recipe)!r}, device='H100')\n"
        "except RecipeError:\n    print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "False False\n"
