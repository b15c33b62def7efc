# SPDX-License-Identifier: Apache-2.0
"""Whole runs of every supported architecture: what is resumed and exported has every tensor of the base, frozen ones
unchanged."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from helpers.engines import make_engine
from helpers.poison import poison_empty_memory
from helpers.runs import losses, tiny_recipe
from helpers.tiny import SUPPORTED, save_tiny_folder, write_chats
from podium import api
from podium.engine.checkpoint import newest_usable
from podium.models.packing import to_device
from podium.models.verify import compare, random_batch

pytestmark = pytest.mark.slow
OPTIMIZER = {"lr": 3e-3, "warmup_steps": 0, "weight_decay": 0.5}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty_memory(monkeypatch)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "train.jsonl")


def loaded(folder: Path, dtype: Any = "auto") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def unreached(name: str) -> bool:
    """No gradient comes here: not trained, or for images only."""
    return any(part in name for part in ("correction_bias", "expert_bias", "vision_tower", "multi_modal_projector"))


@torch.no_grad()
def scores(model: Any, vocab_size: int) -> Tensor:
    batch = to_device(random_batch(vocab_size), torch.device("cpu"))
    bounds = batch.packing.boundaries.tolist()
    return torch.cat([model(input_ids=batch.tokens_T[None, a:b]).logits[0] for a, b in pairwise(bounds)])


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_run_resumes_exactly_and_exports_every_tensor(tmp_path: Path, data: Path, name: str) -> None:
    base = save_tiny_folder(tmp_path / "base", name)
    checkpoint = {"every": 1, "keep": 3}
    recipe = tiny_recipe(base, data, tmp_path, "run", steps=3, optimizer=OPTIMIZER, checkpoint=checkpoint)
    api.train(recipe)
    whole = losses(tmp_path / "run")
    api.resume(tmp_path / "run", step=1)
    assert losses(tmp_path / "run") == whole

    api.export(tmp_path / "run", tmp_path / "out")
    before, after = loaded(base).state_dict(), loaded(tmp_path / "out").state_dict()
    assert {key: each.dtype for key, each in after.items()} == {key: each.dtype for key, each in before.items()}
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor) == unreached(key), key

    engine = make_engine(base, checkpoint=newest_usable(tmp_path / "run" / "checkpoints"))
    vocab_size = engine.model.vocab_size
    with torch.no_grad():
        ours = engine.model.eval()(to_device(random_batch(vocab_size), torch.device("cpu")), None, kind="scores")
    theirs = scores(loaded(tmp_path / "out"), vocab_size)
    assert compare(name, ours, theirs, theirs, torch.float32).largest < 1e-4


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "ernie4_5_moe", "afmoe"])
def test_an_export_in_bfloat16_has_the_dtypes_that_transformers_would_keep(
    tmp_path: Path, data: Path, name: str
) -> None:
    base = save_tiny_folder(tmp_path / "base", name)
    api.train(tiny_recipe(base, data, tmp_path, "run", steps=1, optimizer=OPTIMIZER))
    api.export(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    wanted = loaded(base, torch.bfloat16).state_dict()
    found = loaded(tmp_path / "out").state_dict()
    assert {key: each.dtype for key, each in found.items()} == {key: each.dtype for key, each in wanted.items()}
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor) or not unreached(key), key


def test_a_merged_adapter_and_a_grown_vocabulary_export_the_frozen_bias(tmp_path: Path, data: Path) -> None:
    base = save_tiny_folder(tmp_path / "base", "ernie4_5_moe")
    before = loaded(base).state_dict()
    for run, model in (("adapter", {"lora": {"rank": 2}}), ("grown", {"new_tokens": {"tokens": ["<think>"]}})):
        recipe = tiny_recipe(base, data, tmp_path, run, steps=1, optimizer=OPTIMIZER, model=model)
        api.train(recipe)
        api.export(tmp_path / run, tmp_path / f"{run}-out")
        after = loaded(tmp_path / f"{run}-out").state_dict()
        assert after.keys() == before.keys()
        for key, tensor in before.items():
            assert torch.equal(after[key], tensor) or not unreached(key), key
