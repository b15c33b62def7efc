# SPDX-License-Identifier: Apache-2.0
"""fp8 on one CUDA device: products against the emulated ones, a training step in every way, and the engine's graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from helpers.engines import full_gradient, make_engine, random_documents, relative_l2
from podium.data.documents import Document, pack
from podium.data.trajectories import TrajectoryId
from podium.engine.mesh import Mesh, join
from podium.engine.sharding import place
from podium.models.causal_lm import PackedCausalLM
from podium.models.fp8 import emulated_product, product, quantized_rows
from podium.models.packing import to_device
from podium.recipe import ModelSection, PlacementSection, RolloutSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Completion, Request, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="this machine has no CUDA device with fp8",
    ),
]
VOCABULARY = 256


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return join(PlacementSection.model_validate({"device": "cuda"}), rank=0, world=1, local_rank=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("rows", [1, 8, 17, 64, 1000])
def test_products_are_the_emulated_ones(rows: int) -> None:
    torch.manual_seed(0)
    left = (
        torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
        * torch.logspace(-4, 4, rows, device="cuda")[:, None]
    )
    left = left.bfloat16()
    left[rows // 2] = 0
    right = torch.randn(384, 512, device="cuda", dtype=torch.bfloat16)
    one, other = quantized_rows(left), quantized_rows(right)
    found, wanted = product(one, other, torch.bfloat16).float(), emulated_product(one, other, torch.float32)
    # Fast accumulation keeps about 14 bits of sums, and the result has 8.
    scale = left.float().abs() @ right.float().abs().T
    assert bool(((found - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-11 * scale).all())
    assert bool((found[rows // 2] == 0).all())


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("way", ["none", "selective", "layers"])
def test_gradients_are_near_those_without(folder: Path, mesh: Mesh, compiled: str, way: str) -> None:
    documents = random_documents()
    exact = full_gradient(make_engine(folder, mesh), documents).float()
    engine = make_engine(folder, mesh, fp8=True, compile=compiled, activation_checkpointing=way)
    found = full_gradient(engine, documents).float()
    assert 1e-3 < relative_l2(found, exact) < 0.3
    assert engine.model.fp8 is not None
    assert len(engine.model.fp8.layers) == 3 * 7
    assert all(each.master.dtype == torch.float32 for each in engine.optimizer.trained)


@pytest.mark.parametrize("decode", ["eager", "captured", "compiled"])
def test_an_engine_agrees_with_a_learner_in_fp8(folder: Path, mesh: Mesh, decode: str) -> None:
    model, _ = place(ModelSection(path=str(folder), fp8=True, compile="on"), folder, mesh, seed=0)
    section = RolloutSection.model_validate(
        {"fp8": True, "decode": decode, "max_running": 16, "max_length": 128, "memory_gib": 1.0}
    )
    with torch.no_grad():
        engine = NativeEngine(model, mesh.device, section)
    try:
        both = gap(model, mesh, answers(engine, 0))
        engine.sleep()
        with torch.no_grad():
            for parameter in model.hf.parameters():
                parameter.mul_(1.1)
        engine.wake()  # rounds the weights again
        assert gap(model, mesh, answers(engine, 1)) < 0.1
    finally:
        engine.close()
    assert both < 0.1
    assert model.fp8 is not None
    assert model.fp8.nbytes == 0


def answers(engine: NativeEngine, attempt: int) -> list[Completion]:
    engine.submit(
        [
            Request(
                id=TrajectoryId(number, 0, 0, attempt),
                prompt=np.random.default_rng(number).integers(0, VOCABULARY, 20).astype(np.int32),
                sampling=Sampling(max_new_tokens=30),
            )
            for number in range(16)
        ]
    )
    return list(engine.results(deadline_s=60))


@torch.no_grad()
def gap(model: PackedCausalLM, mesh: Mesh, found: list[Completion]) -> float:
    """Mean distance of the engine's log-probs from the learner's."""
    documents = []
    for each in found:
        assert each.error is None
        tokens = np.concatenate([each.prompt, each.tokens_L]).astype(np.int32)
        documents.append(Document(tokens=tokens, trained=np.arange(len(tokens)) >= len(each.prompt)))
    model.eval()
    learner = model(to_device(pack(documents), mesh.device, multiple=64), None, kind="logprobs").float().cpu().numpy()
    return float(np.abs(learner - np.concatenate([each.logprobs_L for each in found])).mean())
