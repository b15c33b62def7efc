# SPDX-License-Identifier: Apache-2.0
"""Reward functions that end or freeze their process: which calls fail, and which have their value."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from podium.data.trajectories import TrajectoryId
from podium.environments.grading import Grade
from podium.environments.hosted_grading import HostedGrader
from podium.environments.output_cap import OutputCap
from podium.environments.reward_service import RewardFacts, RewardSpec
from podium.environments.rewards import Sample
from podium.errors import RecipeError
from podium.recipe import FunctionReward

MISBEHAVING = Path(__file__).with_name("misbehaving.py")
TIMEOUT_S = 2.0

Value = TypeVar("Value")

pytestmark = pytest.mark.slow


def sample(number: int, answer: str) -> Sample:
    return Sample(
        id=TrajectoryId(number, 0), group=number, prompt_text="", messages=None, answer=answer, reference=None, row={},
        source="test", num_tokens=1,
    )  # fmt: skip


def graded(names: Sequence[str], *batches: Sequence[str], output: OutputCap | None = None) -> list[list[Grade]]:
    """Batch after batch, by the same grader."""

    async def main(grader: HostedGrader) -> list[list[Grade]]:
        return [await grader.grade("train", samples(batch)) for batch in batches]

    return with_grader(names, main, output=output)


def graded_together(names: Sequence[str], *batches: Sequence[str]) -> list[list[Grade]]:
    """All batches at the same time, by the same grader."""

    async def main(grader: HostedGrader) -> list[list[Grade]]:
        return await asyncio.gather(*(grader.grade("train", samples(batch)) for batch in batches))

    return with_grader(names, main)


def samples(answers: Sequence[str]) -> list[Sample]:
    return [sample(number, answer) for number, answer in enumerate(answers)]


def with_grader(
    names: Sequence[str], run: Callable[[HostedGrader], Awaitable[Value]], *, output: OutputCap | None = None
) -> Value:
    sections = tuple(FunctionReward.model_validate({"function": f"{MISBEHAVING}:{name}"}) for name in names)
    spec = RewardSpec(
        sections={"train": (sections, "reward"), "evaluation": (sections[:1], "evaluation.generation.score")},
        timeout_s=TIMEOUT_S,
        also_scored=False,
    )

    async def main() -> Value:
        async with asyncio.timeout(120):
            grader = HostedGrader(spec, output=output or OutputCap("the reward"))
            try:
                await grader.open()
                return await run(grader)
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


# --- several batches at a time ---


def test_batches_in_one_process_wait_together() -> None:
    batches = graded_together(["meeting"], ["4", "4"], ["4", "4"])

    assert [[grade.total for grade in batch] for batch in batches] == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("name", ["reward", "async_reward"])
def test_a_sample_that_ends_the_process_fails_alone_in_all_batches(name: str) -> None:
    first, second, third = graded_together([name], ["ok", "exit", "ok"], ["ok", "ok"], ["exit", "ok"])

    assert_errors(first, {1}, f"^{name} .*exit code 3")
    assert errors(second) == {}
    assert_errors(third, {0}, f"^{name} .*exit code 3")


def test_of_the_rewards_of_several_batches_the_one_to_blame_is_found() -> None:
    first, second = graded_together(["length", "reward", "async_reward"], ["four", "exit", "four"], ["four"] * 200)

    assert_errors(first, {1}, "^reward .*exit code 3.*; async_reward .*exit code 3")
    assert [grade.values for grade in first] == [(4.0, 1.0, 2.0), (4.0, None, None), (4.0, 1.0, 2.0)]
    assert [grade.values for grade in second] == [(4.0, 1.0, 2.0)] * 200


def test_a_call_that_hangs_in_one_batch_costs_another_nothing() -> None:
    first, second = graded_together(["reward", "meeting"], ["sleep"], ["1", "1"])

    assert_errors(first, {0}, f"^reward (?!blocked).*{TIMEOUT_S:g} s.*; meeting .*ValueError")
    assert [grade.values for grade in second] == [(1.0, 1.0), (1.0, 1.0)]


def test_a_process_with_a_hanging_call_gets_no_new_batch_and_ends_with_its_last_one() -> None:
    async def run(grader: HostedGrader) -> tuple[list[Grade], list[Grade], list[Grade]]:
        # 256 calls at a time take a second each, so that this lasts longer than the call that hangs.
        lasting = asyncio.create_task(grader.grade("train", samples(["slow"] * 600)))
        hanging = await grader.grade("train", samples(["sleep"]))
        return hanging, await grader.grade("train", samples(["ok"])), await lasting

    hanging, later, lasting = with_grader(["process_id", "reward"], run)

    [old] = {grade.values[0] for grade in hanging}
    assert {grade.values for grade in lasting} == {(old, 1.0)}
    assert later[0].values[0] not in (old, None)


def test_rewards_say_what_they_are_called_with() -> None:
    async def rewards(grader: HostedGrader) -> object:
        return grader.rewards

    length = RewardFacts(per="sample", is_async=False)
    meeting = RewardFacts(per="sample", is_async=True)
    assert with_grader(["length", "meeting"], rewards) == {"train": (length, meeting), "evaluation": (length,)}
