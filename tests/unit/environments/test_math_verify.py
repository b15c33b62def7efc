# SPDX-License-Identifier: Apache-2.0
"""The verifier math_verify: LaTeX and algebra compared by value, and answers that would compute for ever."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import time
from typing import Any

import pytest

from podium.data.trajectories import TrajectoryId
from podium.environments.grading import Grade
from podium.environments.hosted_grading import HostedGrader
from podium.environments.output_cap import OutputCap
from podium.environments.reward_service import RewardSpec
from podium.environments.rewards import Sample, check_rewards
from podium.environments.verifiers import math_verify
from podium.errors import DataError, MissingExtraError
from podium.recipe import VerifierReward

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install 'podium[math]'"
)
TOWER = r"\boxed{9^{9^{9^9}}}"


@pytest.mark.slow
@needs_math_verify
@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("1/2", "0.5", 1.0),
        ("The answer is 0.5.", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so $\frac12$", r"$\frac{2}{4}$", 1.0),
        (r"\boxed{0.333333}", r"\frac{1}{3}", 1.0),
        (r"\boxed{0.33}", r"\frac{1}{3}", 0.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"$x^2 + 2x + 1$", "(x+1)^2", 1.0),
        (r"$x^2 + 2x - 1$", "(x+1)^2", 0.0),
        (r"\boxed{\{3, 1, 2\}}", r"\{1, 2, 3\}", 1.0),
        (r"\boxed{\{3, 1\}}", r"\{1, 2, 3\}", 0.0),
        (r"\boxed{(1, 2]}", "(1, 2]", 1.0),
        (r"\boxed{[1, 2]}", "(1, 2]", 0.0),
        (r"$(-\infty, 3)$", r"(-\infty,3)", 1.0),
        (r"first $7$, then \boxed{42}", "42", 1.0),
        (r"first $42$, then \boxed{7}", "42", 0.0),
        (r"\boxed{18}", "9 eggs at 2 dollars are 9 * 2 = 18.\n#### 18", 1.0),
        ("41", "42", 0.0),
        ("", "42", 0.0),
        ("no idea", "42", 0.0),
        (r"}{ \boxed{ $$ \frac{", "42", 0.0),
        ("{" * 500, "42", 0.0),
    ],
)  # fmt: skip
def test_expressions_are_compared_by_value(answer: str, reference: str, score: float) -> None:
    assert math_verify(answer, reference) == score


@needs_math_verify
@pytest.mark.parametrize(
    ("answer", "reference", "options", "score"),
    [
        (r"\boxed{3.14}", "3.14159", {}, 0.0),
        (r"\boxed{3.14}", "3.14159", {"float_rounding": 2}, 1.0),
        ("$y + 1$", "$x + 1$", {}, 0.0),
        ("$y + 1$", "$x + 1$", {"strict": False}, 1.0),
    ],
)  # fmt: skip
def test_options_are_those_of_math_verify(answer: str, reference: str, options: dict[str, Any], score: float) -> None:
    assert math_verify(answer, reference, **options) == score


@needs_math_verify
def test_it_works_in_a_thread_where_signals_do_not() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(math_verify(r"\boxed{\frac12}", "0.5")))
    thread.start()
    thread.join()

    assert scores == [1.0]


@needs_math_verify
@pytest.mark.parametrize("reference", [None, "", "   "])
def test_a_reference_that_cannot_be_read_is_a_data_error(reference: str | None) -> None:
    with pytest.raises(DataError):
        math_verify("1", reference)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)

    with pytest.raises(MissingExtraError, match=r"reward\.1\.verifier: .*pip install 'podium\[math\]'"):
        check_rewards([VerifierReward(verifier="numeric"), VerifierReward(verifier="math_verify")])


def test_a_check_does_not_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "math_verify"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    check_rewards([VerifierReward(verifier="math_verify")])

    assert "math_verify" not in sys.modules


@needs_math_verify
@pytest.mark.slow
def test_a_tower_of_exponents_fails_at_the_time_limit_and_the_others_are_graded() -> None:
    answers = [r"\boxed{\frac{4}{2}}", TOWER, r"\boxed{3}", r"\boxed{99999999!}", "2"]
    began = time.monotonic()

    grades = asyncio.run(_graded(answers, reference="2", timeout_s=2.0))

    assert [grade.total for grade in grades] == [1.0, None, 0.0, None, 1.0]
    assert all("math_verify" in str(grade.error) for grade in (grades[1], grades[3]))
    assert time.monotonic() - began < 60


async def _graded(answers: list[str], *, reference: str, timeout_s: float) -> list[Grade]:
    sections = (VerifierReward(verifier="math_verify"),)
    spec = RewardSpec(sections={"train": (sections, "reward")}, timeout_s=timeout_s, also_scored=False)
    samples = [
        Sample(
            id=TrajectoryId(number, 0), group=number, prompt_text="", messages=None, answer=answer, reference=reference,
            row={}, source="test", num_tokens=1,
        )
        for number, answer in enumerate(answers)
    ]  # fmt: skip
    async with asyncio.timeout(120):
        grader = HostedGrader(spec, output=OutputCap("the reward"))
        try:
            await grader.open()
            return await grader.grade("train", samples)
        finally:
            grader.close()
