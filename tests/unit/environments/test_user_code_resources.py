# SPDX-License-Identifier: Apache-2.0
"""Rewards and environments that take memory, leave processes behind or break their process: what fails, and what is
left of it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from scripted import ScriptedPolicy, byte_tokenizer, task

from helpers.processes import wait_until
from podium.data.trajectories import TrajectoryId
from podium.environments.episode import Episode, EpisodeLimits, run_episodes
from podium.environments.grading import Grade
from podium.environments.hosted_episodes import EnvironmentHost
from podium.environments.hosted_grading import HostedGrader
from podium.environments.output_cap import OutputCap
from podium.environments.reward_service import RewardSpec
from podium.environments.rewards import Sample
from podium.environments.transcript import TurnTokenizer
from podium.environments.user_process import MemoryLimit
from podium.errors import RecipeError, RolloutError
from podium.recipe import FunctionReward
from podium.recipe.on_policy import EnvironmentSection

HUNGRY = Path(__file__).with_name("hungry.py")
TIMEOUT_S = 3.0
GIB = 0.5

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="subreapers and /proc are Linux's")
pytestmark = [pytest.mark.slow, needs_linux]


def samples(answers: Sequence[str]) -> list[Sample]:
    return [
        Sample(
            id=TrajectoryId(number, 0), group=number, prompt_text="", messages=None, answer=answer, reference=None,
            row={}, source="test", num_tokens=1,
        )
        for number, answer in enumerate(answers)
    ]  # fmt: skip


def spec(names: Sequence[str], *, gib: float | None = None, timeout_s: float = TIMEOUT_S) -> RewardSpec:
    sections = tuple(FunctionReward.model_validate({"function": f"{HUNGRY}:{name}"}) for name in names)
    return RewardSpec(
        sections={"train": (sections, "reward")}, timeout_s=timeout_s, also_scored=False, memory_gib=gib
    )  # fmt: skip


def graded(
    names: Sequence[str], *batches: Sequence[str], gib: float | None = None, timeout_s: float = TIMEOUT_S,
    output: OutputCap | None = None,
) -> list[list[Grade]]:  # fmt: skip
    """Batch after batch, by the same grader, which is closed then."""

    async def main() -> list[list[Grade]]:
        async with asyncio.timeout(120):
            grader = HostedGrader(
                spec(names, gib=gib, timeout_s=timeout_s), output=output or OutputCap("the reward")
            )  # fmt: skip
            try:
                await grader.open()
                return [await grader.grade("train", samples(batch)) for batch in batches]
            finally:
                grader.close()

    return asyncio.run(main())


def assert_errors(grades: Sequence[Grade], numbers: set[int], why: str) -> None:
    """Samples with these numbers have errors, no others, and each one that the pattern `why` describes."""
    found = {number: grade.error for number, grade in enumerate(grades) if grade.error is not None}
    assert set(found) == numbers, found
    assert all(re.search(why, str(error)) for error in found.values()), found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- memory ---

TOO_MUCH = r"^reward .*memory than grading\.memory_gib allows: .*\b0\.\d{3} GiB.*\b0\.5 GiB"


@pytest.mark.parametrize("how", ["eat", "eat_in_child"])
@pytest.mark.parametrize("name", ["reward", "async_reward"])
def test_a_reward_that_takes_too_much_memory_fails_its_own_call(name: str, how: str) -> None:
    first, second = graded([name], ["ok", how, "ok"], ["ok"], gib=GIB, timeout_s=20.0)

    assert_errors(first, {1}, TOO_MUCH.replace("reward", name, 1))
    assert [grade.total for grade in (first[0], first[2], *second)] == [1.0, 1.0, 1.0]


def test_memory_that_a_thread_takes_is_found_by_calling_one_at_a_time() -> None:
    [grades] = graded(["length", "reward"], ["ok", "eat_in_thread", "ok"], gib=GIB, timeout_s=20.0)

    assert_errors(grades, {1}, TOO_MUCH)
    assert [grade.values for grade in grades] == [(2.0, 1.0), (13.0, None), (2.0, 1.0)]


def test_a_reward_that_leaks_fails_when_the_limit_is_reached_and_goes_on_in_a_new_process() -> None:
    [grades] = graded(["reward"], ["keep"] * 20, gib=GIB)

    num_failed = sum(grade.error is not None for grade in grades)
    # A process has room for 5 to 8 blocks of 64 MiB, depending on what the interpreter takes.
    assert 2 <= num_failed <= 4
    assert_errors(grades, {number for number, grade in enumerate(grades) if grade.error is not None}, TOO_MUCH)


@pytest.mark.parametrize("how", ["share", "reserve", "map"])
def test_memory_that_is_shared_or_not_used_or_of_a_file_does_not_count_again(how: str) -> None:
    [grades] = graded(["reward"], [how], gib=GIB, timeout_s=30.0)

    assert [(grade.total, grade.error) for grade in grades] == [(1.0, None)]


def test_a_limit_below_what_the_process_itself_needs_is_reported_at_the_start() -> None:
    with pytest.raises(RolloutError, match=r"(?s)while it started.*memory than grading\.memory_gib .*0\.001 GiB"):
        graded(["reward"], ["ok"], gib=0.001)


def test_a_limit_is_refused_where_memory_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/proc/self/smaps_rollup")

    with pytest.raises(RecipeError, match=r"^grading\.memory_gib: .*Linux"):
        graded(["reward"], ["ok"], gib=GIB)
    assert MemoryLimit("grading.memory_gib", None).num_bytes is None


# --- processes that are left behind ---


@pytest.mark.parametrize("how", ["fork", "popen", "session", "daemon"])
def test_a_process_that_a_reward_leaves_behind_ends_with_the_grader(tmp_path: Path, how: str) -> None:
    file = tmp_path / "pid"

    [grades] = graded(["reward"], ["ok", f"{how} {file}", "ok"])

    assert [grade.total for grade in grades] == [1.0, 1.0, 1.0]
    pid = int(file.read_text())
    wait_until(lambda: not is_alive(pid), f"the end of the process of {how!r}", deadline_s=15)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("daemon_and_exit", "exit code 3"),
        ("daemon_and_kill", "SIGKILL"),
        ("daemon_and_kill_parent", "SIGKILL"),
        ("daemon_and_hang", f"{TIMEOUT_S:g} s"),
    ],
)
def test_a_process_that_a_reward_leaves_behind_ends_with_the_process_of_the_reward(
    tmp_path: Path, how: str, why: str
) -> None:
    file = tmp_path / "pid"

    async def main() -> list[Grade]:
        async with asyncio.timeout(120):
            grader = HostedGrader(spec(["reward"]), output=OutputCap("the reward"))
            try:
                await grader.open()
                grades = await grader.grade("train", samples(["ok", f"{how} {file}", "ok"]))
                pid = int(file.read_text())
                while is_alive(pid):  # the grader is still open
                    await asyncio.sleep(0.01)
                return grades
            finally:
                grader.close()

    assert_errors(asyncio.run(main()), {1}, f"^reward .*{why}")


@pytest.mark.parametrize("name", ["reward", "async_reward"])
def test_a_fork_that_returns_from_its_reward_does_no_work_of_the_process(tmp_path: Path, name: str) -> None:
    file = tmp_path / "pid"

    [grades] = graded([name], ["ok", f"fork_and_return {file}", "ok", "exit", "ok"])

    assert_errors(grades, {3}, f"^{name} .*exit code 3")
    pid = int(file.read_text())
    wait_until(lambda: not is_alive(pid), "the end of the fork", deadline_s=15)


WORKER = """
import asyncio, sys, time
sys.path[:0] = {path!r}
from test_user_code_resources import samples, spec
from podium.environments.hosted_grading import HostedGrader
from podium.environments.output_cap import OutputCap

