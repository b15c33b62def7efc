# SPDX-License-Identifier: Apache-2.0
"""A document of 131,072 tokens trains on CPU in memory that grows with its tokens, not with their square."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from helpers.engines import make_engine
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, PackedBatch, pack
from podium.recipe import OptimizerSection

LENGTH, VOCABULARY = 131_072, 4096
MIB = 2**20


def resident(key: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at its peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def taken(folder: Path, **options: object) -> int:
    """Bytes that one training step takes beyond what is there before it. A short step goes before: libraries take
    memory of their own at first."""
    engine = make_engine(folder, optimizer=OptimizerSection(lr=1e-3, offload=True), **options)
    short, batch = (_document(length) for length in (512, LENGTH))
    engine.train_step([short], token_cross_entropy, normalizer=short.num_trained, lr=0.0).resolve()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = resident("VmRSS")
    report = engine.train_step([batch], token_cross_entropy, normalizer=batch.num_trained, lr=1e-3).resolve()
    assert report.loss == pytest.approx(np.log(VOCABULARY), rel=0.05)
    assert not report.skipped
    return resident("VmHWM") - before


def _document(length: int) -> PackedBatch:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY - 64, length + 1).astype(np.int32)
    return pack([Document(tokens=tokens, trained=np.arange(length + 1) > 0)])


def taken_apart(folder: Path, **options: object) -> int:
    """The same in a process of its own: what one step has freed is there for the next."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(taken, folder, **options).result(timeout=280)


@pytest.mark.slow
def test_a_document_of_128k_tokens_trains_in_bounded_memory(tmp_path: Path) -> None:
    """Attention has a window, because whole attention of so many tokens takes minutes on a CPU. All scores would be
    64 GiB, one mask 16 GiB, all logits 2 GiB."""
    folder = save_tiny_model(
        "mistral", tmp_path, sliding_window=64, max_position_embeddings=LENGTH + 8, hidden_size=16,
        intermediate_size=32, num_hidden_layers=3, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    recomputed = taken_apart(folder, activation_checkpointing="layers", offload_activations=True)
    kept = taken_apart(folder)
    assert kept < 1536 * MIB
    assert recomputed < 0.75 * kept, f"{recomputed / MIB:.0f} MiB recomputed, {kept / MIB:.0f} kept"
