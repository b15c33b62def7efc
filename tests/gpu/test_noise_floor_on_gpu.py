# SPDX-License-Identifier: Apache-2.0
"""The self-check on deep random models in bfloat16: rounding passes, a wrong attention mask does not."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from podium.engine.mesh import Mesh
from podium.engine.sharding import place
from podium.errors import UnsupportedModelError
from podium.models import attention
from podium.models.attention import varlen_attention
from podium.models.verify import self_check
from podium.recipe import ModelSection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Sizes of the Qwen3 family: hidden, intermediate, layers, heads, and whether the head is the embedding.
SIZES = {
    "0.6b": (1024, 3072, 28, 16, True),
    "1.7b": (2048, 6144, 28, 16, True),
    "8b": (4096, 12288, 36, 32, False),
}


def across_documents(query: Any, key: Any, value: Any, bounds: Any, longest: Any, **options: Any) -> Any:
    """Attention that takes all documents for one."""
    whole, length = bounds[0][[0, -1]], len(query)
    return varlen_attention(query, key, value, (whole, whole), (length, length), **options)


def narrow(*args: Any, window: int | None, **options: Any) -> Any:
    """Attention that sees the last 16 tokens only: wrong for the one document that is longer."""
    return varlen_attention(*args, window=16, **options)


@pytest.mark.parametrize("size", SIZES)
def test_rounding_passes_and_a_wrong_mask_does_not(size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, intermediate, layers, heads, tied = SIZES[size]
    Qwen3Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=tied,
        max_position_embeddings=4096, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    device = torch.device("cuda", 0)
    mesh = Mesh(rank=0, world=1, device=device, devices=None)
    section = ModelSection(path=str(tmp_path), init="random", dtype="bfloat16", compile="off")
    model, trained = place(section, tmp_path, mesh, seed=0)

    comparison = self_check(model, device, torch.bfloat16, max_length=4096)
    print(f"\n{size}: {comparison}")

    assert comparison.agrees
    for wrong in (across_documents, narrow):
        monkeypatch.setattr(attention, "varlen_attention", wrong)
        with pytest.raises(UnsupportedModelError) as caught:
            self_check(model, device, torch.bfloat16, max_length=4096)
        print(f"{size}, {wrong.__name__}: {caught.value}")
    del model, trained
    gc.collect()
    torch.cuda.empty_cache()
