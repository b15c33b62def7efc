# SPDX-License-Identifier: Apache-2.0
"""An adapter on one CUDA device: bfloat16 base without masters, compiled layers, and the base again without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, PackedBatch, pack
from podium.engine.mesh import join
from podium.engine.optimizer import AdamW
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.models.packing import round_tokens, to_device
from podium.recipe import ModelSection, OptimizerSection, PlacementSection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
LENGTHS = (1, 33, 33, 130, 7, 257)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def make_engine(folder: Path, **model: Any) -> TrainEngine:
    mesh = join(PlacementSection.model_validate({"device": "cuda"}), rank=0, world=1, local_rank=0)
    section = ModelSection.model_validate({"path": str(folder), "compile": "off", "lora": {"rank": 8}, **model})
    placed, trained = place(section, folder, mesh, seed=0)
    optimizer = OptimizerSection(lr=1e-3)
    return TrainEngine(placed, trained, AdamW(trained, optimizer), mesh, optimizer.clip_norm)


def batch(seed: int) -> PackedBatch:
    draw = np.random.default_rng(seed)
    documents = []
    for length in LENGTHS:
        trained = np.ones(length + 1, np.bool_)
        trained[0] = False
        documents.append(Document(tokens=draw.integers(0, 1000, length + 1).astype(np.int32), trained=trained))
    return pack(documents)


def losses(engine: TrainEngine) -> list[float]:
    reports = [
        engine.train_step([batch(seed)], token_cross_entropy, normalizer=sum(LENGTHS), lr=1e-2) for seed in range(4)
    ]
    return [report.resolve().loss for report in reports]


@torch.no_grad()
def scores(engine: TrainEngine) -> torch.Tensor:
    device = engine.mesh.device
    found: torch.Tensor = engine.model.eval()(
        to_device(batch(9), device, multiple=round_tokens(device)), None, "scores"
    )
    return found


def test_bfloat16_and_compiled_steps_have_the_losses_of_float32(folder: Path) -> None:
    wanted = losses(make_engine(folder, dtype="float32"))
    low = make_engine(folder)
    assert {each.dtype for each in low.model.parameters()} == {torch.bfloat16}
    assert {each.master.dtype for each in low.optimizer.trained} == {torch.float32}
    assert losses(low) == pytest.approx(wanted, rel=2e-2)
    assert losses(make_engine(folder, compile="on")) == pytest.approx(wanted, rel=2e-2)


def test_a_trained_model_is_its_base_again_without_its_adapter_also_compiled(folder: Path) -> None:
    for compile in ("off", "on"):
        engine = make_engine(folder, compile=compile)
        before = scores(engine)
        losses(engine)
        changed = scores(engine)
        with engine.language_model.without_adapter():
            assert torch.allclose(scores(engine), before, atol=0.1)
        assert torch.equal(scores(engine), changed)
        assert not torch.allclose(changed, before, atol=0.1)