async def main():
    grader = HostedGrader(spec(["reward"], gib=2.0), output=OutputCap("the reward"))
    await grader.open()
    await grader.grade("train", samples([{answer!r}]))
    await asyncio.sleep(1e6)

asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["worker", "outer supervisor first"])
def test_nothing_is_left_of_a_worker_that_is_killed(tmp_path: Path, victim: str) -> None:
    """Ray's last act in a worker is to kill the worker's direct children: the second case."""
    file = tmp_path / "pid"
    code = WORKER.format(path=[str(HUNGRY.parent), *sys.path], answer=f"daemon {file}")
    worker = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(file.exists, "the start of the daemon")
        # Two supervisors, the user process and the daemon; the fork in between may take a moment to end.
        wait_until(lambda: len(tree(worker.pid)) == 4, "a tree of four processes", deadline_s=15)
        below = tree(worker.pid)
        assert int(file.read_text()) in below
        if victim != "worker":
            os.kill(below[0], signal.SIGKILL)
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: not any(map(is_alive, below)), "the end of all processes", deadline_s=15)


def tree(pid: int) -> list[int]:
    """Living descendants of a process, from the top."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    pids = [pid]
    for each in pids:
        pids += [child for child, parent in parents.items() if parent == each]
    return [each for each in pids[1:] if is_alive(each)]


# --- exits, output and descriptors ---


@pytest.mark.parametrize("name", ["reward", "async_reward"])
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("sys_exit", r"raised SystemExit: 0 \(.*hungry\.py, line \d+\)"),
        ("system_exit", r"raised SystemExit: enough \(.*hungry\.py, line \d+\)"),
        ("interrupt", r"raised KeyboardInterrupt \(.*hungry\.py, line \d+\)"),
        ("unusual", r"raised Unusual: odd \(.*hungry\.py, line \d+\)"),
        ("exit_zero", r"ended its process \(exit code 0\)"),
        ("kill", r"ended its process \(SIGKILL; .*grading\.memory_gib"),
        ("kill_group", r"ended its process \(SIGKILL; .*grading\.memory_gib"),
        ("close_all", r"closed file descriptors of its process"),
    ],
)
def test_a_reward_that_exits_fails_its_own_call(name: str, how: str, why: str) -> None:
    first, second = graded([name], ["ok", how, "ok"], ["ok"])

    assert_errors(first, {1}, f"^{name} {why}")
    assert [grade.total for grade in second] == [1.0]


@pytest.mark.parametrize("how", ["write_out", "write_err", "print_err"])
def test_output_without_end_is_bounded_on_every_way_out(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    output = OutputCap("the reward", max_bytes=100_000)

    [grades] = graded(["reward"], ["ok", how, "ok"], output=output)

    assert_errors(grades, {1}, rf"^reward .*{TIMEOUT_S:g} s \(grading\.timeout_s\)")
    said = capfd.readouterr()
    assert len(said.out) + said.err.count("x") <= 100_000
    assert said.err.count(f"warning: {output.warning}") == 1


@pytest.mark.parametrize("how", ["close_in", "close_out"])
def test_a_reward_that_closes_its_input_or_output_affects_no_other(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = ""

    def is_printed() -> bool:
        nonlocal said
        said += "".join(capfd.readouterr())
        return said.count("a line\n") == said.count("a line of errors\n") == 2

    first, second = graded(["reward"], [how, "print"], ["print"])

    assert [grade.error for grade in (*first, *second)] == [None, None, None]
    wait_until(is_printed, "the output of both calls that print", deadline_s=15)


# --- calls that never return ---


@pytest.mark.parametrize(("how", "why"), [("ignore", r"grading\.timeout_s"), ("stop", "blocked its process .*3 s")])
def test_a_reward_that_no_signal_reaches_is_replaced_after_its_deadline(how: str, why: str) -> None:
    first, second = graded(["reward"], ["ok", how, "ok"], ["ok"])

    assert_errors(first, {1}, f"^reward .*{why}")
    assert [grade.total for grade in (first[0], first[2], *second)] == [1.0, 1.0, 1.0]


# --- environments ---


def episodes(name: str, how: str, *, gib: float | None = None, timeout_s: float = TIMEOUT_S) -> list[Episode]:
    """Six episodes, of which the third misbehaves."""
    section = EnvironmentSection(
        environment=f"{HUNGRY}:{name}", options={"how": how, "bad": [2]}, concurrency=8, timeout_s=timeout_s,
        max_turns=2, memory_gib=gib,
    )  # fmt: skip
    tokenizer = byte_tokenizer()

    async def main() -> list[Episode]:
        async with asyncio.timeout(120):
            host = EnvironmentHost(section, output=OutputCap("test"))
            try:
                await host.open()
                host.begin_shard()
                work = [
                    (TrajectoryId(number, 0), dataclasses.replace(task(), row={"number": number}))
                    for number in range(6)
                ]
                limits = EpisodeLimits(max_turns=2, max_new_tokens=200, timeout_s=timeout_s)
                stream = run_episodes(
                    host.make, work, ScriptedPolicy(tokenizer, ["answer"]), TurnTokenizer(tokenizer), limits=limits,
                    concurrency=8, greedy=False,
                )  # fmt: skip
                return sorted([episode async for episode in stream], key=lambda each: each.id)
            finally:
                host.end_shard()
                host.close()

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["Hungry", "HungryInThreads"])
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("eat", r"^step: used more memory than environment\.memory_gib allows: .*\b0\.5 GiB"),
        ("kill", r"^step: ended its process \(SIGKILL; .*environment\.memory_gib"),
        ("interrupt", r"^step: RuntimeError: KeyboardInterrupt"),
        ("unusual", r"^step: RuntimeError: Unusual: odd"),
        ("close_all", r"^step: closed file descriptors of its process"),
    ],
)
def test_an_environment_that_takes_memory_or_exits_fails_its_own_episode(name: str, how: str, why: str) -> None:
    found = episodes(name, how, gib=GIB, timeout_s=20.0)

    assert {episode.id.prompt_index for episode in found if episode.error is not None} == {2}
    assert re.search(why, str(found[2].error)), found[2].error
    assert [episode.reward for episode in found if episode.error is None] == [1.0] * 5


def test_a_daemon_of_an_environment_ends_with_its_process(tmp_path: Path) -> None:
    file = tmp_path / "pid"

    found = episodes("Hungry", f"daemon {file}")

    assert [episode.error for episode in found] == [None] * 6
    pid = int(file.read_text())
    wait_until(lambda: not is_alive(pid), "the end of the daemon", deadline_s=15)
