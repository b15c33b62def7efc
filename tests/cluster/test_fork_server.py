# SPDX-License-Identifier: Apache-2.0
"""Workers that are forked from a process with everything imported: like others when they work, and when they die."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.clusters import one_role
from helpers.on_policy import session_of
from helpers.processes import wait_until
from helpers.ray_scenarios import ENDED_S, commands_of, end_of, kill_at_age, rays, scenario
from podium.cluster import Cluster, WorkerContext
from podium.cluster.fork_request import ANSWER_S
from podium.cluster.processes import children, command_of

Opener = Callable[[], AbstractAsyncContextManager[Cluster]]
FORK_SERVER = b"podium.cluster.fork_server"


class Reporter:
    """Says what its process is like."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def parent(self) -> bytes:
        return command_of(os.getppid())

    def imported(self) -> bool:
        return "podium.roles.learner" in sys.modules

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def folder(self) -> str:
        return os.getcwd()

    def leads_its_group(self) -> bool:
        return os.getpgid(0) == os.getpid()

    def random_numbers(self) -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def exit_status(self) -> int:
        """Of a child that it starts: lost where SIGCHLD is ignored."""
        return subprocess.run(["false"], check=False, timeout=20).returncode


def test_a_forked_worker_is_like_one_that_was_started(open_on_ray: Opener) -> None:
    async def main() -> None:
        async with open_on_ray() as cluster:
            workers = await cluster.start(one_role(Reporter), deadline_s=60)
            group = workers.role("counter", Reporter)

            async def ask(method: Callable[[Reporter], object]) -> list[object]:
                return [answer.value for answer in await group.call_all(method)]

            assert all(FORK_SERVER in parent for parent in await ask(Reporter.parent))  # type: ignore[operator]
            assert await ask(Reporter.imported) == [True, True]
            assert await ask(Reporter.folder) == [os.getcwd()] * 2
            assert await ask(Reporter.leads_its_group) == [True, True]
            assert await ask(Reporter.exit_status) == [1, 1]
            for environment in await ask(Reporter.environment):
                assert isinstance(environment, dict)
                assert environment["RAY_RAYLET_PID"].isdigit()
                # Ray and pytest change the first two; a worker that is connected forgets the token.
                names = set(os.environ) - {"PYTHONBREAKPOINT", "PYTEST_CURRENT_TEST", "RAY_AUTH_TOKEN"}
                assert {name: environment.get(name) for name in names} == {name: os.environ[name] for name in names}
                assert ("OPENBLAS_NUM_THREADS" in environment) == ("OPENBLAS_NUM_THREADS" in os.environ)
            first, second = await ask(Reporter.random_numbers)
            assert all(mine != other for mine, other in zip(first, second, strict=True))  # type: ignore[call-overload]

    asyncio.run(asyncio.wait_for(main(), 90))


def fork_server_of(process: subprocess.Popen[bytes]) -> int:
    (pid,) = [pid for pid in children(process.pid) if FORK_SERVER in command_of(pid)]
    return pid


def wait_for_ray(process: subprocess.Popen[bytes]) -> int:
    """The raylet, which starts before any worker is wanted."""

    def is_there() -> bool:
        return any(command.split(b"\0")[0].endswith(b"/raylet") for command in commands_of(process).values())

    wait_until(is_there, "the raylet", deadline_s=60)
    return rays(process, "raylet")


def workers_of(parent: int) -> list[int]:
    return [pid for pid in children(parent) if command_of(pid).startswith(b"ray::Worker")]


slow = [pytest.mark.slow, pytest.mark.timeout(240)]


class TestDeaths:
    pytestmark = slow

    @pytest.mark.parametrize("which", [0, 3])
    @pytest.mark.parametrize("age_s", [0.0, 0.2, 0.6])
    def test_a_forked_process_that_dies_at_any_age_is_replaced_at_once(
        self, tmp_path: Path, age_s: float, which: int
    ) -> None:
        with scenario("pools", tmp_path, "torch") as process:
            wait_for_ray(process)
            server = fork_server_of(process)
            kill_at_age(lambda: children(server), which, age_s)
            assert end_of(process, tmp_path, within_s=45) == "0 0"
            assert (tmp_path / "output").read_text().count("train: starting 2 processes") <= 2

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_without_the_fork_server_workers_start_all_the_same(self, tmp_path: Path, number: signal.Signals) -> None:
        with scenario("calling", tmp_path, "torch") as process:
            raylet = wait_for_ray(process)
            os.kill(fork_server_of(process), number)
            wait_until((tmp_path / "calling").exists, "the call", deadline_s=ANSWER_S + 70)
            assert len(workers_of(raylet)) == 2
            (tmp_path / "go").touch()
            assert end_of(process, tmp_path, within_s=ENDED_S) == "0 0"

    def test_a_run_survives_the_death_of_the_fork_server(self, tmp_path: Path) -> None:
        with scenario("calling", tmp_path, "torch") as process:
            wait_until((tmp_path / "calling").exists, "the call", deadline_s=90)
            server = fork_server_of(process)
            assert len(workers_of(server)) == 2
            os.kill(server, signal.SIGKILL)
            time.sleep(3)
            (tmp_path / "go").touch()
            assert end_of(process, tmp_path, within_s=ENDED_S) == "0 0"

    @pytest.mark.parametrize("module", ["no_such_module", "ray"])
    def test_modules_that_cannot_be_imported_or_forked_cost_nothing_but_time(self, tmp_path: Path, module: str) -> None:
        with scenario("calling", tmp_path, module) as process:
            raylet = wait_for_ray(process)
            wait_until((tmp_path / "calling").exists, "the call", deadline_s=90)
            assert len(workers_of(raylet)) == 2
            (tmp_path / "go").touch()
            assert end_of(process, tmp_path, within_s=ENDED_S) == "0 0"

    @pytest.mark.parametrize("moment", ["starting", "calling"])
    def test_nothing_outlives_a_killed_controller(
        self, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> None:
        """Not even the folder of the socket."""
        # Short: the address of a socket has 107 bytes.
        temporary = Path(tempfile.mkdtemp(prefix="fork"))
        request.addfinalizer(lambda: shutil.rmtree(temporary, ignore_errors=True))
        monkeypatch.setenv("TMPDIR", str(temporary))
        with scenario(moment, tmp_path, "torch") as process:
            if moment == "starting":
                wait_for_ray(process)
            else:
                wait_until((tmp_path / "calling").exists, "the call", deadline_s=90)
            assert list(temporary.glob("podium-fork-*"))
            process.kill()
            process.wait(10)
            wait_until(lambda: not session_of(process.pid), f"the end of {commands_of(process)}", deadline_s=15)
            wait_until(lambda: not list(temporary.glob("podium-fork-*")), "the end of the folder", deadline_s=5)

    def test_workers_that_only_need_tokenizers_import_no_torch(self, tmp_path: Path) -> None:
        with scenario("tokenizers", tmp_path) as process:
            assert end_of(process, tmp_path, within_s=90) == "2"
