# SPDX-License-Identifier: Apache-2.0
"""Greedy answers through the packed forward are the answers that transformers gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from helpers.engines import one_rank
from podium.engine.sharding import place
from podium.errors import RecipeError
from podium.models.causal_lm import PackedCausalLM
from podium.recipe import GenerationSection, ModelSection
from podium.spmd import evaluation
from podium.spmd.evaluation import exact_match, stop_tokens
from podium.spmd.generation import _batches, greedy_answers

PROMPTS = [np.array(prompt, np.int32) for prompt in ([5, 9, 13], [7], [20, 21, 22, 23, 24, 25, 26], [3, 3, 3])]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> PackedCausalLM:
    placed, _ = place(ModelSection(path=str(tiny_folder)), tiny_folder, one_rank(), seed=0)
    return placed


def _by_transformers(folder: Path, new_tokens: int, ends: list[int]) -> list[list[int]]:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    answers = []
    for prompt in PROMPTS:
        tokens = torch.tensor(prompt[None].astype(np.int64))
        made = reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, do_sample=False,
            eos_token_id=ends or None, pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        first = next((index for index, token in enumerate(made) if token in ends), len(made))
        answers.append(made[:first])
    return answers


@pytest.mark.parametrize("limit", [8, 1000])
def test_greedy_answers_are_those_of_transformers(model: PackedCausalLM, tiny_folder: Path, limit: int) -> None:
    answers = greedy_answers(
        model, one_rank(), PROMPTS, max_new_tokens=12, stop_tokens=frozenset(), max_batch_tokens=limit
    )

    assert [answer.tolist() for answer in answers] == _by_transformers(tiny_folder, 12, [])


def test_an_answer_ends_before_its_stop_token(model: PackedCausalLM, tiny_folder: Path) -> None:
    unstopped = _by_transformers(tiny_folder, 12, [])
    ends = sorted({unstopped[0][2], unstopped[2][5]})

    answers = greedy_answers(
        model, one_rank(), PROMPTS, max_new_tokens=12, stop_tokens=frozenset(ends), max_batch_tokens=1000
    )

    assert [answer.tolist() for answer in answers] == _by_transformers(tiny_folder, 12, ends)
    assert len(answers[0]) <= 2
    assert not {token for answer in answers for token in answer.tolist()} & set(ends)


def test_the_model_trains_on_after_answering(model: PackedCausalLM) -> None:
    model.train()
    greedy_answers(model, one_rank(), PROMPTS[:1], max_new_tokens=1, stop_tokens=frozenset(), max_batch_tokens=100)

    assert model.training


def test_batches_are_by_length_and_leave_room_for_the_answers() -> None:
    prompts = [np.zeros(length, np.int32) for length in (5, 1, 3, 2)]

    # With room for 2 new tokens the lengths are 7, 3, 5, 4; 3 + 4 = 7 fit into 8, then 5, then 7.
    assert list(_batches([0, 1, 2, 3], prompts, 2, 8)) == [[1, 3], [2], [0]]


@given(
    lengths=st.lists(st.integers(min_value=1, max_value=30), max_size=20),
    room=st.integers(min_value=1, max_value=10),
    limit=st.integers(min_value=1, max_value=60),
)
def test_every_prompt_is_in_one_batch_and_only_a_lone_one_may_exceed_the_limit(
    lengths: list[int], room: int, limit: int
) -> None:
    prompts = [np.zeros(length, np.int32) for length in lengths]

    batches = list(_batches(list(range(len(lengths))), prompts, room, limit))

    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[index] + room for index in batch) <= limit for batch in batches)


@pytest.mark.parametrize(
    ("end", "config", "found"),
    [
        (2, None, {2}),
        (None, None, set()),
        (2, {"eos_token_id": 7}, {2, 7}),
        (2, {"eos_token_id": [7, 8]}, {2, 7, 8}),
        (0, {}, {0}),
        (2, {"eos_token_id": None}, {2}),
    ],
)
def test_answers_stop_at_the_tokenizers_end_and_those_of_the_generation_config(
    tmp_path: Path, end: int | None, config: dict[str, object] | None, found: set[int]
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))

    assert stop_tokens(SimpleNamespace(eos_token_id=end), tmp_path) == found


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [("12", "12", 1.0), (" 12\n", "12", 1.0), ("12", "12 ", 1.0), ("12.", "12", 0.0), ("", "12", 0.0), ("A", "a", 0.0)],
)
def test_exact_match_looks_past_white_space_around_the_answer_only(answer: str, reference: str, score: float) -> None:
    assert exact_match(answer, reference, {}) == score


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, "1.0", [1.0]])
def test_a_score_that_is_no_finite_number_is_refused(score: object) -> None:
    with pytest.raises(RecipeError, match=rf"evaluation\.generation\.score: .*{re.escape(repr(score))}"):
        evaluation._checked(score)


def test_a_score_may_be_an_integer_or_a_truth_value() -> None:
    assert [evaluation._checked(score) for score in (1, True, 0.5)] == [1.0, 1.0, 0.5]


def test_a_score_is_exact_match_a_plugin_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def half(answer, reference, row):\n    return 0.5\n")

    assert evaluation._score_function(GenerationSection()) is None
    assert evaluation._score_function(GenerationSection(score="exact_match")) is exact_match
    half = evaluation._score_function(GenerationSection(score=f"{tmp_path}/mine.py:half"))
    assert half is not None
    assert half("a", "b", {}) == 0.5
