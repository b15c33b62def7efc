# SPDX-License-Identifier: Apache-2.0
"""Whole SFT runs that train an adapter on one rank: learning, resuming, small checkpoints, and both ways to export."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from helpers.adapters import save_peft_adapter, with_peft
from helpers.runs import STEPS, losses, tiny_recipe
from helpers.tiny import write_chats
from podium import api
from podium.engine.checkpoint import newest_usable
from podium.errors import ModelError, RunFolderError
from podium.recipe import Recipe

TOKENS = torch.arange(3, 40)[None]
# Two layers of 32: query 32×32, key and value 32×16, output 32×32, three matrices of 32×48, rank 4.
ADAPTER = 4 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "train.jsonl")


def recipe(model: Path, data: Path, runs: Path, name: str, **lora: object) -> Recipe:
    lora = {"rank": 4, "alpha": 8.0, **lora}
    return tiny_recipe(
        model, data, runs, name, model={"path": str(model), "lora": lora}, optimizer={"lr": 2e-2, "warmup_steps": 2}
    )


@pytest.fixture(scope="module")
def run(tiny_folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    api.train(recipe(tiny_folder, data, runs, "whole", dropout=0.1))
    return runs / "whole"


@torch.no_grad()
def logits(model: object) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS).logits  # type: ignore[operator]
    return found


def test_a_run_learns_by_its_adapter_and_its_checkpoints_hold_nothing_else(run: Path) -> None:
    recorded = losses(run)
    assert recorded[STEPS] < recorded[1] - 0.3
    reader = newest_usable(run / "checkpoints")
    assert all(".lora_" in name for name in reader.shapes())
    # Weights and two moments in float32, and a header.
    size = (reader.folder / "rank-00000.safetensors").stat().st_size
    assert 3 * 4 * ADAPTER < size < 3 * 4 * ADAPTER + 12_000


def test_a_resumed_run_continues_bit_for_bit_dropout_included(
    tiny_folder: Path, data: Path, tmp_path: Path, run: Path
) -> None:
    values = recipe(tiny_folder, data, tmp_path, "parts", dropout=0.1)
    api.train(values.model_copy(update={"steps": 3}))
    api.resume(tmp_path / "parts", overrides=[f"steps={STEPS}"])
    assert losses(tmp_path / "parts") == losses(run)
    mine, theirs = (newest_usable(folder / "checkpoints").folder for folder in (tmp_path / "parts", run))
    assert (mine / "rank-00000.safetensors").read_bytes() == (theirs / "rank-00000.safetensors").read_bytes()


def test_the_merged_export_is_a_plain_checkpoint_equal_to_what_peft_merges(
    run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    api.export(run, tmp_path / "merged")
    api.export(run, tmp_path / "adapter", adapter=True)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    by_peft = with_peft(tiny_folder, tmp_path / "adapter").merge_and_unload()
    found, wanted = merged.state_dict(), by_peft.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    assert torch.equal(found["model.embed_tokens.weight"], base.state_dict()["model.embed_tokens.weight"])
    assert not torch.allclose(logits(merged), logits(base), atol=0.1)


def test_plain_peft_loads_the_exported_adapter_and_podium_continues_from_it(
    run: Path, tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    api.export(run, tmp_path / "adapter", adapter=True)
    api.export(run, tmp_path / "merged")
    assert sum(tensor.numel() for tensor in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values()) == (
        ADAPTER
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(logits(with_peft(tiny_folder, tmp_path / "adapter")), logits(merged), atol=1e-5)
    by_name = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter")).eval()
    assert torch.allclose(logits(by_name), logits(merged), atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template
    api.train(recipe(tiny_folder, data, tmp_path, "further", adapter=str(tmp_path / "adapter")))
    assert losses(tmp_path / "further")[1] < losses(run)[1] - 0.3


def test_an_adapter_of_another_base_ends_the_run_before_it_leaves_a_folder(
    tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    adapter = save_peft_adapter(tiny_folder, tmp_path / "adapter", target_modules=["q_proj"])
    (tmp_path / "adapter" / "podium_base.json").write_text('{"path": "a/base", "config": "0", "weights": "0"}')
    with pytest.raises(ModelError, match=r"model\.lora\.adapter: .*a/base.*model\.path.*podium_base\.json"):
        api.train(recipe(tiny_folder, data, tmp_path, "foreign", adapter=str(adapter)))
    assert not (tmp_path / "foreign").exists()


def test_a_run_of_all_weights_has_no_adapter_to_export(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    api.train(tiny_recipe(tiny_folder, data, tmp_path, "full", steps=3))
    with pytest.raises(RunFolderError, match=r"full\b.*--adapter"):
        api.export(tmp_path / "full", tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()
