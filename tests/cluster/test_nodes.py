# SPDX-License-Identifier: Apache-2.0
"""Several nodes on one machine: what is placed where, a node that dies, a node that joins, and a Ray that is joined,
missed or started. Each scenario has its own process and its own Ray."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import wait_until

SCRIPT = Path(__file__).with_name("node_scenarios.py")
TESTS = SCRIPT.parents[1]


def _path() -> str:
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def scenario(name: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Runs a scenario with a folder of its own, for Ray's files and for what it says; nothing that has a file open
    there outlives it."""
    # Short, and not under pytest's own: Ray keeps sockets there, and their paths have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="pn", dir="/tmp"))
    environment = {**os.environ, "RAY_TMPDIR": str(folder), "PYTHONPATH": _path(), "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    with (folder / "output").open("wb") as output, (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), name, str(folder)],
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process, folder
    finally:
        process.kill()
        process.wait(20)
        for left in users_of(folder):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        wait_until(lambda: not users_of(folder), f"the end of {name}'s processes {users_of(folder)}", deadline_s=20)
        shutil.rmtree(folder, ignore_errors=True)


def users_of(folder: Path) -> dict[int, str]:
    """Living processes that write to files of this folder or were started with its name, with their titles."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            command = entry.joinpath("cmdline").read_bytes().decode(errors="replace")
            if entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            files = [os.readlink(file) for file in entry.joinpath("fd").iterdir()]
            if str(folder) in command or any(file.startswith(str(folder)) for file in files):
                found[int(entry.name)] = command.replace("\0", " ")[:80]
    return found


def report(folder: Path) -> dict[str, Any]:
    """The last line that a scenario has printed of itself; it must have ended well if it had no more to say."""
    lines = [line for line in (folder / "output").read_text().splitlines() if line.startswith("{")]
    assert lines, (folder / "errors").read_text()[-6000:]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def measured(name: str, *, limit_s: float) -> dict[str, float]:
    """Runs a scenario to its end, after which none of its processes is left; returns what it measured."""
    with scenario(name) as (process, folder):
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} took more than {limit_s:.0f} s:\n{(folder / 'errors').read_text()[-4000:]}")
        assert code == 0, (folder / "errors").read_text()[-6000:]
        wait_until(lambda: not users_of(folder), f"the end of {name}'s processes", deadline_s=60)
        found = report(folder)
        print(name, found)
        return found


@pytest.mark.slow
def test_pools_are_placed_as_they_ask_on_a_cluster_that_is_joined_and_left_up() -> None:
    measured("placing", limit_s=240)


@pytest.mark.slow
def test_a_node_that_dies_under_calls_is_noticed_and_its_workers_come_back_on_another() -> None:
    times = measured("death", limit_s=240)
    assert times["noticed_s"] < 5
    assert times["loss_reported_s"] < 10


@pytest.mark.slow
def test_a_pool_without_room_is_placed_when_a_node_joins_and_says_so_when_none_does() -> None:
    measured("joining", limit_s=180)


@pytest.mark.slow
def test_a_generator_joins_on_a_new_node_and_leaves_when_it_is_drained() -> None:
    times = measured("membership", limit_s=280)
    assert times["noticed_s"] < 15


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lost_node", "stopped_node"])  # stopped: by `ray stop`
def test_a_node_with_a_learner_goes_and_the_run_goes_on_from_the_copy_on_another_node(how: str) -> None:
    measured(how, limit_s=280)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lost_generator", "stopped_generator"])
def test_a_node_with_a_generator_goes_and_the_run_goes_on_with_fewer(how: str) -> None:
    measured(how, limit_s=280)


@pytest.mark.slow
def test_a_controller_that_is_killed_leaves_its_workers_in_a_cluster_of_others_to_the_next_one() -> None:
    times = measured("joined_attach", limit_s=280)
    assert times["abandoned_s"] < 20


@pytest.mark.slow
def test_a_wrong_address_fails_fast_and_says_what_to_do() -> None:
    measured("wrong_address", limit_s=60)


@pytest.mark.slow
def test_an_address_where_something_else_listens_fails_at_its_deadline() -> None:
    measured("not_ray", limit_s=40)


@pytest.mark.slow
def test_a_local_ray_listens_on_loopback_only_and_ends_with_a_killed_controller() -> None:
    with scenario("local") as (process, folder):
        wait_until(
            lambda: (folder / "output").read_text().endswith("}\n") or process.poll() is not None,
            "the scenario's first words",
        )
        started = report(folder)
        assert started["outside"] == []
        assert len(started["workers"]) == 2
        assert all(Path(f"/proc/{worker}").exists() for worker in started["workers"])
        process.kill()
        began = time.monotonic()
        wait_until(
            lambda: not any(title.startswith("ray::Worker") for title in users_of(folder).values()),
            f"the end of the workers {users_of(folder)}",
            deadline_s=20,
        )
        print(f"workers gone after {time.monotonic() - began:.1f} s")
        wait_until(
            lambda: not any("raylet" in title.split(" ")[0] for title in users_of(folder).values()),
            f"the end of Ray's node {users_of(folder)}",
            deadline_s=20,
        )
