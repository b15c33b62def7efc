# SPDX-License-Identifier: Apache-2.0
"""Rewards of a recipe: built with their names and options, called for the right samples, and what they may return."""

from __future__ import annotations

import dataclasses
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.messages import facts
from podium.data.trajectories import TrajectoryId
from podium.environments.rewards import Reward, RewardResult, Sample, build_rewards, check_rewards, reward_names
from podium.environments.signatures import Per, Signature
from podium.errors import PodiumError, RecipeError
from podium.recipe.on_policy import FunctionReward, ModelReward, VerifierReward


def sample(number: int = 0, group: int = 0, answer: str = "3") -> Sample:
    return Sample(
        id=TrajectoryId(group, number), group=group, prompt_text="1+2=", messages=None, answer=answer, reference="3",
        row={}, source="sums", num_tokens=4,
    )  # fmt: skip


def build(folder: Path, code: str, function: str, **section: Any) -> Reward:
    file = folder / "rewards.py"
    file.write_text(code)
    [reward] = build_rewards([FunctionReward(function=f"{file}:{function}", **section)])
    return reward


def returning(per: Any = "sample", style: Any = "podium") -> Reward:
    return Reward(
        index=0, name="f", weight=1.0, function=lambda: None, signature=Signature(style=style, per=per, names=())
    )


def test_a_function_is_called_with_its_options(tmp_path: Path) -> None:
    reward = build(tmp_path, "def f(answer, scale, shift=1):\n    return len(answer) * scale + shift\n", "f",
                   options={"scale": 3}, weight=0.5, name="size")  # fmt: skip

    assert (reward.name, reward.weight, reward.per, reward.index, reward.is_async) == ("size", 0.5, "sample", 0, False)
    assert reward.call([sample(answer="four")]) == 13


def test_a_class_is_made_with_the_options_and_its_instance_called(tmp_path: Path) -> None:
    code = (
        "class Judge:\n    def __init__(self, scale):\n        self.scale = scale\n"
        "    async def __call__(self, answer):\n        return self.scale\n"
    )
    reward = build(tmp_path, code, "Judge", options={"scale": 3})

    assert (reward.name, reward.is_async, dict(reward.options)) == ("Judge", True, {})


def test_a_verifier_is_a_reward_by_its_own_name() -> None:
    [reward] = build_rewards([VerifierReward(verifier="numeric", options={"tolerance": 1})])

    assert reward.name == "numeric"
    assert reward.outcomes(reward.call([sample(answer="it is 4")]), 1) == [RewardResult(1.0)]


def test_reward_models_are_left_out_and_the_others_keep_their_index() -> None:
    sections = [
        VerifierReward(verifier="numeric"),
        ModelReward(model="models/judge/"),
        VerifierReward(verifier="length", options={"max": 9}),
    ]

    assert [(reward.index, reward.name) for reward in build_rewards(sections)] == [(0, "numeric"), (2, "length")]
    assert reward_names(sections) == ("numeric", "judge", "length")


