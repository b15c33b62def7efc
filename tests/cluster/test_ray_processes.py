# SPDX-License-Identifier: Apache-2.0
"""Processes of a local Ray that are killed or stopped at chosen moments from its start on: the run goes on or ends in
time with a word of who it was, and no process is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from helpers.on_policy import session_of
from helpers.processes import wait_until
from helpers.ray_scenarios import ENDED_S, GUARD_S, HEARTBEAT_S, commands_of, end_of, kill_at_age, rays, scenario
from podium.cluster.processes import children_of_thread, command_of, look

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_process_killed_before_it_has_become_a_worker_is_replaced(tmp_path: Path) -> None:
    """Ray's driver waited without end for a worker that died before it had registered."""
    with scenario("starting", tmp_path) as process:

        def importing() -> list[int]:
            """A worker's process that has begun to import: it does not call itself a worker yet."""
            workers = [
                pid for pid, command in commands_of(process).items()
                if b"default_worker.py" in command and b"raylet/raylet" not in command
            ]  # fmt: skip
            return [pid for pid in workers if (found := look(pid)) is not None and found.cpu_s > 0.2]

        wait_until(lambda: bool(importing()), "the start of a worker's process", deadline_s=60)
        os.kill(importing()[0], signal.SIGKILL)
        # Ray itself gives up a process that does not register after a minute.
        assert end_of(process, tmp_path, within_s=50) == "0 0"


@pytest.mark.parametrize("which", [0, 3])
@pytest.mark.parametrize("age_s", [0.0, 0.5, 1.5])
def test_a_process_that_dies_at_any_age_is_replaced_at_once(tmp_path: Path, age_s: float, which: int) -> None:
    """Ray gives up a process that has not registered after a minute. One that died before anybody had seen it alive was
    waited for so long, and who started anew could lose the new process to another pool that waited."""
    with scenario("pools", tmp_path) as process:
        output = tmp_path / "output"
        wait_until(lambda: "runners: starting 1 process" in output.read_text(), "the first request", deadline_s=60)
        raylet = rays(process, "raylet")
        agents = [pid for pid in children_of_thread(raylet, raylet) if command_of(pid).startswith(b"ray::")]
        kill_at_age(lambda: [pid for pid in children_of_thread(raylet, raylet) if pid not in agents], which, age_s)
        assert end_of(process, tmp_path, within_s=45) == "0 0"
        # No pool is started anew again because processes that the first attempt has left over end some seconds later.
        assert output.read_text().count("train: starting 2 processes") <= 2


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
@pytest.mark.parametrize("moment", ["building", "calling"])
def test_the_death_of_a_process_of_ray_ends_the_run_with_its_name(tmp_path: Path, name: str, moment: str) -> None:
    with scenario(moment, tmp_path) as process:
        reached = "building-1" if moment == "building" else "calling"
        wait_until((tmp_path / reached).exists, reached, deadline_s=90)
        victim = rays(process, name)
        os.kill(victim, signal.SIGKILL)
        ended = end_of(process, tmp_path, within_s=ENDED_S)
        assert re.match(rf"RayDiedError: .*{name} \(process {victim}\) died", ended)


def test_the_death_of_ray_while_it_starts_ends_the_run(tmp_path: Path) -> None:
    with scenario("starting", tmp_path) as process:
        found: list[int] = []

        def started() -> bool:
            found[:] = [pid for pid, command in commands_of(process).items() if b"/gcs_server\0" in command]
            return bool(found)

        wait_until(started, "the start of gcs_server", deadline_s=60)
        wait_until(lambda: (look(found[0]) or pytest.fail("gone")).cpu_s > 0.05, "its work", deadline_s=60)
        os.kill(found[0], signal.SIGKILL)
        # Where the driver waits for it in a call that holds Python's lock, the guard ends it.
        assert process.wait(GUARD_S + ENDED_S) in (0, -signal.SIGKILL)
        assert f"gcs_server (process {found[0]}) died" in (tmp_path / "output").read_text()
        wait_until(lambda: not session_of(process.pid), f"the end of {commands_of(process)}", deadline_s=15)


@pytest.mark.parametrize("moment", ["building", "calling"])
def test_a_stopped_raylet_ends_the_run_after_the_heartbeat_timeout(tmp_path: Path, moment: str) -> None:
    with scenario(moment, tmp_path) as process:
        reached = "building-1" if moment == "building" else "calling"
        wait_until((tmp_path / reached).exists, reached, deadline_s=90)
        victim = rays(process, "raylet")
        os.kill(victim, signal.SIGSTOP)
        ended = end_of(process, tmp_path, within_s=HEARTBEAT_S + ENDED_S)
        assert re.match(rf"RayDiedError: .*raylet \(process {victim}\).*SIGSTOP", ended)


@pytest.mark.parametrize("moment", ["building", "calling"])
def test_a_stopped_worker_counts_as_dead_after_the_heartbeat_timeout(tmp_path: Path, moment: str) -> None:
    """While roles are built it is tried again; in a call of the user it is told."""
    with scenario(moment, tmp_path) as process:
        reached = "building-1" if moment == "building" else "calling"
        wait_until((tmp_path / reached).exists, reached, deadline_s=90)
        victim = max(pid for pid, command in commands_of(process).items() if command.startswith(b"ray::Worker"))
        os.kill(victim, signal.SIGSTOP)
        wait_until(lambda: look(victim) is None, f"the end of the stopped process {victim}", deadline_s=60)
        (tmp_path / "go").touch()
        ended = end_of(process, tmp_path, within_s=ENDED_S + 30)
        if moment == "building":
            assert ended == "0 0"
        else:
            assert re.match(rf"WorkerDiedError: .*process {victim}\b.*SIGSTOP", ended)


def test_nothing_outlives_a_killed_controller(tmp_path: Path) -> None:
    """Ray's agents went on for a minute."""
    with scenario("calling", tmp_path) as process:
        wait_until((tmp_path / "calling").exists, "the call", deadline_s=90)
        process.kill()
        process.wait(10)
        wait_until(lambda: not session_of(process.pid), f"the end of {commands_of(process)}", deadline_s=15)


def test_a_controller_that_cannot_notice_the_death_of_ray_is_ended_with_a_word(tmp_path: Path) -> None:
    """As in a call that holds Python's lock: here it is stopped itself."""
    with scenario("calling", tmp_path) as process:
        wait_until((tmp_path / "calling").exists, "the call", deadline_s=90)
        victim = rays(process, "gcs_server")
        process.send_signal(signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        assert process.wait(GUARD_S + ENDED_S) == -signal.SIGKILL
        wait_until(lambda: not session_of(process.pid), f"the end of {commands_of(process)}", deadline_s=15)
        assert f"gcs_server (process {victim}) died" in (tmp_path / "output").read_text()
