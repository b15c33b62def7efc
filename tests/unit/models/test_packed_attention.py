# SPDX-License-Identifier: Apache-2.0
"""Packed attention against dense attention under a block mask, and documents that cannot see each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.engines import make_engine, random_documents
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, pack
from podium.engine.train_step import TrainEngine
from podium.errors import UnsupportedModelError
from podium.models.attention import packed_attention
from podium.models.packing import Packing, runs_of, to_device

# H query heads · K key-value heads · E head width
H, K, E = 4, 2, 8
CPU = torch.device("cpu")


def packing_of(lengths: Sequence[int]) -> Packing:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Packing(boundaries=torch.from_numpy(offsets), longest=max(lengths), runs=runs_of(offsets))


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], *, scaling: float, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Every pair scored, and what may not be seen taken out: slow and plain."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    index = torch.arange(len(document))
    seen = (document[:, None] == document[None, :]) & (index[:, None] >= index[None, :])
    if window is not None:
        seen &= index[:, None] - index[None, :] < window
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[None, :, None, None]
    return (weights / total @ value).transpose(1, 2)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("key_heads", [K, H])
def test_packed_attention_is_dense_attention_within_each_document(
    key_heads: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    lengths = (1, 5, 5, 2, 9)
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, H, sum(lengths), E, generator=draw)
    key, value = (torch.randn(1, key_heads, sum(lengths), E, generator=draw) for _ in range(2))
    sink = torch.randn(H, generator=draw) if sinks else None
    found, weights = packed_attention(
        nn.Module(), query, key, value, None, packing=packing_of(lengths), scaling=0.3, sliding_window=window,
        softcap=softcap, s_aux=sink,
    )  # fmt: skip
    wanted = dense_attention(query, key, value, lengths, scaling=0.3, window=window, softcap=softcap, sinks=sink)
    assert weights is None
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_an_architecture_that_does_not_pass_the_boundaries_on_is_refused() -> None:
    states = torch.zeros(1, H, 3, E)
    with pytest.raises(UnsupportedModelError, match=r"^Module .*`packing`"):
        packed_attention(nn.Module(), states, states, states, None)


def test_an_architecture_that_looks_ahead_is_refused() -> None:
    module, states = nn.Module(), torch.zeros(1, H, 3, E)
    module.is_causal = False  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="both directions"):
        packed_attention(module, states, states, states, None, packing=packing_of([3]))


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_moe"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainEngine:
    """Full attention, sliding windows, and experts that choose among the tokens of all documents together."""
    folder = save_tiny_model(request.param, tmp_path_factory.mktemp("model"), tie_word_embeddings=False)
    return make_engine(folder)


def logprobs_by_document(engine: TrainEngine, documents: Sequence[Document]) -> list[Tensor]:
    found = engine.model(to_device(pack(documents), CPU), None, kind="logprobs")
    return list(found.split([document.num_trained for document in documents]))


def replaced(document: Document) -> Document:
    """The same mask over entirely other tokens."""
    return Document(tokens=(document.tokens + 101) % 250, trained=document.trained)


@pytest.mark.parametrize("changed", [0, 2, 4])
def test_changing_one_document_never_changes_anothers_loss(engine: TrainEngine, changed: int) -> None:
    documents = random_documents((11, 11, 20, 1, 14))
    before = logprobs_by_document(engine, documents)
    documents[changed] = replaced(documents[changed])
    after = logprobs_by_document(engine, documents)
    for index in range(len(documents)):
        if index == changed:
            assert (before[index] - after[index]).abs().max() > 1e-2
        else:
            torch.testing.assert_close(after[index], before[index], rtol=0, atol=1e-6)


def test_changing_one_document_never_changes_anothers_gradient(engine: TrainEngine) -> None:
    documents = random_documents((11, 11, 20, 14))
    untrained = [
        document if index == 2 else Document(tokens=document.tokens, trained=np.zeros_like(document.trained))
        for index, document in enumerate(documents)
    ]
    others = [document if index == 2 else replaced(document) for index, document in enumerate(untrained)]
    gradients = []
    for each in (untrained, others):
        _, found = engine.gradients([pack(each)], token_cross_entropy, normalizer=1.0)
        gradients.append({item.name: found[id(item)].clone() for item in engine.optimizer.trained})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    # The embedding rows of tokens that only other documents hold get exactly nothing.
    used = set(documents[2].tokens[:-1].tolist())
    embedding = gradients[0]["model.embed_tokens.weight"]
    assert not embedding[[row for row in range(250) if row not in used]].any()


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=7), seed=st.integers(0, 2**16))
def test_any_packing_gives_the_losses_of_one_document_at_a_time(lengths: list[int], seed: int) -> None:
    documents = random_documents(lengths, seed=seed)
    packed = logprobs_by_document(_mistral(), documents)
    for document, found in zip(documents, packed, strict=True):
        (alone,) = logprobs_by_document(_mistral(), [document])
        torch.testing.assert_close(found, alone, rtol=0, atol=2e-6)


_made: list[TrainEngine] = []


@pytest.fixture(autouse=True, scope="module")
def _made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hypothesis runs a test body many times within one fixture: the model is made before all of them."""
    _made[:] = [make_engine(save_tiny_model("mistral", tmp_path_factory.mktemp("mistral")))]


def _mistral() -> TrainEngine:
    return _made[0]


def test_a_model_run_without_boundaries_is_refused_by_its_own_attention(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("llama", tmp_path))
    with pytest.raises(UnsupportedModelError, match="LlamaAttention"):
        engine.model.hf(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False)
