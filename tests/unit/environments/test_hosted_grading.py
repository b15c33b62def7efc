# SPDX-License-Identifier: Apache-2.0
"""Reward functions that end or freeze their process: which calls fail, and which have their value."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from podium.data.trajectories import TrajectoryId
from podium.environments.grading import Grade
from podium.environments.hosted_grading import HostedGrader
from podium.environments.output_cap import OutputCap
from podium.environments.reward_service import RewardSpec
from podium.environments.rewards import Sample
from podium.errors import RecipeError
from podium.recipe import FunctionReward

MISBEHAVING = Path(__file__).with_name("misbehaving.py")
TIMEOUT_S = 2.0

pytestmark = pytest.mark.slow


def sample(number: int, answer: str) -> Sample:
    return Sample(
        id=TrajectoryId(number, 0), group=number, prompt_text="", messages=None, answer=answer, reference=None, row={},
        source="test", num_tokens=1,
    )  # fmt: skip


def graded(names: Sequence[str], *batches: Sequence[str], output: OutputCap | None = None) -> list[list[Grade]]:
    """Batch after batch, by the same grader."""
    sections = tuple(FunctionReward.model_validate({"function": f"{MISBEHAVING}:{name}"}) for name in names)
    spec = RewardSpec(sections={"train": (sections, "reward")}, timeout_s=TIMEOUT_S, also_scored=False)

    async def main() -> list[list[Grade]]:
        async with asyncio.timeout(120):
            grader = HostedGrader(spec, output=output or OutputCap("the reward"))
            try:
                await grader.open()
                return [
                    await grader.grade("train", [sample(number, answer) for number, answer in enumerate(batch)])
                    for batch in batches
                ]
            finally:
                grader.close()

    return asyncio.run(main())


def errors(grades: Sequence[Grade]) -> dict[int, str | None]:
    return {number: grade.error for number, grade in enumerate(grades) if grade.error is not None}


def assert_errors(grades: Sequence[Grade], numbers: set[int], why: str) -> None:
    """Samples with these numbers have errors, no others, and each one that the pattern `why` describes."""
    found = errors(grades)
    assert set(found) == numbers
    assert all(re.search(why, str(error)) for error in found.values()), found


@pytest.mark.parametrize("name", ["reward", "async_reward"])
def test_a_reward_that_ends_its_process_fails_its_own_call(name: str) -> None:
    first, second = graded([name], ["ok", "exit", "ok", "exit", "ok"], ["ok"])

    assert_errors(first, {1, 3}, f"^{name} .*exit code 3")
    assert errors(second) == {}


def test_a_reward_that_keeps_the_interpreter_fails_its_own_call() -> None:
    [grades] = graded(["reward"], ["ok", "regex", "ok"])

    assert_errors(grades, {1}, f"^reward blocked .*{TIMEOUT_S:g} s")


def test_calls_that_hang_are_ended_with_their_process() -> None:
    first, second = graded(["reward"], ["ok", "sleep", "ok"], ["ok", "ok"])

    assert_errors(first, {1}, f"^reward (?!blocked).*{TIMEOUT_S:g} s")
    assert errors(second) == {}


def test_of_several_rewards_the_one_to_blame_is_found_by_calling_one_at_a_time() -> None:
    [grades] = graded(["length", "reward", "async_reward"], ["four", "exit", "four"])

    assert_errors(grades, {1}, "^reward .*exit code 3.*; async_reward .*exit code 3")
    assert [grade.values for grade in grades] == [(4.0, 1.0, 2.0), (4.0, None, None), (4.0, 1.0, 2.0)]


def test_a_reward_that_ends_its_process_now_and_then_is_called_for_all_others() -> None:
    """More often than a reward may do so without a result in between."""
    [grades] = graded(["reward"], ["exit" if number % 3 == 0 else "ok" for number in range(54)])

    assert_errors(grades, set(range(0, 54, 3)), "^reward .*exit code 3")


def test_a_reward_that_always_ends_its_process_is_given_up() -> None:
    [grades] = graded(["reward"], ["exit"] * 20)

    assert_errors(grades[:16], set(range(16)), "^reward .*exit code 3")
    assert_errors(grades[16:], set(range(4)), r"^reward .*\b16 calls\b")


def test_printing_without_end_costs_its_own_call_and_no_disk(capfd: pytest.CaptureFixture[str]) -> None:
    output = OutputCap("the reward", max_bytes=100_000)

    [grades] = graded(["reward"], ["ok", "print", "ok"], output=output)

    assert_errors(grades, {1}, f"^reward (?!blocked).*{TIMEOUT_S:g} s")
    said = capfd.readouterr()
    assert len(said.out) <= 100_000
    assert re.search(r"^the reward .*0\.0953674 MiB", str(output.warning))
    assert said.err.strip() == f"warning: {output.warning}"


def test_rewards_that_cannot_be_loaded_are_the_recipes_mistake() -> None:
    with pytest.raises(RecipeError, match=r"^reward\.0\.function: .*'absent'"):
        graded(["absent"], ["ok"])
