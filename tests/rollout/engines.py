# SPDX-License-Identifier: Apache-2.0
"""How the behavioural tests make each engine: the same plain settings for both, skipped where one is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from helpers.tiny import tiny_tokenizer
from podium.rollout.engine import RolloutEngine


def native_engine(folder: Path, *, max_length: int, max_running: int, cache_bytes: int) -> RolloutEngine:
    """Podium's own engine on a model that it loads from the folder, float32 on CPU."""
    if importlib.util.find_spec("podium.rollout.native.engine") is None:
        pytest.skip("the native engine is not there")
    from podium.engine.mesh import join
    from podium.engine.sharding import place
    from podium.recipe import ModelSection, PlacementSection, RolloutSection
    from podium.rollout.native.engine import NativeEngine

    mesh = join(PlacementSection.model_validate({"device": "cpu"}), rank=0, world=1, local_rank=0)
    model, _ = place(ModelSection(path=str(folder)), folder, mesh, seed=0)
    section = RolloutSection(
        max_length=max_length, max_running=max_running, memory_gib=cache_bytes / 2**30, block_size=32
    )
    return NativeEngine(model, mesh.device, section, decode=tiny_tokenizer().decode)


def tensor_engine(folder: Path, *, max_length: int, max_running: int, cache_bytes: int) -> RolloutEngine:
    """The native engine over two ranks, each with half of the model and of the cache."""
    from helpers.tensor_engines import engine_on_threads
    from podium.recipe import RolloutSection

    section = RolloutSection(
        max_length=max_length, max_running=max_running, memory_gib=cache_bytes / 2 / 2**30, block_size=32
    )
    return engine_on_threads(folder, section)


def vllm_engine(folder: Path, *, max_length: int, max_running: int, cache_bytes: int) -> RolloutEngine:
    """vLLM in this process, without compilation, which would take longer than the tests."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed in this environment: run `make test-vllm`")
    from podium.rollout.vllm.engine import VllmEngine
    from podium.rollout.vllm.settings import VllmSettings

    settings = VllmSettings(
        folder=str(folder),
        dtype="float32",
        max_length=max_length,
        max_running=max_running,
        cache_bytes=cache_bytes,
        block_size=32,
        compiled=False,
    )
    return VllmEngine(settings)
