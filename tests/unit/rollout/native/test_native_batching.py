# SPDX-License-Identifier: Apache-2.0
"""What a request draws does not depend on its company, the order of work, the size of pages or the room there is: on
CPU to the last bit of every log-prob."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_world import Learner, ask, cache_gib, prompt_of, sequence, sequences

from helpers.tiny import save_tiny_model
from podium.data.trajectories import TrajectoryId
from podium.rollout.requests import Completion, Request

LENGTHS = (3, 20, 1, 40, 11, 20, 33)


def requests() -> list[Request]:
    """Prompts of unlike length, two samples each; some begin alike, some are narrowed, one is greedy."""
    shared = prompt_of(16, 99)
    plain = [ask(draw, length, new=14, sample=s) for draw, length in enumerate(LENGTHS) for s in range(2)]
    alike = [ask(20 + i, np.concatenate([shared, prompt_of(5, i)]), new=9) for i in range(3)]
    processed = [
        ask(30, 12, new=14, top_k=20, temperature=0.8),
        ask(31, 7, new=14, top_p=0.9, repetition_penalty=1.3),
        ask(32, 7, new=14, temperature=0),
    ]
    return [*plain, *alike, *processed]


@pytest.fixture(scope="module")
def alone(learner: Learner) -> dict[TrajectoryId, Completion]:
    """Each in an engine of its own, whole prompts, nothing reused."""
    return {each.id: sequence(learner.engine(max_running=1, reuse_prefixes=False), each) for each in requests()}


WAYS: dict[str, dict[str, Any]] = {
    "all together": {},
    "two at a time": {"max_running": 2},
    "prompts in parts": {"prefill_tokens": 5},
    "blocks of one": {"block_size": 1},
    "blocks of 8": {"block_size": 8},
    "nothing reused": {"reuse_prefixes": False},
    "blocks of 64, two at a time, in parts": {"block_size": 64, "max_running": 2, "prefill_tokens": 5},
}


def assert_all_same(found: dict[TrajectoryId, Completion], wanted: dict[TrajectoryId, Completion]) -> None:
    for id, completion in wanted.items():
        assert found[id].tokens_L.tolist() == completion.tokens_L.tolist(), id
        assert found[id].finish == completion.finish == "length"
        assert found[id].logprobs_L.tobytes() == completion.logprobs_L.tobytes(), id


@pytest.mark.parametrize("way", list(WAYS))
def test_tokens_are_the_same_in_any_company(learner: Learner, alone: dict[TrajectoryId, Completion], way: str) -> None:
    assert_all_same(sequences(learner.engine(**WAYS[way]), requests()), alone)


def test_the_order_of_arrival_changes_nothing(learner: Learner, alone: dict[TrajectoryId, Completion]) -> None:
    assert_all_same(sequences(learner.engine(max_running=5), reversed(requests())), alone)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [4, 8])
def test_a_cache_too_small_for_all_computes_again_and_samples_the_same(
    learner: Learner, alone: dict[TrajectoryId, Completion], block_size: int
) -> None:
    """96 tokens for 20 requests of up to 54: some are put back and come again."""
    budget = cache_gib(learner, 96, block_size=block_size)
    engine = learner.engine(block_size=block_size, memory_gib=budget, reuse_prefixes=False)
    assert engine.capacity.cache_tokens == 96
    assert_all_same(sequences(engine, requests()), alone)
    load = engine.load()
    assert load.preemptions > 0
    assert (load.waiting, load.running, load.cache_tokens_used) == (0, 0, 0)
    assert load.finished == len(requests())


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [4, 8])
def test_what_is_remembered_gives_way_when_room_is_needed(
    learner: Learner, alone: dict[TrajectoryId, Completion], block_size: int
) -> None:
    engine = learner.engine(block_size=block_size, memory_gib=cache_gib(learner, 96, block_size=block_size))
    assert_all_same(sequences(engine, requests()), alone)
    assert engine.load().cache_tokens_used == 0
    assert engine.load().cache_tokens_kept > 0


@pytest.mark.parametrize("budget", range(1, 10))
def test_a_prompt_is_fed_in_parts_of_any_size(learner: Learner, budget: int) -> None:
    """Also where one token is left for the last part."""
    request = ask(0, 8, new=3, temperature=0)
    whole = sequence(learner.engine(), request)
    assert sequence(learner.engine(prefill_tokens=budget), request).tokens_L.tolist() == whole.tokens_L.tolist()


# Widths that leave a rest behind vectors, heads that share no keys, windows, soft caps, sinks, experts with one token.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "odd widths": ("qwen3", {"hidden_size": 38, "intermediate_size": 53, "head_dim": 10, "vocab_size": 251}),
    "no shared keys": ("llama", {"num_key_value_heads": 4}),
    "windows": ("gemma3", {}),
    "soft caps": ("gemma2", {}),
    "experts": ("qwen3_moe", {}),
    "sinks and experts": ("gpt_oss", {}),
}


# oneDNN changes how matrices are multiplied, not what the architectures do: widths and experts are enough for it.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "onednn"),
    [
        *((name, False) for name in ARCHITECTURES),
        *(
            (name, True) if name in ("odd widths", "experts") else pytest.param(name, True, marks=pytest.mark.slow)
            for name in ARCHITECTURES
        ),
    ],
)
def test_any_architecture_computes_a_sequence_to_the_same_bits_in_any_company(
    tmp_path: Path, name: str, onednn: bool
) -> None:
    architecture, changes = ARCHITECTURES[name]
    learner = Learner.of(save_tiny_model(architecture, tmp_path / "model", **changes))
    requested = requests()[::2]
    was_on = torch.backends.mkldnn.set_flags(onednn)[0]
    try:
        alone = {each.id: sequence(learner.engine(max_running=1, reuse_prefixes=False), each) for each in requested}
        engine = learner.engine(max_running=3, prefill_tokens=7)
        assert_all_same(sequences(engine, reversed(requested)), alone)
        assert_all_same(sequences(engine, requested), alone)  # what it did before leaves no trace
        assert_all_same(sequences(learner.engine(block_size=8), requested), alone)
        assert torch.backends.mkldnn.set_flags(was_on)[0] == onednn
    finally:
        torch.backends.mkldnn.set_flags(was_on)
