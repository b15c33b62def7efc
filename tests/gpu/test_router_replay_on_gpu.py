# SPDX-License-Identifier: Apache-2.0
"""Router replay on one CUDA device: captured graphs record the experts that eager steps record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from podium.data.trajectories import TrajectoryId
from podium.engine.mesh import Mesh, join
from podium.engine.scoring import score
from podium.engine.sharding import place
from podium.recipe import ModelSection, PlacementSection, RolloutSection
from podium.roles.blocks import block_of
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Completion, Request, Sampling
from podium.weights.canary import LogprobGap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
VOCABULARY = 1000


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return join(PlacementSection.model_validate({"device": "cuda"}), rank=0, world=1, local_rank=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=32, num_experts_per_tok=4,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=2048,
    ).save_pretrained(path)  # fmt: skip
    return path


def requests() -> list[Request]:
    draw = np.random.default_rng(0)
    return [
        Request(
            id=TrajectoryId(number // 4, number % 4),
            prompt=np.random.default_rng(number // 4).integers(0, VOCABULARY, 50).astype(np.int32),
            sampling=Sampling(max_new_tokens=int(draw.integers(20, 60))),
        )
        for number in range(32)
    ]


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_graphs_record_what_the_learner_replays(folder: Path, mesh: Mesh, compiled: str) -> None:
    """In bfloat16 a close choice may differ between two runs of the same tokens, so records are compared by their share
    of equal choices, and by the gap that is left."""
    section = ModelSection.model_validate({"path": str(folder), "init": "random", "compile": compiled})
    model, _ = place(section, folder, mesh, seed=0)
    found: dict[str, list[Completion]] = {}
    with torch.no_grad():
        for decode in ("eager", "captured", "compiled"):
            rollout = RolloutSection.model_validate({"decode": decode, "memory_gib": 1.0})
            engine = NativeEngine(model, mesh.device, rollout, records_experts=True)
            engine.submit(requests())
            found[decode] = sorted(engine.results(deadline_s=300), key=lambda each: each.id)
            engine.close()
    for answers in found.values():
        for each in answers:
            assert each.experts is not None
            assert each.experts.shape == (50 + each.num_tokens - 1, 4, 4)
            assert each.experts.max() < 32
        block, _ = block_of(answers)
        free, replayed = (
            LogprobGap.between(block, score(model, mesh, block, replays=replays)) for replays in (False, True)
        )
        assert replayed.mean < free.mean
    for decode in ("captured", "compiled"):
        for one, other in zip(found["eager"], found[decode], strict=True):
            assert one.experts is not None
            assert other.experts is not None
            # Of the prompt, and of what both sampled alike.
            alike = 50 + int(np.argmin(np.append(one.tokens_L == other.tokens_L[: one.num_tokens], False)))
            same = np.sort(one.experts[: alike - 1]) == np.sort(other.experts[: alike - 1])
            assert same.mean() > 0.9
