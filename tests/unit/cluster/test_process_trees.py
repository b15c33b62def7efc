# SPDX-License-Identifier: Apache-2.0
"""Killing processes that go on starting others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.processes import wait_until
from podium.cluster import processes
from podium.cluster.processes import kill_trees, look

# Two hundred children, one after the other, and none of them ends by itself.
_PARENT = """
import os, time
for _ in range(200):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.002)
time.sleep(60)
"""


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (place / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(place.name))
    return found


@pytest.mark.parametrize("_", range(5))
def test_no_process_is_left_of_a_parent_that_is_starting_others(_: int) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], start_new_session=True)
    try:
        wait_until(lambda: len(members(parent.pid)) > 20, "some children", deadline_s=20)
        root = look(parent.pid)
        assert root is not None
        kill_trees([root])
        parent.wait(10)
        time.sleep(0.1)
        assert members(parent.pid) == []
    finally:
        for pid in members(parent.pid):
            os.kill(pid, 9)
        parent.wait(10)


@pytest.mark.skipif(sys.platform != "linux", reason="pidfds are of Linux")
@pytest.mark.parametrize("outlives", [False, True])
def test_a_family_ends_with_its_process_or_with_the_supervisor_of_that(tmp_path: Path, outlives: bool) -> None:
    supervisor, family = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    folder = tmp_path / "folder"
    folder.mkdir()
    descriptor = os.pidfd_open(supervisor.pid)
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", processes.__file__, str(descriptor)], stdin=subprocess.PIPE, pass_fds=[descriptor]
    )
    try:
        info = look(family.pid)
        assert info is not None
        assert guard.stdin is not None
        guard.stdin.write(f"family {info.pid} {info.started}\nfolder {folder}\n".encode())
        guard.stdin.write(b"outlives\n" if outlives else b"")
        guard.stdin.close()  # as when the process that it guards dies
        if outlives:
            with pytest.raises(subprocess.TimeoutExpired):
                guard.wait(0.5)
            assert family.poll() is None
            supervisor.kill()
            supervisor.wait()
        assert guard.wait(20) == 0
        assert family.wait(20) == -9
        assert not folder.exists()
    finally:
        os.close(descriptor)
        for each in (guard, supervisor, family):
            each.kill()
            each.wait()
