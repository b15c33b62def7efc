# SPDX-License-Identifier: Apache-2.0
"""Tiny models for the rollout engines, the engines themselves, and transformers as the judge of what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.tiny import save_tiny_model, tiny_tokenizer
from podium.rollout.engine import RolloutEngine
from rollout.engines import native_engine, tensor_engine, vllm_engine
from rollout.judge import Judge

EngineFactory = Callable[..., RolloutEngine]
# vLLM's attention on CPU has no smaller heads.
_SHAPE = {"head_dim": 32, "max_position_embeddings": 512}


@pytest.fixture(scope="session")
def rollout_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with tied embeddings, more tokens than its tokenizer uses, and that tokenizer. Read only."""
    folder = tmp_path_factory.mktemp("rollout") / "first"
    tiny_tokenizer().save_pretrained(folder)
    return save_tiny_model("qwen3", folder, **_SHAPE)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("rollout") / "other", seed=1, **_SHAPE)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is not its embedding."""
    folder = tmp_path_factory.mktemp("rollout") / "untied"
    return save_tiny_model("qwen3", folder, tie_word_embeddings=False, **_SHAPE)


@pytest.fixture(scope="session")
def judge(rollout_folder: Path) -> Judge:
    return Judge(rollout_folder)


@pytest.fixture(scope="session")
def other_judge(other_folder: Path) -> Judge:
    return Judge(other_folder)


@pytest.fixture(
    params=[
        "native",
        pytest.param("tensor", marks=pytest.mark.slow),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ]
)
def engine_factory(request: pytest.FixtureRequest) -> Iterator[EngineFactory]:
    """Makes engines that are closed when the test ends; vLLM allows one at a time."""
    make = {"native": native_engine, "tensor": tensor_engine, "vllm": vllm_engine}[request.param]
    made: list[RolloutEngine] = []

    def factory(
        folder: Path, *, max_length: int = 256, max_running: int = 8, cache_bytes: int = 4 * 2**20
    ) -> RolloutEngine:
        made.append(make(folder, max_length=max_length, max_running=max_running, cache_bytes=cache_bytes))
        return made[-1]

    yield factory
    for engine in made:
        engine.close()


@pytest.fixture
def engine(engine_factory: EngineFactory, rollout_folder: Path) -> RolloutEngine:
    return engine_factory(rollout_folder)
