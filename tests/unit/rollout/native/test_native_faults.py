# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is an error of its own request; the engine continues, also after broken weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from native_world import Learner, ask, assert_same, cache_gib, sequence, sequences

from helpers.tiny import save_tiny_model
from podium.errors import PodiumError

WAYS = pytest.mark.parametrize("way", [{}, {"block_size": 8}], ids=["slots", "blocks"])


def test_a_request_larger_than_the_whole_cache_is_refused_and_the_others_go_on(learner: Learner) -> None:
    """40 tokens of cache; prompt and answer of 41 can never be held, those of 40 can, alone."""
    engine = learner.engine(block_size=4, memory_gib=cache_gib(learner, 40, block_size=4))
    found = sequences(engine, [ask(0, 21, new=20), ask(1, 20, new=20), ask(2, 3, new=4)])
    errors = {id.prompt_index: each.error for id, each in found.items() if each.finish == "error"}
    assert list(errors) == [0]
    assert re.search(r"\b41 tokens .*\b40\b.*max_new_tokens.*rollout\.memory_gib", errors[0] or "")
    assert [found[each].num_tokens for each in sorted(found)] == [0, 20, 4]


def test_stop_strings_without_a_tokenizer_are_an_error_of_their_request(learner: Learner) -> None:
    found = sequences(learner.engine(), [ask(0, stop_strings=("x",)), ask(1)])
    assert sorted(each.finish for each in found.values()) == ["error", "length"]
    assert "tokenizer" in next(each.error or "" for each in found.values() if each.finish == "error")


def test_a_row_without_any_allowed_token_ends_its_own_answer_with_what_it_has(learner: Learner) -> None:
    """Every token but one is forbidden, and that one is a stop which comes too early."""
    how: dict[str, Any] = {"allowed_tokens": frozenset([7]), "stop_tokens": frozenset([7]), "min_new_tokens": 3}
    found = sequences(learner.engine(), [ask(0, **how), ask(1)])
    assert sorted(each.finish for each in found.values()) == ["error", "length"]
    broken = next(each for each in found.values() if each.finish == "error")
    assert "allowed_tokens" in (broken.error or "")
    assert broken.num_tokens == 0


def broken_weights(learner: Learner) -> torch.Tensor:
    """Values of the first layer: what they leave in the cache is no number."""
    return learner.model.hf.get_decoder().layers[0].self_attn.v_proj.weight


@WAYS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_no_numbers_are_an_error_of_every_request_and_no_crash(
    own_learner: Learner, way: dict[str, Any], temperature: float
) -> None:
    with torch.no_grad():
        broken_weights(own_learner).fill_(torch.nan)
    found = sequences(own_learner.engine(**way), [ask(i, 4 + i, temperature=temperature) for i in range(5)])
    assert {each.finish for each in found.values()} == {"error"}
    assert all("diverged" in (each.error or "") for each in found.values())


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({}, id="slots"),
        pytest.param({"block_size": 8}, id="pages"),
    ],
)
def test_after_broken_weights_right_ones_sample_as_if_nothing_had_been(
    own_learner: Learner, way: dict[str, Any]
) -> None:
    """What is no number in the cache stays where it was written: nobody may read it, not even with weight zero."""
    requested = [ask(10 + i, 3 + 4 * i, new=6) for i in range(4)]
    wanted = sequences(own_learner.engine(**way), requested)
    engine = own_learner.engine(**way)
    right = broken_weights(own_learner).detach().clone()
    with torch.no_grad():
        broken_weights(own_learner).fill_(torch.nan)
    sequences(engine, [ask(i, 30) for i in range(4)])
    with torch.no_grad():
        broken_weights(own_learner).copy_(right)
    engine.install(own_learner.describe(1), None)
    found = sequences(engine, requested)
    for id, each in wanted.items():
        assert_same(found[id], each)


@WAYS
def test_one_request_that_breaks_does_not_touch_the_one_beside_it(own_learner: Learner, way: dict[str, Any]) -> None:
    """A prompt with a token whose embedding is no number; the other reads tokens below 200 only."""
    sound = ask(1, [5, 6, 7], new=20, allowed_tokens=frozenset(range(200)))
    wanted = sequence(own_learner.engine(**way), sound)
    with torch.no_grad():
        own_learner.model.hf.get_input_embeddings().weight[200] = torch.nan  # of the head too: it is tied
    own_learner.model.hf.get_output_embeddings().weight = torch.nn.Parameter(
        own_learner.model.hf.get_input_embeddings().weight.detach().nan_to_num()
    )
    found = sequences(own_learner.engine(**way), [ask(0, [5, 200, 6, 8]), sound])
    assert {id.prompt_index: each.finish for id, each in found.items()} == {0: "error", 1: "length"}
    assert found[sound.id].tokens_L.tolist() == wanted.tokens_L.tolist()


def test_a_model_whose_layers_keep_another_state_is_refused(tmp_path: Path) -> None:
    """Linear attention has a state that no page holds; answers would be wrong without a word."""
    linear = Learner.of(save_tiny_model("qwen3_next", tmp_path))
    with pytest.raises(PodiumError):
        linear.engine()
