# SPDX-License-Identifier: Apache-2.0
"""Grading under deadlines: what raises, hangs or returns nonsense costs its own sample, and no other."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.messages import facts
from podium.data.trajectories import TrajectoryId
from podium.environments.grading import EpisodeGrader, Grade, overlong_penalty
from podium.environments.protocol import is_async
from podium.environments.rewards import Reward, Sample, build_rewards
from podium.environments.signatures import fit_signature
from podium.recipe.on_policy import VerifierReward

# Long enough for a busy machine to make an ordinary call, short enough to wait for.
SOON_S = 0.8
PATIENT_S = 30.0


def sample(number: int, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "id": TrajectoryId(number // 4, number % 4), "group": number // 4, "prompt_text": "1+2=", "messages": None,
        "answer": str(number), "reference": "3", "row": {}, "source": "sums", "num_tokens": 4,
    }  # fmt: skip
    return Sample(**(values | changes))


def samples(count: int) -> list[Sample]:
    return [sample(number) for number in range(count)]


def reward(function: Callable[..., Any], *, weight: float = 1.0, name: str = "f", per: Any = "sample") -> Reward:
    signature = fit_signature(function, {}, style="auto", per=per, key="reward.0")
    return Reward(
        index=0, name=name, weight=weight, function=function, signature=signature, is_async=is_async(function)
    )


def graded(given: Sequence[Reward], batch: Sequence[Sample], timeout_s: float = PATIENT_S) -> list[Grade]:
    async def grades() -> list[Grade]:
        async with EpisodeGrader(given, timeout_s=timeout_s) as grader:
            return await grader.grade(batch)

    return asyncio.run(grades())


def totals(grades: Sequence[Grade]) -> list[float | None]:
    return [one.total for one in grades]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs waits for it, and is let go at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_every_sample_gets_the_weighted_sum() -> None:
    length = reward(lambda answer: len(answer), weight=0.5, name="length")
    right = reward(lambda answer, reference: answer == reference, name="right")
    logged = reward(lambda num_tokens: num_tokens, weight=0.0, name="tokens")

    grades = graded([length, right, logged], samples(11)[3:11:7])

    assert totals(grades) == [1.5, 1.0]
    assert [one.values for one in grades] == [(1.0, 1.0, 4.0), (2.0, 0.0, 4.0)]
    assert [(one.id, one.error, one.failures) for one in grades] == [
        (TrajectoryId(0, 3), None, (None, None, None)),
        (TrajectoryId(2, 2), None, (None, None, None)),
    ]
    assert pickle.loads(pickle.dumps(grades[0])).total == 1.5


def test_no_samples_have_no_grades() -> None:
    assert graded([reward(lambda answers: [], per="batch")], []) == []


def test_an_environment_s_reward_is_part_of_the_total() -> None:
    batch = [sample(1, environment_reward=0.25), sample(2)]

    assert totals(graded([reward(lambda answer: 1.0, weight=2.0)], batch)) == [2.25, 2.0]
    assert totals(graded([], batch)) == [0.25, 0.0]
    [bad, _] = graded([], [sample(1, environment_reward=float("nan")), sample(2)])
    assert re.search(r"\bsum\b.*\bnan$", str(bad.error))


def test_what_raises_fails_its_own_sample_and_says_where() -> None:
    def picky(answer: str) -> float:
        if answer == "2":
            raise KeyError("x")
        return 1.0

    grades = graded([reward(picky, name="picky")], samples(4))

    assert totals(grades) == [1.0, 1.0, None, 1.0]
    error = grades[2].error
    assert error is not None
    assert re.search(r"^picky .*KeyError: 'x' \(", error)
    assert error.endswith(f"test_grading.py, line {picky.__code__.co_firstlineno + 2})")
    assert grades[2].failures == (error.removeprefix("picky "),)


@pytest.mark.parametrize("ending", [SystemExit(3), KeyboardInterrupt(), StopIteration(), MemoryError()])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_not_even_an_exit_ends_the_grading(ending: BaseException, kind: str) -> None:
    def sync(answer: str) -> float:
        if answer == "1":
            raise ending
        return 1.0

    async def awaited(answer: str) -> float:
        return sync(answer)

    grades = graded([reward(sync if kind == "sync" else awaited)], samples(3))

    assert totals(grades) == [1.0, None, 1.0]
    assert re.search(rf"^f .*{type(ending).__name__}", str(grades[1].error))


def test_an_exception_without_message_or_with_a_long_one_is_reported() -> None:
    class RudeError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fails(answer: str) -> float:
        raise RudeError if answer == "0" else ValueError("x" * 10_000)

    rude, long = graded([reward(fails)], samples(2))

    assert re.search(r"^f .*RudeError: \(.*test_grading\.py", str(rude.error))
    assert long.error is not None
    assert len(long.error) < 800


def test_what_is_not_a_finite_number_fails_its_own_sample() -> None:
    returned = [None, float("nan"), float("inf"), True, "1"]

    grades = graded([reward(lambda answer: returned[int(answer)])], samples(5))

    for grade, fact in zip(grades, ["None", "NaN", "inf", None, "'1' (str)"], strict=True):
        assert grade.error is None if fact is None else re.search(facts("f ", fact), str(grade.error))
    assert totals(grades) == [None, None, None, 1.0, None]


def test_a_missing_reference_is_reported_and_spoils_no_other() -> None:
    rewards = build_rewards([VerifierReward(verifier="exact_match")])

    missing, there = graded(rewards, [sample(3, reference=None), sample(3)])

    assert re.search("^exact_match .*reference", str(missing.error))
    assert there.total == 1.0


def test_a_batch_that_fails_fails_as_a_whole() -> None:
    def short(answers: list[str]) -> list[float]:
        return [1.0] * (len(answers) - 1)

    def raises(answers: list[str]) -> list[float]:
        raise ValueError("no")

    (error,) = {one.error for one in graded([reward(short, per="batch")], samples(4))}
    assert re.search(r"^f .*\b3 values .*\b4 samples", str(error))
    (error,) = {one.error for one in graded([reward(raises, per="batch")], samples(4))}
    assert re.search("^f .*ValueError: no", str(error))


def test_a_group_is_called_once_and_fails_alone() -> None:
    calls: list[list[str]] = []

    def best(answers: list[str]) -> list[float]:
        calls.append(answers)
        if "4" in answers:
            raise ValueError("not this one")
        top = max(answers)
        return [float(answer == top) for answer in answers]

    mixed = [sample(number) for number in (0, 4, 1, 5, 8, 2, 3)]
    grades = graded([reward(best, per="group")], mixed)

    assert calls == [["0", "1", "2", "3"], ["4", "5"], ["8"]]
    assert totals(grades) == [0.0, None, 0.0, None, 1.0, 0.0, 1.0]


def test_a_failing_reward_of_weight_0_leaves_the_total_alone() -> None:
    [one] = graded([reward(lambda answer: 1.0), reward(lambda answer: None, weight=0.0, name="seen")], samples(1))

    assert (one.total, one.error) == (1.0, None)
    assert one.values == (1.0, None)
    assert one.failures[0] is None
    assert re.search(r"returned None .*test_grading\.py, line \d+", str(one.failures[1]))


def test_all_failures_of_a_sample_are_reported() -> None:
    [one] = graded([reward(lambda answer: None, name="a"), reward(lambda answer: "x", name="b")], samples(1))

    assert re.search(r"^a .*None .*; b .*'x' \(str\)", str(one.error))


def test_none_of_a_trl_function_leaves_the_sum_to_the_others() -> None:
    def sometimes(completions: list[str]) -> list[float | None]:
        return [1.0 if text == "0" else None for text in completions]

    trl, always = reward(sometimes, name="trl"), reward(lambda answer: 0.5)

    assert totals(graded([trl, always], samples(2))) == [1.5, 0.5]
    assert [one.values for one in graded([trl, always], samples(2))] == [(1.0, 0.5), (None, 0.5)]
    there, missing = graded([trl], samples(2))
    assert there.total == 1.0
    assert missing.total is None
    assert "None" in str(missing.error)


def test_a_sample_to_which_nothing_applies_is_worth_0_where_a_reward_model_scores_it_too() -> None:
    async def run() -> list[Grade]:
        async with EpisodeGrader([reward(lambda completions: [None])], timeout_s=PATIENT_S, also_scored=True) as grader:
            return await grader.grade(samples(1))

    [one] = asyncio.run(run())
    assert (one.total, one.error, one.values) == (0.0, None, (None,))


def test_further_numbers_of_a_verl_function_are_kept_under_the_reward_s_name() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
        return {"score": 1.0, "acc": solution_str == ground_truth, "pred": solution_str}

    [one] = graded([reward(compute_score, name="math")], [sample(3)])

    assert (one.total, one.extras) == (1.0, {"math/acc": 1.0})


def test_a_weighted_sum_that_is_no_number_is_an_error() -> None:
    [one] = graded([reward(lambda answer: 1e308, weight=1e10)], samples(1))

    assert one.total is None
    assert re.search(r"\bsum\b.*\binf$", str(one.error))


def test_a_call_that_hangs_is_left_behind_and_the_rest_continues(gate: threading.Event) -> None:
    threads: list[str] = []

    def slow(answer: str) -> float:
        threads.append(threading.current_thread().name)
        if answer in ("1", "4"):
            gate.wait(60)
        return 1.0

    async def run() -> tuple[list[Grade], int, int]:
        async with EpisodeGrader([reward(slow, name="slow")], timeout_s=SOON_S) as grader:
            grades = await grader.grade(samples(6))
            hanging = grader.num_stuck
            gate.set()
            for thread in threading.enumerate():
                if thread.name == "reward slow":
                    await asyncio.to_thread(thread.join, 10)
            return grades, hanging, grader.num_stuck

    grades, hanging, later = asyncio.run(run())

    assert totals(grades) == [1.0, None, 1.0, 1.0, None, 1.0]
    assert re.search(r"^slow .*0\.8 s \(grading\.timeout_s\)$", str(grades[4].error))
    assert (hanging, later) == (2, 0)
    assert len(threads) == 6  # no sample was asked twice


def test_every_call_has_the_whole_deadline_for_itself() -> None:
    def brisk(answer: str) -> float:
        time.sleep(0.1)
        return 1.0

    assert totals(graded([reward(brisk)], samples(10), SOON_S)) == [1.0] * 10  # longer in sum


def test_a_reward_that_always_hangs_is_given_up(gate: threading.Event) -> None:
    async def run() -> tuple[list[Grade], int]:
        async with EpisodeGrader([reward(lambda answer: gate.wait(60))], timeout_s=0.05, most_hanging=3) as grader:
            return await grader.grade(samples(50)), grader.num_stuck

    grades, num_stuck = asyncio.run(run())

    assert num_stuck == 3
    assert re.search(r"^f .*0\.05 s \(grading\.timeout_s\)$", str(grades[2].error))
    assert "calls" not in str(grades[2].error)
    assert re.search(r"^f .*\b3 calls .*0\.05 s \(grading\.timeout_s\)$", str(grades[3].error))
    assert totals(grades) == [None] * 50


def test_a_batch_that_hangs_fails_and_other_rewards_do_not(gate: threading.Event) -> None:
    hangs = reward(lambda answers: gate.wait(60), per="batch", name="judge")
    [one, _] = graded([hangs, reward(lambda answer: 1.0, name="g")], samples(2), SOON_S)

    assert re.search(r"^judge .*0\.8 s \(grading\.timeout_s\)$", str(one.error))
    assert one.values == (None, 1.0)


def test_asynchronous_calls_wait_together() -> None:
    under_way, most = 0, 0

    async def judge(answer: str) -> float:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return float(answer)

    assert totals(graded([reward(judge)], samples(300))) == [float(number) for number in range(300)]
    assert most == 256


def test_an_asynchronous_call_that_never_returns_is_cancelled() -> None:
    cancelled: list[str] = []

    async def judge(answer: str) -> float:
        if answer == "1":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(answer)
                raise
        return 1.0

    async def run() -> tuple[list[Grade], int]:
        async with EpisodeGrader([reward(judge)], timeout_s=SOON_S) as grader:
            grades, end_s = await grader.grade(samples(3)), time.monotonic() + 10.0
            while grader.num_stuck and time.monotonic() < end_s:  # it is cancelled in another thread
                await asyncio.sleep(0.01)
            return grades, grader.num_stuck

    grades, num_stuck = asyncio.run(run())

    assert totals(grades) == [1.0, None, 1.0]
    assert re.search(r"^f .*0\.8 s \(grading\.timeout_s\)$", str(grades[1].error))
    assert (cancelled, num_stuck) == (["1"], 0)


def test_an_asynchronous_call_that_will_not_be_cancelled_is_stuck() -> None:
    async def judge(answer: str) -> float:
        if answer == "1":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()
        return 1.0

    async def run() -> tuple[list[Grade], int]:
        async with EpisodeGrader([reward(judge)], timeout_s=SOON_S) as grader:
            return await grader.grade(samples(3)), grader.num_stuck

    grades, num_stuck = asyncio.run(run())

    assert totals(grades) == [1.0, None, 1.0]
    assert num_stuck == 1


def test_an_asynchronous_call_that_blocks_its_loop_is_reported_and_the_others_are_repeated(
    gate: threading.Event,
) -> None:
    async def judge(answer: str) -> float:
        await asyncio.sleep(0)
        if answer == "2":
            gate.wait(60)
        await asyncio.sleep(0.01)
        return 1.0

    async def run() -> tuple[list[Grade], int]:
        async with EpisodeGrader([reward(judge)], timeout_s=SOON_S) as grader:
            return await grader.grade(samples(5)), grader.num_stuck

    grades, num_stuck = asyncio.run(run())

    assert totals(grades) == [1.0, 1.0, None, 1.0, 1.0]
    assert re.search(r"^f .*0\.8 s.*event loop", str(grades[2].error))
    assert num_stuck == 1


def test_many_busy_asynchronous_calls_are_not_taken_for_one_that_blocks() -> None:
    async def busy(answer: str) -> float:
        time.sleep(0.1)
        return 1.0

    assert totals(graded([reward(busy)], samples(12), SOON_S)) == [1.0] * 12


def test_asynchronous_functions_keep_their_loop_between_batches() -> None:
    loops: set[asyncio.AbstractEventLoop] = set()

    async def judge(answer: str) -> float:
        loops.add(asyncio.get_running_loop())
        return 1.0

    async def run() -> None:
        async with EpisodeGrader([reward(judge)], timeout_s=PATIENT_S) as grader:
            await grader.grade(samples(2))
            await grader.grade(samples(2))
            assert asyncio.get_running_loop() not in loops

    asyncio.run(run())
    assert len(loops) == 1


def test_an_asynchronous_call_that_cancels_itself_fails_alone() -> None:
    async def judge(answer: str) -> float:
        if answer == "1":
            raise asyncio.CancelledError
        return 1.0

    grades = graded([reward(judge)], samples(3))

    assert totals(grades) == [1.0, None, 1.0]
    assert grades[1].error == "f cancelled itself"


def test_a_plain_function_that_hands_on_a_coroutine_is_awaited() -> None:
    async def inner(answer: str) -> float:
        if answer == "1":
            raise ValueError("inner")
        return 2.0

    def outer(answer: str) -> Any:
        return inner(answer)

    grades = graded([reward(outer)], samples(2))

    assert totals(grades) == [2.0, None]
    assert grades[1].error is not None
    assert "ValueError: inner (" in grades[1].error
    assert "test_grading.py" in grades[1].error


def test_a_cancelled_grading_ends_at_once_and_its_thread_after_the_call(gate: threading.Event) -> None:
    called: list[str] = []
    begun = threading.Event()

    def slow(answer: str) -> float:
        called.append(answer)
        begun.set()
        gate.wait(60)
        return 1.0

    async def run() -> None:
        async with EpisodeGrader([reward(slow, name="cancelled")], timeout_s=PATIENT_S) as grader:
            task = asyncio.create_task(grader.grade(samples(3)))
            await asyncio.to_thread(begun.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert grader.num_stuck == 1
            gate.set()
            for thread in threading.enumerate():
                if thread.name == "reward cancelled":
                    await asyncio.to_thread(thread.join, 10)

    asyncio.run(run())
    assert called == ["0"]


# --- several batches at a time ---


def graded_together(
    given: Sequence[Reward], *batches: Sequence[Sample], timeout_s: float = PATIENT_S, most_hanging: int = 16
) -> list[list[Grade]]:
    async def grades() -> list[list[Grade]]:
        async with EpisodeGrader(given, timeout_s=timeout_s, most_hanging=most_hanging) as grader:
            return await asyncio.gather(*map(grader.grade, batches))

    return asyncio.run(grades())


def test_asynchronous_calls_of_several_batches_wait_together() -> None:
    waiting: list[str] = []
    all_wait = asyncio.Event()

    async def judge(answer: str) -> float:
        waiting.append(answer)
        if len(waiting) == 5:
            all_wait.set()
        await all_wait.wait()
        return float(answer)

    first, second = graded_together([reward(judge)], samples(3), samples(5)[3:])

    assert totals(first) == [0.0, 1.0, 2.0]
    assert totals(second) == [3.0, 4.0]


def test_the_limit_of_calls_in_flight_is_for_all_batches_together() -> None:
    under_way, most = 0, 0

    async def judge(answer: str) -> float:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return float(answer)

    batches = graded_together([reward(judge)], samples(200), samples(200), samples(200))

    assert [totals(batch) for batch in batches] == [[float(number) for number in range(200)]] * 3
    assert most == 256


@pytest.mark.parametrize("num_rewards", [1, 2])
def test_a_synchronous_function_makes_one_call_at_a_time_for_batch_after_batch(num_rewards: int) -> None:
    running, called = 0, list[str]()

    def careless(answer: str) -> float:
        nonlocal running
        running += 1
        assert running == 1
        called.append(answer)
        time.sleep(0.002)
        running -= 1
        return float(answer)

    given = [reward(careless, name=f"careless {number}") for number in range(num_rewards)]
    batches = graded_together(given, samples(3), samples(6)[3:], samples(9)[6:])

    assert [totals(batch) for batch in batches] == [
        [float(num_rewards * number) for number in range(first, first + 3)] for first in (0, 3, 6)
    ]
    assert called[:3] == ["0", "1", "2"]
    assert sorted(called) == sorted(str(number) for number in range(9) for _ in range(num_rewards))


def test_a_call_that_hangs_costs_the_other_batches_nothing(gate: threading.Event) -> None:
    def slow(answer: str) -> float:
        if answer == "1":
            gate.wait(60)
        return 1.0

    first, second = graded_together([reward(slow)], samples(3), samples(5)[3:], timeout_s=SOON_S)

    assert totals(first) == [1.0, None, 1.0]
    assert totals(second) == [1.0, 1.0]


def test_every_batch_may_have_as_many_hanging_calls(gate: threading.Event) -> None:
    hangs = reward(lambda answer: gate.wait(60))

    batches = graded_together([hangs], samples(2), samples(2), timeout_s=0.05, most_hanging=1)

    assert [["1 calls" in str(grade.error) for grade in batch] for batch in batches] == [[False, True]] * 2


def test_a_call_that_blocks_the_loop_of_all_batches_fails_alone(gate: threading.Event) -> None:
    called: list[str] = []

    async def judge(answer: str) -> float:
        called.append(answer)
        await asyncio.sleep(0.01)
        if answer == "1":
            gate.wait(60)
        await asyncio.sleep(0.01)
        return 1.0

    first, second = graded_together([reward(judge)], samples(3), samples(300)[3:], timeout_s=SOON_S)

    assert totals(first) == [1.0, None, 1.0]
    assert re.search(r"^f .*0\.8 s.*event loop", str(first[1].error))
    assert totals(second) == [1.0] * 297
    assert called.count("1") == 1
    assert called.count("3") == 2  # it was delayed, and is repeated


def test_a_loop_that_is_blocked_by_nobody_knows_what_fails_no_other_batch(gate: threading.Event) -> None:
    async def judge(answer: str) -> float:
        if answer == "0":
            asyncio.get_running_loop().call_soon(gate.wait, 60)
        await asyncio.sleep(0.05)
        return 1.0

    first, second = graded_together([reward(judge)], samples(1), samples(4)[1:], timeout_s=SOON_S)

    assert totals(first) == [None]
    assert totals(second) == [1.0, 1.0, 1.0]


def test_a_batch_that_is_cancelled_leaves_the_others_alone() -> None:
    release = asyncio.Event()
    begun = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def judge(answer: str) -> float:
        if answer == "299":
            loops.append(asyncio.get_running_loop())
            begun.set()
        await release.wait()
        return 1.0

    async def run() -> list[Grade]:
        async with EpisodeGrader([reward(judge)], timeout_s=PATIENT_S) as grader:
            cancelled = asyncio.create_task(grader.grade(samples(255)))
            await asyncio.sleep(0)
            kept = asyncio.create_task(grader.grade(samples(301)[299:]))
            await asyncio.to_thread(begun.wait, 10)
            cancelled.cancel()
            loops[0].call_soon_threadsafe(release.set)
            return await kept

    assert totals(asyncio.run(run())) == [1.0, 1.0]


@pytest.mark.serial
@pytest.mark.parametrize("kind", ["sync", "async", "verifier"])
def test_ten_thousand_samples_take_well_under_a_second_on_an_idle_machine(kind: str) -> None:
    async def awaited(answer: str) -> float:
        return 1.0

    batch = samples(10_000)
    [verifier] = build_rewards([VerifierReward(verifier="exact_match")])
    chosen = {"sync": reward(lambda answer: 1.0), "async": reward(awaited), "verifier": verifier}[kind]

    began = time.perf_counter()
    grades = graded([chosen], batch)

    assert len(grades) == 10_000
    assert time.perf_counter() - began < 5.0  # 0.2 to 0.6 s; a thread or a timeout each would take many


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.integers(0, 3)), max_size=12))
def test_totals_are_weighted_sums_whatever_is_graded_together(values: list[tuple[float, float, int]]) -> None:
    batch = [sample(number, group=group, row={"a": a, "b": b}) for number, (a, b, group) in enumerate(values)]
    each = reward(lambda row: row["a"], weight=2.0)
    grouped = reward(lambda rows: [row["b"] for row in rows], weight=-1.0, per="group", name="g")

    assert totals(graded([each, grouped], batch)) == [pytest.approx(2 * a - b) for a, b, _ in values]


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (80, 0.0), (81, -0.025), (90, -0.25), (100, -0.5), (120, -0.5)]
)
def test_the_overlong_penalty_grows_over_the_buffer(num_tokens: int, expected: float) -> None:
    found = overlong_penalty(num_tokens, max_new_tokens=100, buffer_tokens=20, penalty=0.5)

    assert found == pytest.approx(expected)
