# SPDX-License-Identifier: Apache-2.0
"""Reward functions that end or freeze their process: which calls fail, and which have their value."""

from __future__ import annotations

import asyncio
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


@pytest.mark.parametrize("name", ["reward", "async_reward"])
def test_a_reward_that_ends_its_process_fails_its_own_call(name: str) -> None:
    first, second = graded([name], ["ok", "exit", "ok", "exit", "ok"], ["ok"])

    assert errors(first) == dict.fromkeys([1, 3], f"{name} ended its process (exit code 3)")
    assert errors(second) == {}


def test_a_reward_that_keeps_the_interpreter_fails_its_own_call() -> None:
    [grades] = graded(["reward"], ["ok", "regex", "ok"])

    assert errors(grades) == {1: f"reward blocked its process for longer than {TIMEOUT_S:g} s"}


def test_calls_that_hang_are_ended_with_their_process() -> None:
    first, second = graded(["reward"], ["ok", "sleep", "ok"], ["ok", "ok"])

    assert errors(first) == {1: f"reward did not return in {TIMEOUT_S:g} s"}
    assert errors(second) == {}


def test_of_several_rewards_the_one_to_blame_is_found_by_calling_one_at_a_time() -> None:
    [grades] = graded(["length", "reward", "async_reward"], ["four", "exit", "four"])

    why = "ended its process (exit code 3)"
    assert errors(grades) == {1: f"reward {why}; async_reward {why}"}
    assert [grade.values for grade in grades] == [(4.0, 1.0, 2.0), (4.0, None, None), (4.0, 1.0, 2.0)]


def test_a_reward_that_ends_its_process_now_and_then_is_called_for_all_others() -> None:
    """More often than a reward may do so without a result in between."""
    [grades] = graded(["reward"], ["exit" if number % 3 == 0 else "ok" for number in range(54)])

    assert errors(grades) == dict.fromkeys(range(0, 54, 3), "reward ended its process (exit code 3)")


def test_a_reward_that_always_ends_its_process_is_given_up() -> None:
    [grades] = graded(["reward"], ["exit"] * 20)

    found = list(errors(grades).values())
    assert found[:16] == ["reward ended its process (exit code 3)"] * 16
    assert found[16:] == ["reward was not called, after 16 calls in a row that ended or blocked their process"] * 4


def test_printing_without_end_costs_its_own_call_and_no_disk(capfd: pytest.CaptureFixture[str]) -> None:
    output = OutputCap("the reward", max_bytes=100_000)

    [grades] = graded(["reward"], ["ok", "print", "ok"], output=output)

    assert errors(grades) == {1: f"reward did not return in {TIMEOUT_S:g} s"}
    said = capfd.readouterr()
    assert len(said.out) <= 100_000
    assert said.err.strip() == "warning: the reward prints more than 0.0953674 MiB; the rest is dropped."
    assert output.warning == "the reward prints more than 0.0953674 MiB; the rest is dropped."


def test_rewards_that_cannot_be_loaded_are_the_recipes_mistake() -> None:
    with pytest.raises(RecipeError, match="has no function 'absent'"):
        graded(["absent"], ["ok"])
