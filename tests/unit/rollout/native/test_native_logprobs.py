# SPDX-License-Identifier: Apache-2.0
"""The engine's log-probs are the learner's, for every architecture that Podium trains, in slots and in pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from native_world import Learner, ask, sequence, sequences

from helpers.tiny import save_tiny_model

ARCHITECTURES = [
    "llama",
    "qwen3",
    "gemma3",
    "mistral",
    "qwen3_moe",
    "gemma2",
    "granite",
    "gpt_oss",
    "glm4_moe",
    "phimoe",
    "deepseek_v3",
    "ernie4_5_moe",
    "afmoe",
    "laguna",
    "gemma3n",
]
WAYS: dict[str, dict[str, Any]] = {
    "slots": {},
    # Prompts come in in parts, and windows end inside pages.
    "blocks": {"block_size": 8, "prefill_tokens": 10},
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Learner:
    return Learner.of(save_tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param))


@pytest.mark.parametrize("way", WAYS)
def test_log_probs_are_within_1e_4_of_the_learners(architecture: Learner, way: str) -> None:
    """Prompts shorter and longer than windows of 8; four rows of unlike length share a step."""
    temperatures = (1.0, 0.7, 0.0, 1.3)
    requests = [
        ask(draw, length, new=12, temperature=temperature)
        for draw, (length, temperature) in enumerate(zip((3, 20, 1, 42), temperatures, strict=True))
    ]
    found = sequences(architecture.engine(**WAYS[way]), requests)
    for each in requests:
        completion = found[each.id]
        assert (completion.finish, completion.num_tokens) == ("length", 12)
        assert architecture.gap(completion, temperature=each.sampling.temperature or 1.0) < 1e-4


def test_experts_are_chosen_for_a_token_not_for_its_batch(tmp_path: Path) -> None:
    """A mixture of experts gives every request what it gives it alone."""
    learner = Learner.of(save_tiny_model("qwen3_moe", tmp_path))
    requests = [ask(draw, 4 + draw, new=6) for draw in range(6)]
    together = sequences(learner.engine(), requests)
    for each in requests:
        alone = sequences(learner.engine(), [each])[each.id]
        assert together[each.id].tokens_L.tolist() == alone.tokens_L.tolist()


def test_no_sequence_is_longer_than_positions_that_do_not_depend_on_company(tmp_path: Path) -> None:
    """Some rotary embeddings choose other frequencies for the whole forward once a position is beyond the original
    context: a short answer beside a long one, and a cache that was begun before, would be another model's."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    limit = {"original_max_position_embeddings": 32}
    folder = save_tiny_model("llama", tmp_path, rope_parameters={**rope, **limit, "factor": 8.0}, **limit)
    learner = Learner.of(folder)
    assert learner.engine().capacity.max_length == 32
    assert learner.gap(sequence(learner.engine(), ask(0, 25, new=15))) < 1e-4
