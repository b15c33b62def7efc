# SPDX-License-Identifier: Apache-2.0
"""Native engines of two processes over gloo: answers are those of one rank, and nothing is left of a rank that dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.engines import one_rank
from helpers.tiny import save_tiny_model, tiny_tokenizer
from podium.cluster import processes
from podium.errors import RolloutError
from podium.models.cpu_settings import CpuSettings
from podium.recipe import ModelSection
from podium.rollout.checkpoints import open_engine
from podium.rollout.native.engine import NativeEngine
from podium.rollout.native.tensor_ranks import require_divisible
from rollout.judge import DEADLINE_S, Judge, Weights, ask
from rollout.scripts import SCRIPTS, require_same, section_of

pytestmark = pytest.mark.slow
SETTINGS = CpuSettings(threads=1, onednn=False)


@contextmanager
def opened(folder: Path, script: Any, ranks: int, **named: Any) -> Iterator[NativeEngine]:
    engine = open_engine(
        ModelSection(path=str(folder)), folder, one_rank(), section_of(script, ranks), tokenizer=tiny_tokenizer(),
        max_length=128, cpu=SETTINGS, tensor=ranks, timeout_s=DEADLINE_S, **named,
    ).engine  # fmt: skip
    assert isinstance(engine, NativeEngine)
    try:
        yield engine
    finally:
        engine.close()


def children() -> set[int]:
    """Processes that this one has started and that have not ended."""
    return set(processes.children(os.getpid()))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3_moe", "gpt_oss"])
def test_two_processes_answer_as_one_and_take_new_weights_under_way(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(name, tmp_path / "first")
    other = Weights.of(Judge(save_tiny_model(name, tmp_path / "other", seed=1)).model)
    before, script = children(), SCRIPTS[1]
    found = []
    for ranks in (1, 2):
        with opened(folder, script, ranks) as engine:
            answered = script.run(engine)
            engine.submit([ask(70, new=3), ask(71, new=30, temperature=0.0)])
            results = engine.results(deadline_s=DEADLINE_S)
            first = next(results)
            engine.install(other.version(5), other)
            found.append(answered | {each.id: each for each in (first, *results)})
    require_same(found[1], found[0])
    assert set(found[0][ask(71).id].versions_L.tolist()) == {0, 5}
    assert children() == before


def test_the_death_of_a_rank_is_reported_and_ends_the_engine(tmp_path: Path) -> None:
    folder, before = save_tiny_model("llama", tmp_path / "model"), children()
    reasons, died = list[str](), threading.Event()

    def on_death(reason: str) -> None:
        reasons.append(reason)
        died.set()

    with opened(folder, SCRIPTS[0], 2, on_death=on_death) as engine:
        engine.submit([ask(0, new=100), ask(1, new=1)])
        results = engine.results(deadline_s=DEADLINE_S)
        next(results)
        (rank,) = children() - before
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RolloutError, match=r"rank 1 .*exit code -9"):
            list(results)
        assert died.wait(DEADLINE_S)
        assert reasons == [f"rank 1 (process {rank}) ended with exit code -9"]
        with pytest.raises(RolloutError, match="close this engine"):
            engine.submit([ask(2)])
    assert children() == before


def test_a_folder_that_cannot_be_read_is_reported_as_for_one_rank_and_leaves_no_process(tmp_path: Path) -> None:
    folder, before = save_tiny_model("llama", tmp_path / "model"), children()
    (folder / "model.safetensors").unlink()
    for ranks in (1, 2):
        with pytest.raises(Exception, match="safetensors") as caught, opened(folder, SCRIPTS[0], ranks):
            pass
        assert type(caught.value).__name__ == "ModelError"
    assert children() == before


def test_models_that_are_not_divided_are_refused_before_a_process_starts(tmp_path: Path) -> None:
    dense, mixture, other = (save_tiny_model(name, tmp_path / name) for name in ("llama", "mixtral", "phimoe"))
    with pytest.raises(RolloutError, match=r"placement\.generator\.tensor: 3 does not divide num_attention_heads 4"):
        require_divisible(ModelSection(path=str(dense)), dense, 3)
    with pytest.raises(RolloutError, match=r"placement\.generator\.tensor: 4 does not divide .*number of experts 2"):
        require_divisible(ModelSection(path=str(save_tiny_model("mixtral", mixture, num_local_experts=2))), mixture, 4)
    with pytest.raises(RolloutError, match=r"placement\.generator\.tensor: phimoe is not among"):
        require_divisible(ModelSection(path=str(other)), other, 2)
