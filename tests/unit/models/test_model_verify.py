# SPDX-License-Identifier: Apache-2.0
"""Podium's forward against plain transformers for each architecture, and the refusal of what differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from helpers.engines import make_engine
from helpers.tiny import SUPPORTED, save_tiny_model, tiny_config
from podium import api
from podium.engine.resuming import checkpoint_shards
from podium.errors import UnsupportedModelError
from podium.models import packing
from podium.models.buffers import persistent_buffers
from podium.models.packing import Run
from podium.models.verify import compare, random_batch, self_check

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_packed_forward_agrees_with_transformers(tmp_path: Path, name: str) -> None:
    """Loading too: the reference is what transformers makes of the same files."""
    found = api.verify(save_tiny_model(name, tmp_path))
    assert found.agrees, str(found)
    assert found.largest < 1e-4
    assert "agrees" in str(found)
    # What a run does before its first step, on the weights that it holds.
    assert self_check(make_engine(tmp_path).model, CPU, torch.float32).largest < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_config_alone_is_verified_on_random_weights(tmp_path: Path, name: str) -> None:
    tiny_config(name).save_pretrained(tmp_path)
    assert api.verify(tmp_path).agrees
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_the_compiled_forward_agrees_with_transformers(tmp_path: Path) -> None:
    found = api.verify(save_tiny_model("gemma3", tmp_path), compile=True)
    assert found.agrees, str(found)


def one_run_over_everything(offsets: np.ndarray) -> tuple[Run, ...]:
    return (Run(num_documents=1, length=int(offsets[-1])),)


def test_attention_that_ignores_the_boundaries_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(save_tiny_model("llama", tmp_path))
    monkeypatch.setattr(packing, "runs_of", one_run_over_everything)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM DIFFERS"):
        self_check(engine.model, CPU, torch.float32)
    found = api.verify(tmp_path)
    assert not found.agrees
    assert "DIFFERS" in str(found)


def test_wrong_weights_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify compares with what transformers loads, so a mistake in Podium's own loading shows."""
    from podium.models.weights import CheckpointWeights

    read = CheckpointWeights.read
    monkeypatch.setattr(CheckpointWeights, "read", lambda self, name, box: read(self, name, box) * 1.01)
    assert not api.verify(save_tiny_model("llama", tmp_path)).agrees


def test_linear_attention_that_crosses_documents_is_refused(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("qwen3_next", tmp_path))
    with pytest.raises(UnsupportedModelError, match="linear attention"):
        self_check(engine.model, CPU, torch.float32)


def test_the_self_check_leaves_the_model_in_training_and_with_packed_attention(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("llama", tmp_path))
    self_check(engine.model, CPU, torch.float32)
    assert engine.model.training
    assert engine.model.hf.config._attn_implementation == "podium_packed"


def test_a_single_large_gap_is_a_difference() -> None:
    ours = torch.zeros(1000, 4)
    theirs = ours.clone()
    assert compare("x", ours, theirs, theirs, torch.float32).largest == 0.0
    theirs[7, 1] = 0.01
    found = compare("x", ours, theirs, theirs, torch.float32)
    assert not found.agrees
    assert found.mean < 1e-4 < 1e-3 < found.largest


def test_a_logit_that_is_not_a_number_is_a_difference() -> None:
    ours = torch.zeros(3, 4)
    ours[0, 0] = float("nan")
    assert not compare("x", ours, torch.zeros(3, 4), torch.zeros(3, 4), torch.float32).agrees


def test_a_shift_of_all_logits_is_none() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert compare("x", logits, logits + 3.0, logits, torch.float32).agrees


def test_the_random_documents_have_two_of_one_length_and_one_beyond_small_windows() -> None:
    batch = random_batch(50)
    assert np.diff(batch.offsets).tolist() == [7, 12, 12, 40]
    assert batch.num_trained == batch.num_tokens == 71
    assert int(batch.tokens_T.max()) < 50


def test_a_buffer_of_the_checkpoint_is_loaded(tmp_path: Path) -> None:
    """A router's correction bias is no parameter, and no one computes it anew."""
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("glm4_moe"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    dict(model.named_buffers())[name].copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    model.save_pretrained(tmp_path)

    engine = make_engine(tmp_path)

    loaded = persistent_buffers(engine.model.hf)
    assert list(loaded) == [name]
    assert loaded[name].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    saved = {piece.name: piece.local for piece in checkpoint_shards(engine)}
    assert torch.equal(saved[f"buffer/{name}"], loaded[name])


def test_a_window_that_attention_does_not_get_limits_the_length(tmp_path: Path) -> None:
    model = make_engine(save_tiny_model("phimoe", tmp_path)).model
    assert self_check(model, CPU, torch.float32, max_length=50).agrees
    with pytest.raises(UnsupportedModelError, match=r"attention to 50 tokens .*data\.max_length to 50\b"):
        self_check(model, CPU, torch.float32, max_length=51)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_follow_the_longest_document_limit_the_length(tmp_path: Path, kind: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {"factor": 2.0}
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    model = make_engine(save_tiny_model("llama", tmp_path, rope_parameters=rope)).model
    assert self_check(model, CPU, torch.float32, max_length=64).agrees
    with pytest.raises(UnsupportedModelError, match=r"rotary embedding .* 64 .*data\.max_length to 64\b"):
        self_check(model, CPU, torch.float32, max_length=65)