@pytest.mark.parametrize(
    ("code", "name", "section", "said"),
    [
        ("def f(x):\n    return 1\n", "f", {}, ["reward.0.function: f(x) ", "`x`"]),
        ("def g(answer):\n    return 1\n", "f", {}, ["reward.0.function: ", "'f'"]),
        ("def f(answer:\n", "f", {}, ["reward.0.function: "]),
        ("import nowhere_to_be_found\ndef f(answer):\n    return 1\n", "f", {},
         ["ModuleNotFoundError: ", "'nowhere_to_be_found'"]),
        ("f = 3\n", "f", {}, ["callable"]),
        ("class F:\n    def __init__(self, a):\n        pass\n    def __call__(self, answer):\n        return 1\n",
         "F", {}, ["reward.0.options: ", "rewards.py, line 1: F(a)", "`a`"]),
        ("class F:\n    def __init__(self):\n        open('/nowhere')\n    def __call__(self, answer):\n        ...\n",
         "F", {}, ["reward.0.function: ", "reward.0.options", "FileNotFoundError"]),
        ("class F:\n    pass\n", "F", {}, [" F ", "__call__"]),
        ("class F:\n    def __call__(self, x):\n        return 1\n", "F", {}, ["F(x) ", "`x`"]),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused_by_name(
    tmp_path: Path, code: str, name: str, section: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(PodiumError, match=facts(*said)):
        build(tmp_path, code, name, **section)


def test_two_rewards_of_one_name_are_refused() -> None:
    sections = [VerifierReward(verifier="numeric"), VerifierReward(verifier="numeric", options={"tolerance": 1})]

    with pytest.raises(RecipeError, match=r"reward\.1\.name: reward\.0 .*'numeric'"):
        build_rewards(sections)


def test_the_check_before_a_run_names_the_right_reward_and_runs_no_file(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "f.py").write_text(f"open({str(ran)!r}, 'w')\ndef f(x):\n    return 1\n")
    function = FunctionReward(function=f"{tmp_path}/f.py:f")

    check_rewards([function, VerifierReward(verifier="regex", options={"pattern": "a"})])
    with pytest.raises(RecipeError, match=r"reward\.1\.options\.patern: .*\bregex\b"):
        check_rewards([function, VerifierReward(verifier="regex", options={"pattern": "a", "patern": "a"})])
    assert not ran.exists()


def test_what_one_call_is_given() -> None:
    samples = [sample(0, 5), sample(0, 9), sample(1, 5), sample(1, 9), sample(2, 5)]

    assert returning("sample").calls(samples) == [[0], [1], [2], [3], [4]]
    assert returning("batch").calls(samples) == [[0, 1, 2, 3, 4]]
    assert returning("group").calls(samples) == [[0, 2, 4], [1, 3]]
    assert returning("batch").calls([]) == returning("group").calls([]) == returning("sample").calls([]) == []


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (0.5, 0.5), (1, 1.0), (True, 1.0), (False, 0.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0),
        (np.bool_(True), 1.0), (np.array(0.5), 0.5), (torch.tensor(0.5), 0.5), (torch.tensor(0.5).double(), 0.5),
        (Fraction(1, 2), 0.5), (Decimal("0.5"), 0.5), ({"score": 1}, 1.0),
    ],
)  # fmt: skip
def test_any_finite_number_is_a_reward(returned: Any, value: float) -> None:
    [outcome] = returning().outcomes(returned, 1)

    assert (outcome.value, outcome.failure) == (value, None)
    assert type(outcome.value) is float


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, ["None"]),
        (float("nan"), ["NaN"]),
        (np.float32("nan"), ["NaN"]),
        (float("inf"), [" inf"]),
        (-np.inf, ["-inf"]),
        (10**400, [" inf"]),
        ("1.0", ["'1.0' (str)"]),
        (np.str_("1.0"), ["(str_)"]),
        (b"1", ["b'1' (bytes)"]),
        (1j, ["1j (complex)"]),
        ([1.0], ["[1.0] (list)"]),
        (np.array([1.0]), ["array([1.]) (ndarray)"]),
        ((1.0, "why"), ["(1.0, 'why') (tuple)"]),
        (list(range(99)), ["..."]),
        ({"acc": 1.0, "why": "x"}, ["dict", "`score`", "acc, why"]),
        ({"score": None}, ["None"]),
        ({"score": "x"}, ["'x' (str)"]),
    ],
)  # fmt: skip
def test_anything_else_is_a_failure(returned: Any, said: list[str]) -> None:
    [outcome] = returning().outcomes(returned, 1)

    assert outcome.value is None
    assert outcome.failure is not None
    assert re.search(facts(*said), outcome.failure)
    assert len(outcome.failure) < 200


def test_a_dict_of_verl_has_further_numbers() -> None:
    returned = {"score": 1.0, "acc": True, "pred": "42", "format": np.float32(0.5), "bad": float("nan"), 3: 4}

    [outcome] = returning(style="verl").outcomes(returned, 1)

    assert outcome == RewardResult(1.0, None, {"acc": 1.0, "format": 0.5, "3": 4.0})


@pytest.mark.parametrize(
    "returned", [[1.0, 0.5], (1, 0.5), np.array([1.0, 0.5]), torch.tensor([1.0, 0.5]), [{"score": 1}, Fraction(1, 2)]]
)
def test_a_batch_may_return_any_list_of_numbers(returned: Any) -> None:
    assert [outcome.value for outcome in returning("batch").outcomes(returned, 2)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("returned", "given"),
    [
        ([1.0, 2.0, 3.0], "3 values"),
        ([], "0 values"),
        (1.0, "1.0 (float)"),
        (None, "None (NoneType)"),
        (np.zeros((4, 1)), "(ndarray)"),
        ("abcd", "'abcd' (str)"),
        ({"score": 1.0}, "(dict)"),
    ],
)  # fmt: skip
def test_a_batch_of_wrong_form_fails_as_a_whole(returned: Any, given: str) -> None:
    outcomes = returning("batch").outcomes(returned, 4)

    assert [outcome.value for outcome in outcomes] == [None] * 4
    assert all(re.search(facts(given, "4 samples"), str(outcome.failure)) for outcome in outcomes)


def test_one_bad_number_of_a_batch_is_one_failure() -> None:
    outcomes = returning("group").outcomes([1.0, float("nan"), None], 3)

    good, nan, none = outcomes
    assert good == RewardResult(1.0)
    assert str(nan.failure).startswith("returned NaN")
    assert str(none.failure).startswith("returned None")


@pytest.mark.parametrize(
    ("per", "returned"), [("sample", None), ("sample", "1.0"), ("sample", {}), ("batch", [1.0]), ("batch", 1.0)]
)
def test_a_return_value_that_is_no_reward_names_where_the_function_is(per: Per, returned: Any) -> None:
    def wrong(answer: str) -> Any: ...

    reward = dataclasses.replace(returning(per), function=wrong)

    failure = reward.outcomes(returned, 1 if per == "sample" else 2)[0].failure

    assert f"({__file__}, line {wrong.__code__.co_firstlineno})" in str(failure)


def test_none_in_trl_s_style_says_that_the_reward_does_not_apply() -> None:
    assert returning("batch", "trl").outcomes([1.0, None], 2) == [RewardResult(1.0), RewardResult(None)]
