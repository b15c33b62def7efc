# SPDX-License-Identifier: Apache-2.0
"""Whose signature a function has, what it is called with, and that one which cannot be called is refused at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest

from helpers.messages import facts
from podium.data.trajectories import TrajectoryId
from podium.environments.signatures import Sample, Signature, fit_signature
from podium.errors import DataError, RecipeError

ASK = {"role": "user", "content": "what is 1+2?"}
SAID = {"role": "assistant", "content": "3"}


def sample(number: int = 0, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "id": TrajectoryId(7, number), "group": 7, "prompt_text": "1+2=", "messages": None, "answer": f"a{number}",
        "reference": "3", "row": {"prompt": "1+2=", "answer": "3"}, "source": "sums", "num_tokens": 4,
    }  # fmt: skip
    return Sample(**(values | changes))


def fit(
    function: Callable[..., Any], *, style: Any = "auto", per: Any = "sample", **options: Any
) -> Signature:  # fmt: skip
    return fit_signature(function, options, style=style, per=per, key="reward.0")


def called(function: Callable[..., Any], samples: Sequence[Sample], *, style: Any = "auto", per: Any = "sample") -> Any:
    return function(**fit(function, style=style, per=per).arguments(samples))


def test_a_function_of_podium_s_style_gets_what_it_names() -> None:
    def everything(
        answer, reference, row, prompt, messages, source, num_tokens, truncated, sample, turns
    ):  # fmt: skip
        return (answer, reference, row["answer"], prompt, messages, source, num_tokens, truncated, sample.group, turns)

    assert called(everything, [sample()]) == ("a0", "3", "3", "1+2=", None, "sums", 4, False, 7, None)
    assert called(lambda answer: answer, [sample()]) == "a0"
    assert called(lambda *, row, answer="": (row["prompt"], answer), [sample()]) == ("1+2=", "a0")
    assert called(lambda sample, **rest: (sample.id, rest), [sample()]) == (TrajectoryId(7, 0), {})


@pytest.mark.parametrize("per", ["batch", "group"])
def test_a_batch_or_group_gets_the_same_in_lists(per: Literal["batch", "group"]) -> None:
    def everything(
        answers, references, rows, prompts, messages, sources, num_tokens, truncated, samples, turns
    ):  # fmt: skip
        assert [one.answer for one in samples] == answers
        return answers, references, len(rows), prompts, messages, sources, num_tokens, truncated, turns

    assert called(everything, [sample(0), sample(1, num_tokens=9, truncated=True)], per=per) == (
        ["a0", "a1"], ["3", "3"], 2, ["1+2="] * 2, [None] * 2, ["sums"] * 2, [4, 9], [False, True], [None] * 2,
    )  # fmt: skip


def test_options_are_left_to_the_recipe() -> None:
    signature = fit(lambda answer, scale, power=2: 0.0, scale=3)

    assert signature.arguments([sample()]) == {"answer": "a0"}


@pytest.mark.parametrize(
    ("function", "style", "per"),
    [
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0.0, "verl", "sample"),
        (lambda solution_str, ground_truth, **kwargs: 0.0, "verl", "sample"),
        (lambda data_sources, solution_strs, ground_truths, extra_infos: [], "verl", "batch"),
        (lambda prompts, completions, **kwargs: [], "trl", "batch"),
        (lambda completions, ground_truth, **kwargs: [], "trl", "batch"),
        (lambda completions, answer, solution_str=None: [], "trl", "batch"),
        (lambda completion_ids, **kwargs: [], "trl", "batch"),
        (lambda answer, reference: 0.0, "podium", "sample"),
    ],
)  # fmt: skip
def test_the_style_follows_from_the_names(function: Callable[..., Any], style: str, per: str) -> None:
    signature = fit(function)

    assert (signature.style, signature.per) == (style, per)


def test_a_function_of_verl_gets_its_four_arguments() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        extra_info["seen"] = True
        return data_source, solution_str, ground_truth, extra_info, kwargs

    row = {"reward_model": {"style": "rule", "ground_truth": ["3", "three"]}, "extra_info": {"index": 1}}
    one = sample(row=row, reference='["3", "three"]')

    assert called(compute_score, [one]) == ("sums", "a0", ["3", "three"], {"index": 1, "seen": True}, {})
    assert row["extra_info"] == {"index": 1}  # the row is shared by all samples of the prompt
    assert called(compute_score, [sample()]) == ("sums", "a0", "3", {"seen": True}, {})


def test_verl_s_old_functions_and_batches_are_called_too() -> None:
    assert called(lambda solution_str, ground_truth: (solution_str, ground_truth), [sample()]) == ("a0", "3")

    def batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
        return list(zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True))

    assert called(batched, [sample(0), sample(1)]) == [("sums", "a0", "3", {}), ("sums", "a1", "3", {})]


def test_a_function_of_trl_gets_strings_for_string_prompts_and_every_column() -> None:
    def reward(prompts, completions, **kwargs):
        return prompts, completions, kwargs

    rows = [sample(0, row={"prompt": "1+2=", "answer": "3", "level": 1}), sample(1, tokens=np.array([5, 6], np.int32))]

    assert called(reward, rows) == (
        ["1+2=", "1+2="],
        ["a0", "a1"],
        {"completion_ids": [None, [5, 6]], "answer": ["3", "3"], "level": [1, None]},
    )


def test_a_function_of_trl_gets_chats_for_chats() -> None:
    def reward(prompts, completions):
        return prompts, completions

    turns = [ASK, SAID, ASK, {"role": "assistant", "content": "a1"}]
    alone, longer = sample(0, messages=(ASK,)), sample(1, messages=(ASK,), turns=turns)

    prompts, completions = called(reward, [alone, longer])

    assert prompts == [[ASK], [ASK]]
    assert completions == [[{"role": "assistant", "content": "a0"}], turns[1:]]


def test_a_function_of_trl_without_kwargs_gets_the_columns_that_it_names() -> None:
    def reward(completions, answer, level=9, trainer_state=0, log_metric=None):
        log_metric("anything", 1.0)
        return answer, level, trainer_state

    assert called(reward, [sample(), sample()]) == (["3", "3"], 9, None)


def test_a_column_that_no_row_has_is_named() -> None:
    with pytest.raises(DataError, match=r"'solution'.*\bsums\b.*: pr"):
        called(lambda completions, solution: [], [sample()])


def test_options_win_over_columns_in_trl_s_style() -> None:
    signature = fit(lambda completions, **kwargs: [], answer="mine")

    assert "answer" not in signature.arguments([sample()])


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        (lambda text, truth: 0.0, {}, ["reward.0.function: <lambda>(text, truth) ", "`text`, `truth`",
         "answer, reference, row, prompt, messages, source, num_tokens, truncated, sample, turns"]),
        (lambda answers: [], {}, ["`answers`", "answer, reference", "reward.0.per", "batch", "group"]),
        (lambda answer: 0.0, {"per": "group"}, ["`answer`", "answers, references"]),
        (lambda answer: 0.0, {"per": "batch"}, ["`answer`", "reward.0.per", "sample"]),
        (lambda: 0.0, {}, ["<lambda>() takes nothing", "answer, reference"]),
        (lambda **kwargs: 0.0, {}, ["takes nothing"]),
        (lambda answers=(): 0.0, {}, ["reward.0.per", "batch", "group"]),
        (lambda answer, /: 0.0, {}, ["`answer`", "position"]),
        (lambda answer: 0.0, {"scale": 2}, ["reward.0.options.scale: ", "<lambda>(answer)"]),
        (lambda answer, row: 0.0, {"row": 2}, ["reward.0.options.row: ", "Podium"]),
        (lambda solution_str, ground_truth, tokenizer: 0.0, {}, ["`tokenizer`", "verl"]),
        (lambda solution_str, extra_info: 0.0, {"extra_info": 1}, ["reward.0.options.extra_info: ", "Podium"]),
        (lambda solution_str: 0.0, {"per": "batch"}, ["reward.0.per: batch "]),
        (lambda completions: [], {"per": "group"}, ["reward.0.per: group ", "<lambda>("]),
        (lambda completions, **kwargs: [], {"completions": 1}, ["reward.0.options.completions: ", "Podium"]),
        (lambda answer: 0.0, {"style": "trl"}, ["prompts, completions, completion_ids"]),
        (lambda answer: 0.0, {"style": "verl"}, ["`answer`", "verl", "data_source"]),
        (type.mro, {}, ["reward.0.function: mro(self, /) ", "`self`", "position"]),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_called_is_refused(
    function: Callable[..., Any], given: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(RecipeError, match=facts(*said)):
        fit(function, **given)


def test_a_function_without_python_signature_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^reward\.0\.function: .*\bmax\b"):
        fit(max)
