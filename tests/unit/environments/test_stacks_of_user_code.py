# SPDX-License-Identifier: Apache-2.0
"""User code that hangs: the failure names a file, and the file shows where the code is."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

from podium.data.tasks import Task
from podium.data.trajectories import TrajectoryId
from podium.environments import protocol
from podium.environments.given_up import GivenUpCalls
from podium.environments.grading import Grade
from podium.environments.hosted_episodes import EnvironmentHost
from podium.environments.hosted_grading import HostedGrader
from podium.environments.output_cap import OutputCap
from podium.environments.reward_service import RewardSpec
from podium.environments.rewards import Sample
from podium.environments.tools import Tool, run_tool
from podium.recipe import FunctionReward
from podium.recipe.on_policy import EnvironmentSection
from podium.stack_dumps import append_stacks

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for files of processes in /proc")
CODE = """
import asyncio, re, threading
from podium.environments.protocol import Environment, Outcome

first, second = threading.Lock(), threading.Lock()

def takes_second():
    with second:
        has_second.set()
        first.acquire()

has_second = threading.Event()

def deadlocked(answer):
    with first:
        threading.Thread(target=takes_second, daemon=True).start()
        has_second.wait()
        with second:  # never
            return 1.0

def backtracks(answer):
    return float(bool(re.match("(a+)+b", "a" * 60)))

class Waits(Environment):
    async def reset(self, task):
        await self.lock_twice()

    async def lock_twice(self):
        lock = asyncio.Lock()
        async with lock:
            async with lock:  # never again
                pass

    async def step(self, turn):
        return Outcome(observation=None, reward=0.0)
"""

TASK = Task(source="test", messages=None, text="?", tools=(), reference=None, row={}, place="test")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def line_of(text: str) -> int:
    return CODE[: CODE.index(text)].count("\n") + 1


def graded(code: Path, name: str, stacks: Path | None) -> Grade:
    section = FunctionReward.model_validate({"function": f"{code}:{name}"})
    spec = RewardSpec(sections={"train": ((section,), "reward")}, timeout_s=0.5, also_scored=False, stacks=stacks)
    sample = Sample(
        id=TrajectoryId(0, 0), group=0, prompt_text="", messages=None, answer="", reference=None, row={},
        source="test", num_tokens=1,
    )  # fmt: skip

    async def main() -> Grade:
        async with asyncio.timeout(120):
            grader = HostedGrader(spec, output=OutputCap("the reward"))
            try:
                await grader.open()
                return (await grader.grade("train", [sample]))[0]
            finally:
                grader.close()

    return asyncio.run(main())


def test_a_deadlocked_reward_shows_both_of_its_threads(code: Path, tmp_path: Path) -> None:
    stacks = tmp_path / "stacks.txt"

    error = graded(code, "deadlocked", stacks).error

    assert error is not None
    assert error.endswith(f"did not return in 0.5 s (grading.timeout_s); stacks: {stacks}")
    text = stacks.read_text()
    assert re.match(r"=== \d{4}-\d\d-\d\d [\d:]{8} a call did not return in 0\.5 s", text)
    assert f'mine.py", line {line_of("with second:  # never")} in deadlocked' in text
    assert f'mine.py", line {line_of("first.acquire()")} in takes_second' in text


@pytest.mark.slow
def test_a_reward_that_holds_pythons_lock_shows_where(code: Path, tmp_path: Path) -> None:
    stacks = tmp_path / "stacks.txt"

    error = graded(code, "backtracks", stacks).error

    assert error is not None
    assert error.endswith(f"blocked its process for longer than 0.5 s; stacks: {stacks}")
    assert f'mine.py", line {line_of("return float(bool")} in backtracks' in stacks.read_text()


@pytest.mark.slow
def test_without_a_file_the_failure_names_none(code: Path, tmp_path: Path) -> None:
    for name, ending in (("deadlocked", "(grading.timeout_s)"), ("backtracks", "for longer than 0.5 s")):
        error = graded(code, name, None).error
        assert error is not None
        assert error.endswith(ending)


@pytest.mark.slow
def test_an_environment_that_waits_for_itself_shows_where_its_coroutine_is(code: Path, tmp_path: Path) -> None:
    stacks = tmp_path / "stacks.txt"
    section = EnvironmentSection(environment=f"{code}:Waits", max_turns=2, timeout_s=0.5)

    async def main() -> None:
        async with asyncio.timeout(120):
            host = EnvironmentHost(section, output=OutputCap("the environment"), stacks=stacks)
            try:
                await host.open()
                await host.make().reset(TASK)
            finally:
                host.close()

    with pytest.raises(Exception, match=rf"took longer than 0\.5 s and was given up; stacks: {re.escape(str(stacks))}"):
        asyncio.run(main())
    inner, outer = "in lock_twice", "in reset"
    text = stacks.read_text()
    assert f'mine.py", line {line_of("async with lock:  # never")} {inner}' in text
    assert text.index(inner) < text.index(outer)


@pytest.mark.slow
def test_a_process_writes_so_many_stacks_and_no_more(tmp_path: Path) -> None:
    stacks, calls = tmp_path / "stacks.txt", GivenUpCalls()
    assert calls.noted("hangs") == "hangs"

    calls.write_to(stacks)
    failures = {calls.noted("hangs") for _ in range(9)}

    assert failures == {f"hangs; stacks: {stacks}"}
    assert stacks.read_text().count("=== ") == 4


def test_a_file_that_cannot_be_written_is_not_named(tmp_path: Path) -> None:
    calls = GivenUpCalls()
    calls.write_to(tmp_path / "gone" / "stacks.txt")

    assert calls.noted("hangs") == "hangs"


def test_the_model_does_not_read_where_the_stacks_of_a_tool_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text must be the same in every run."""
    calls, never = GivenUpCalls(), threading.Event()
    calls.write_to(tmp_path / "stacks.txt")
    monkeypatch.setattr(protocol, "GIVEN_UP", calls)

    def waits(word: str) -> str:
        """Waits.

        Args:
            word: Any.
        """
        never.wait(60)
        return word

    result = asyncio.run(run_tool(Tool.of(waits), {"word": "x"}, timeout_s=0.2, max_chars=200))
    never.set()

    assert result.text == "error: waits took longer than 0.2 s and was given up"
    assert (
        result.warning == f"the tool waits took longer than 0.2 s and was given up; stacks: {tmp_path / 'stacks.txt'}"
    )
    assert "in waits" in (tmp_path / "stacks.txt").read_text()


def test_a_file_of_stacks_has_an_end(tmp_path: Path) -> None:
    file = tmp_path / "stacks.txt"
    assert append_stacks(file, "one", "x" * 2**24)
    assert not append_stacks(file, "another", "y")
    assert file.stat().st_size < 2**24 + 100
