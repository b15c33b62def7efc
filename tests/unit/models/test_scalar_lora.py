# SPDX-License-Identifier: Apache-2.0
"""Adapters of critics and reward models: the head is trained whole, and saved as peft saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from helpers.adapters import save_peft_adapter
from helpers.engines import one_rank, random_documents
from helpers.tiny import save_tiny_model, tiny_config
from podium.data.documents import pack
from podium.engine.checkpoint import CheckpointWriter, newest_usable
from podium.engine.checkpoint_files import Extras
from podium.engine.resuming import weight_pieces
from podium.engine.sharding import place_scalar
from podium.errors import ModelError
from podium.models.cost import model_cost
from podium.models.lora import merge, save_adapter
from podium.models.packing import to_device
from podium.recipe import ModelSection

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 30)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("scalar") / "llama", pad_token_id=249)


def placed(folder: Path, *, labels: int | None = 1, checkpoint: Any = None, **lora: Any):  # type: ignore[no-untyped-def]
    section = ModelSection(path=str(folder), lora={"rank": 4, **lora})
    return place_scalar(section, folder, one_rank(), labels=labels, seed=3, checkpoint=checkpoint)


@torch.no_grad()
def values(model: torch.nn.Module) -> Tensor:
    found: Tensor = model(to_device(pack(random_documents()), CPU), None, "values")
    return found


@torch.no_grad()
def sampled(trained: list[Any]) -> None:
    """As if it had been trained."""
    draw = torch.Generator().manual_seed(0)
    for each in trained:
        each.master.copy_(torch.randn(each.shape, generator=draw) * 0.1)


def test_the_head_is_trained_beside_the_adapter_and_begins_at_zero(base: Path) -> None:
    model, trained = placed(base)
    assert [each.name for each in trained if ".lora_" not in each.name] == ["score.weight"]
    assert [name for name, each in model.hf.named_parameters() if each.requires_grad] == [each.name for each in trained]
    assert not values(model).any()


def test_the_exported_adapter_with_its_head_gives_the_same_number_in_plain_peft(base: Path, tmp_path: Path) -> None:
    model, trained = placed(base)
    sampled(trained)
    save_adapter(model.hf, tmp_path / "adapter", base=base, base_path=str(base))
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    by_peft = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    ours, _ = placed(base, adapter=str(tmp_path / "adapter"))
    assert torch.equal(values(ours.eval()), values(model.eval()))
    merged, again = placed(base, adapter=str(tmp_path / "adapter"))
    merge(merged.hf)
    merged.hf.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = by_peft(TOKENS).logits
        assert wanted.abs() > 1e-3
        assert torch.allclose(merged.hf.eval()(TOKENS).logits, wanted, atol=1e-5)
    assert sum(each.master.numel() for each in again) == sum(each.master.numel() for each in trained)


def test_an_adapter_and_head_that_peft_trained_are_read(base: Path, tmp_path: Path) -> None:
    folder = save_peft_adapter(base, tmp_path / "adapter", kind="SEQ_CLS")
    assert "score" in (folder / "adapter_config.json").read_text()
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=2, dtype=torch.float32)
    by_peft = peft.PeftModel.from_pretrained(plain, str(folder)).eval()
    model, _ = placed(base, labels=2, adapter=str(folder))
    model.hf.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.allclose(model.hf.eval()(TOKENS).logits, by_peft(TOKENS).logits, atol=1e-5)


def test_an_adapter_of_a_reward_model_does_not_fit_a_language_model(base: Path, tmp_path: Path) -> None:
    from podium.engine.sharding import place

    folder = save_peft_adapter(base, tmp_path / "adapter", kind="SEQ_CLS")
    with pytest.raises(ModelError, match=r"model\.lora\.adapter: .*/adapter .*\(.*score\)"):
        place(ModelSection(path=str(base), lora={"adapter": str(folder)}), base, one_rank(), seed=0)


def test_a_resumed_model_reads_its_base_and_takes_adapter_and_head_from_the_checkpoint(
    base: Path, tmp_path: Path
) -> None:
    model, trained = placed(base)
    sampled(trained)
    writer = CheckpointWriter(tmp_path, one_rank(), keep=1, keep_best=False, background=False, timeout_s=60)
    writer.save(1, weight_pieces(trained), Extras(values={}, arrays={}))
    again, _ = placed(base, checkpoint=newest_usable(tmp_path))
    assert torch.equal(values(again.eval()), values(model.eval()))


def test_the_cost_of_a_classifier_counts_its_trained_head() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=1))
    assert (model_cost(model).head_matrix, model_cost(model).head_trained) == (32, True)
